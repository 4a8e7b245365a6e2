"""Checkpoints are complete or absent, and restore what was saved."""

import importlib
import os
import pathlib
import pickle
import random
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from testing.fsdp_script import samples_of
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from vlmrl.config import Algo, Lora, Model, Optim
from vlmrl.model.loading import load_model
from vlmrl.train import checkpoint as checkpoint_module
from vlmrl.train.checkpoint import (
    Checkpoints,
    SavedTensors,
    load_random,
    load_weights,
    random_state,
    save_random,
    save_tensors,
)
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.utils.output_files import OutputError

pytestmark = pytest.mark.slow


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(checkpoints: Checkpoints, step: int, text: str = "x") -> None:
    with checkpoints.new(step) as folder:
        (folder / "deep").mkdir()
        (folder / "deep/file").write_text(text)


def write_twice(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.new(step) as folder:
        (folder / "half").mkdir()
        (folder / "half").mkdir()


def test_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    for step in (5, 10, 100):
        write(checkpoints, step)
    assert names(tmp_path) == ["step000010", "step000100"]
    assert checkpoints.newest() == tmp_path / "step000100"


def test_copies_under_other_names_are_no_checkpoints_and_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 5)
    (tmp_path / "step000005").rename(tmp_path / "step000005.good")
    (tmp_path / "step000006.tar.gz").touch()
    (tmp_path / "step000007").touch()
    assert checkpoints.newest() is None
    for step in (8, 999_999, 1_000_000):
        write(checkpoints, step)
    assert checkpoints.newest() == tmp_path / "step1000000"
    assert names(tmp_path) == ["step000005.good", "step000006.tar.gz", "step000007", "step1000000"]


def test_a_checkpoint_that_was_not_finished_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    with pytest.raises(OutputError, match="File exists"):
        write_twice(checkpoints, 2)
    assert checkpoints.newest() == tmp_path / "step000001"
    write(checkpoints, 2)
    assert names(checkpoints.newest()) == ["deep"]  # nothing of the half one is left


def test_a_checkpoint_is_replaced_by_a_later_one_of_its_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1, "old")
    write(checkpoints, 1, "new")
    assert names(tmp_path) == ["step000001"]
    assert (tmp_path / "step000001/deep/file").read_text() == "new"


def test_random_numbers_go_on(tmp_path):
    save_random(tmp_path, 1, random_state())
    draws = [(random.random(), np.random.rand(), torch.rand(1).item()) for _ in range(2)]
    load_random(tmp_path, 1)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws[0]
    load_random(tmp_path, 2)  # which had no part in it
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws[1]


def trainer_of(folder, *, dtype: str = "float32", rank: int = 0, kl: float = 0.0) -> Trainer:
    lora = Lora(rank=rank)
    loaded = load_model(Model(path=str(folder), device="cpu", dtype=dtype, lora=lora), folder, seed=0)
    reference = loaded.policy.frozen_copy() if kl else None
    optim = Optim(lr=1e-3, schedule="linear", warmup_steps=2)
    spec = TrainerSpec(Algo(loss="ppo", kl_coef=kl), optim, total_steps=9, tokens_per_micro_batch=64)
    return Trainer(loaded.policy, spec, reference=reference)


