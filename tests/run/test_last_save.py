"""A run that has done all of its steps, and cannot write its model, saves a checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import vlmrl
from vlmrl import Config, Data, Lora, Model, Rollout, Train, WarmStart
from vlmrl.model.loading import LoadedModel
from vlmrl.utils.output_files import OutputError

pytestmark = pytest.mark.slow


def task(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "Say something.", "answer": "a"}


def demonstrate(task: Any, turn: int) -> str:
    return "a"


def is_ascii(text: str, task: Any) -> float:
    return float(text.isascii())


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """As a disk on which an adapter's checkpoint has room, and the whole model has none."""
    save = LoadedModel.save

    def refused(model: LoadedModel, folder: Path, *more: Any, **options: Any) -> None:
        if folder.name == ".model.part":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(model, folder, *more, **options)

    patch.setattr(LoadedModel, "save", refused)


@pytest.mark.parametrize(("steps", "saved"), [(2, "step000002"), (0, "warm_start000001")])
def test_a_finished_run_whose_model_cannot_be_written_can_be_continued(tmp_path, monkeypatch, steps, saved):
    config = Config(
        name="last",
        output_dir=str(tmp_path),
        model=Model(path="tiny:qwen3", device="cpu", lora=Lora(rank=2)),
        data=Data(generator=task, size=32, held_out=2),
        reward=is_ascii,
        rollout=Rollout(group_size=2, max_response_tokens=4, max_tokens=64),
        warm_start=WarmStart(demonstrate=demonstrate, steps=1, trajectories_per_step=2),
        train=Train(steps=steps, groups_per_batch=1),
    )
    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(OutputError, match="model cannot be written: No space left on device"):
            vlmrl.train(config)
    assert (tmp_path / "last/checkpoints" / saved / "run.json").exists()
    result = vlmrl.train(config, resume=True)
    assert (result.folder / "model/config.json").exists() and (result.folder / "adapters").exists()
    assert [row["step"] for row in result.metrics if "groups/trained" in row] == [*range(1, steps + 1)]