@pytest.mark.parametrize("case", [{"dtype": "bfloat16"}, {"rank": 2}, {"kl": 0.1}])
def test_a_restored_trainer_takes_the_very_steps_that_the_first_one_takes(case, qwen3_vl, tmp_path):
    """Float32 masters, adapters and the reference of a KL penalty included."""
    torch.manual_seed(3)
    first = trainer_of(qwen3_vl, **case)
    rows = samples_of(load_model(Model(path=str(qwen3_vl)), tmp_path, 0), [True, False, False, False])
    if first.reference is not None:
        with torch.no_grad():
            next(first.reference.parameters()).add_(0.1)  # as after a warm start
    first.step(rows)
    first.step(rows)
    first.save(tmp_path)
    expected = [first.step(rows).metrics for _ in range(2)]
    second = trainer_of(qwen3_vl, **case)
    assert second.restore(tmp_path) == 2
    assert [second.step(rows).metrics for _ in range(2)] == expected
    assert second.steps_done == 4 and expected[0]["lr"] != expected[1]["lr"]
    for (name, mine), (_, theirs) in zip(second.named_weights(), first.named_weights(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_checkpoint_of_other_trained_parts_is_refused(qwen3_vl, tmp_path):
    trainer_of(qwen3_vl).save(tmp_path)
    with pytest.raises(ValueError, match=r"made by another model or with other trained parts.*Use the settings"):
        trainer_of(qwen3_vl, rank=2).restore(tmp_path)


def test_a_rate_that_was_changed_counts(qwen3_vl, tmp_path):
    rows = samples_of(load_model(Model(path=str(qwen3_vl)), tmp_path, 0), [False, False])
    first = trainer_of(qwen3_vl)
    first.step(rows)
    first.save(tmp_path)
    second = trainer_of(qwen3_vl)
    second._optim = replace(second._optim, lr=5e-4)
    second.restore(tmp_path)
    assert second.step(rows).metrics["lr"] == pytest.approx(5e-4 * 2 / 3)


@pytest.mark.parametrize("case", [{}, {"dtype": "bfloat16"}, {"rank": 2}])
def test_the_weights_of_a_checkpoint_are_read_without_a_trainer(case, qwen3_vl, tmp_path):
    first = trainer_of(qwen3_vl, **case)
    first.step(samples_of(load_model(Model(path=str(qwen3_vl)), tmp_path, 0), [True, False, False, False]))
    first.save(tmp_path)
    policy = trainer_of(qwen3_vl, **case).policy
    load_weights(tmp_path, policy)
    for (name, mine), (_, theirs) in zip(policy.named_parameters(), first.policy.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_weights_of_other_trained_parts_are_refused(qwen3_vl, tmp_path):
    trainer_of(qwen3_vl).save(tmp_path)
    with pytest.raises(ValueError, match=r"other trained parts.*such as 'weight/.*Use the settings"):
        load_weights(tmp_path, trainer_of(qwen3_vl, rank=2).policy)


def test_changed_bytes_within_a_tensor_are_noticed(tmp_path):
    weights = {"weight/a": torch.ones(8, 16), "weight/b": torch.zeros(4)}
    save_tensors(tmp_path, weights)
    save_random(tmp_path, 0, random_state())
    for file, place, read in (
        ("trainer/__0_0.distcp", b"\0\0\x80\x3f" * 8, lambda: SavedTensors(tmp_path).load(weights)),
        ("random0.pt", random_state()["torch"].numpy().tobytes()[:64], lambda: load_random(tmp_path, 0)),
    ):
        content = bytearray((tmp_path / file).read_bytes())
        read()
        content[content.index(place)] ^= 1
        (tmp_path / file).write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"cannot be read: .*{Path(file).name} has other bytes than were written.* delete this"
        ):
            read()


class Code:
    """Pickled, it makes the folder ``marker`` when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_checkpoint_of_python_3_13_is_read(tmp_path, monkeypatch):
    """There, `pathlib` pickles its classes as those of `pathlib._local`: no run could be resumed."""
    with monkeypatch.context() as newer:
        newer.setitem(sys.modules, "pathlib._local", pathlib)
        newer.setattr(type(tmp_path), "__module__", "pathlib._local")
        save_tensors(tmp_path, {"weight/a": torch.ones(2)})
    assert b"pathlib._local" in (tmp_path / "trainer/.metadata").read_bytes()
    assert SavedTensors(tmp_path).shapes == {"weight/a": (2,)}
    SavedTensors(tmp_path).load(weights := {"weight/a": torch.zeros(2)})
    assert weights["weight/a"].tolist() == [1, 1]


def test_pickled_code_in_a_checkpoint_is_not_run(tmp_path):
    marker = tmp_path / "code-has-run"
    save_tensors(tmp_path, {"weight/a": torch.ones(2), "step/a": torch.ones((), dtype=torch.bfloat16)})
    assert SavedTensors(tmp_path).shapes == {"weight/a": (2,), "step/a": ()}
    (tmp_path / "trainer/.metadata").write_bytes(pickle.dumps(Code(marker)))
    with pytest.raises(
        ValueError, match=r"it names \w+\.mkdir, which no checkpoint needs\. Use one that is whole and that you trust"
    ):
        SavedTensors(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint needs"):
        SavedTensors(tmp_path).load({"weight/a": torch.ones(2)})
    torch.save(Code(marker), tmp_path / "random0.pt")
    with pytest.raises(ValueError, match="cannot be read: UnpicklingError: Weights only load failed"):
        load_random(tmp_path, 0)
    assert not marker.exists()


def test_a_tensor_of_a_checkpoint_is_no_pickled_value(tmp_path):
    """torch reads an entry of bytes with `torch.load(weights_only=False)`, also in place of a tensor of the optimizer."""
    marker, tensors = tmp_path / "code-has-run", {"weight/a": torch.ones(2), "exp_avg_sq/a": torch.ones(2)}
    save_tensors(tmp_path, tensors)
    file, code = tmp_path / "trainer/.metadata", tmp_path / "trainer/code.pt"
    torch.save(Code(marker), code)
    metadata = pickle.loads(file.read_bytes())
    index = next(each for each in metadata.storage_data if each.fqn == "exp_avg_sq/a")
    part = replace(metadata.storage_data[index], relative_path=code.name, offset=0, length=code.stat().st_size)
    metadata.storage_data[MetadataIndex("exp_avg_sq/a")] = part
    metadata.state_dict_metadata["exp_avg_sq/a"] = BytesStorageMetadata()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"BytesStorageMetadata, which no checkpoint needs"):
        SavedTensors(tmp_path).load(tensors)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    ],
)
def test_the_metadata_of_a_checkpoint_change_no_class(tmp_path, module, name):
    """They set attributes of the classes that they named, for the whole process: the next look at them found other entries than the
    one that was checked, and `vlmrl export` ran the code in those."""
    save_tensors(tmp_path, {"weight/a": torch.ones(2)})
    file = tmp_path / "trainer/.metadata"
    found = getattr(importlib.import_module(module), name)
    # what `found.changed = 1` would be as the state of a pickled object
    change = f"c{module}\n{name}\n".encode() + b"(N}X\x07\0\0\0changedK\x01stb0"
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)[:-1] + change + b".")
    try:
        with pytest.raises(ValueError, match=r"it sets attributes of a (type|function), which no checkpoint needs"):
            SavedTensors(tmp_path)
        assert not hasattr(found, "changed")
    finally:
        with suppress(AttributeError):
            del found.changed


@pytest.mark.parametrize("name", ["Metadata", "StorageMeta"])
def test_metadata_of_another_type_are_refused(name, tmp_path):
    """With the class in place of an object, its attributes were set for the whole process."""
    save_tensors(tmp_path, {"weight/a": torch.ones(2)})
    content = f"ctorch.distributed.checkpoint.metadata\n{name}\n.".encode()
    (tmp_path / "trainer/.metadata").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read: ValueError: its metadata is a type"):
        SavedTensors(tmp_path)
    (tmp_path / "trainer/.metadata").write_bytes(content.replace(b"\n.", b"\n)R."))
    with pytest.raises(ValueError, match="cannot be read: "):
        SavedTensors(tmp_path)


@pytest.mark.parametrize("elsewhere", ["absolute", "above", "link", "pipe", "folder"])
def test_a_checkpoint_names_no_file_elsewhere(tmp_path, elsewhere):
    checkpoint, others = tmp_path / "checkpoint", tmp_path / "private.distcp"
    save_tensors(checkpoint, {"weight/a": torch.ones(2)})
    file = checkpoint / "trainer/.metadata"
    metadata = pickle.loads(file.read_bytes())
    (name,) = {part.relative_path for part in metadata.storage_data.values()}
    if elsewhere != "folder":
        (checkpoint / "trainer" / name).rename(others)
    if elsewhere == "link":
        (checkpoint / "trainer" / name).symlink_to(others)
    for part in metadata.storage_data.values():
        part.relative_path = {"absolute": str(others), "above": "../../private.distcp"}.get(elsewhere, name)
    file.write_bytes(pickle.dumps(metadata))
    if elsewhere == "pipe":
        file.unlink()
        os.mkfifo(file)
    if elsewhere == "folder":
        (checkpoint / "trainer").rename(tmp_path / "private")
        (checkpoint / "trainer").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match="which is no regular file of its own"):
        SavedTensors(checkpoint).load({"weight/a": torch.zeros(2)})


@pytest.mark.parametrize("replaced", ["trainer/__0_0.distcp", "trainer"])
def test_a_link_that_takes_the_place_of_a_part_after_the_look_at_it_is_not_read(replaced, tmp_path, monkeypatch):
    checkpoint, private = tmp_path / "checkpoint", tmp_path / "private"
    save_tensors(private, {"weight/a": torch.ones(2)})
    save_tensors(checkpoint, {"weight/a": torch.zeros(2)})
    read_metadata = checkpoint_module._Reader.read_metadata

    def then_replaced(reader):
        metadata = read_metadata(reader)
        if not (checkpoint / replaced).is_symlink():
            shutil.move(checkpoint / replaced, tmp_path / "aside")
            (checkpoint / replaced).symlink_to(private / replaced)
        return metadata

    tensors = {"weight/a": torch.zeros(2)}
    monkeypatch.setattr(checkpoint_module._Reader, "read_metadata", then_replaced)
    with pytest.raises(ValueError, match="must be a regular file, but it is a link"):
        SavedTensors(checkpoint).load(tensors)
    assert not tensors["weight/a"].any()


def test_the_metadata_of_a_checkpoint_are_read_once(qwen3_vl, tmp_path, monkeypatch):
    """Between two readings the file may become another one, whose code the second, torch's own, would run; and for thousands of
    tensors each reading takes seconds."""
    trainer = trainer_of(qwen3_vl)
    trainer.save(tmp_path)
    readings, load = [], checkpoint_module._MetadataUnpickler.load
    monkeypatch.setattr(
        "torch.distributed.checkpoint.filesystem.pickle.load", lambda file: pytest.fail("read by torch")
    )
    monkeypatch.setattr(checkpoint_module._MetadataUnpickler, "load", lambda self: (readings.append(1), load(self))[1])
    trainer.restore(tmp_path)
    assert len(readings) == 1
