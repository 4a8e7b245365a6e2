"""A run's model in Hugging Face form: from a checkpoint or a run, merged or as adapters, in a folder or on the Hub."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from testing.runs import short_quickstart
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlmrl.config import Checkpoint, Config, Eval, Lora, Model, WarmStart
from vlmrl.config.saved import read_config
from vlmrl.model.loading import load_reader
from vlmrl.report.records import plain
from vlmrl.run import model_export
from vlmrl.run.checkpointing import LoopState, save_model, save_stopped
from vlmrl.run.model_export import export_model
from vlmrl.run.program import run_training
from vlmrl.run.run_folder import newest_weights
from vlmrl.train.checkpoint import Checkpoints
from vlmrl.utils.output_files import OutputError

pytestmark = pytest.mark.slow


def trained(folder: Path, lora: Lora) -> Config:
    config = short_quickstart(folder, checkpoint=Checkpoint(every=1))
    config = replace(config, warm_start=WarmStart(), eval=Eval(), model=replace(config.model, lora=lora))
    run_training(replace(config, train=replace(config.train, steps=1, groups_per_batch=2)))
    return config


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("full"), Lora()).folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("lora"), Lora(rank=2)).folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("kind", ["full", "adapted"])
def test_a_checkpoint_is_exported_as_the_run_saves_its_model(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    export_model(run / "checkpoints/step000001", str(tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (run / "model").iterdir()}
    assert_equal(weights(tmp_path / "out"), weights(run / "model"))
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {(run / "config.json").stat().st_mode}


def test_an_export_replaces_no_run_that_began_in_its_folder_meanwhile(full, tmp_path, monkeypatch):
    """It takes minutes, at whose end it deleted what had its name: a run's folder, or another export."""
    load, metrics = model_export.load_model, tmp_path / "out/metrics.jsonl"

    def slow(*arguments):
        metrics.parent.mkdir()
        metrics.write_text("{}")
        return load(*arguments)

    monkeypatch.setattr(model_export, "load_model", slow)
    with pytest.raises(ValueError, match="was filled meanwhile"):
        export_model(full / "checkpoints/step000001", str(tmp_path / "out"))
    assert metrics.read_text() == "{}" and list(tmp_path.rglob("*")) == [metrics.parent, metrics]


@pytest.mark.parametrize("has_fewer_files", [False, True])
def test_a_model_that_its_run_replaces_meanwhile_is_not_exported_in_part(full, tmp_path, monkeypatch, has_fewer_files):
    """As `best` of a run that goes on: the files after the change were those of another model than the files before."""
    best, newer, copy = tmp_path / "best", tmp_path / "newer", shutil.copyfileobj
    for folder in (best, newer):
        shutil.copytree(full / "model", folder)
        (folder / "best.json").write_text(json.dumps({"reward": 0.0 if folder == best else 1.0}))
    if has_fewer_files:
        shutil.rmtree(newer)
        newer.mkdir()

    def replaced_after_the_first_file(*files):
        copy(*files)
        if newer.exists():
            best.rename(tmp_path / ".best.old")
            newer.rename(best)

    monkeypatch.setattr(shutil, "copyfileobj", replaced_after_the_first_file)
    with pytest.raises(ValueError, match="best was replaced while it was copied: export it again"):
        export_model(best, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    if not has_fewer_files:
        export_model(best, str(tmp_path / "out"))
        assert json.loads((tmp_path / "out/best.json").read_text()) == {"reward": 1.0}


def test_transformers_loads_it_with_its_processor_and_template(full, tmp_path):
    export_model(full / "checkpoints/step000001", str(tmp_path / "out"))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()  # tied, and saved once
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    own = load_reader(Model(path="tiny:qwen3_vl"), full.parent / ".models")
    assert processor.chat_template == own.renderer.chat_template
    assert processor.image_processor.size == own.image_processor.size
    messages = [{"role": "user", "content": [{"type": "text", "text": "What color?"}]}]
    assert processor.apply_chat_template(messages, add_generation_prompt=True).startswith("<|im_start|>user")


def test_adapters_that_cannot_be_written_leave_the_earlier_ones_whole(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "x")

    trainer = SimpleNamespace(named_adapters=lambda: [("base_model.model.q_proj.lora_A.weight", torch.ones(2, 2))])
    model = SimpleNamespace(path="x", is_on_meta=False, save=lambda folder, weights: (folder / "config.json").touch())
    first = Model(path="x", lora=Lora(rank=2))
    run = SimpleNamespace(config=SimpleNamespace(model=first), model=model, folder=tmp_path, colocated=False)
    asyncio.run(save_model(run, trainer))
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    run.config.model = replace(first, lora=Lora(rank=4))
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutputError, match="adapters cannot be written: No space left on device"):
        asyncio.run(save_model(run, trainer))
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()} == before


def test_a_stopped_run_without_checkpoints_saves_its_model_and_adapters_before_one(tmp_path):
    models: list[bool] = []
    trainer = SimpleNamespace(
        named_adapters=lambda: [("base_model.model.q_proj.lora_A.weight", torch.ones(2, 2))],
        differs_from_start=True,
        save=lambda folder: models.append((tmp_path / "model").exists()),
    )
    model = SimpleNamespace(path="x", is_on_meta=False, save=lambda folder, weights: (folder / "config.json").touch())
    settings = SimpleNamespace(
        model=Model(path="x", lora=Lora(rank=2)), checkpoint=Checkpoint(every=0), save_model=True
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    run = SimpleNamespace(config=settings, model=model, folder=tmp_path, colocated=False, checkpoints=checkpoints)
    said: list[str] = []
    asyncio.run(save_stopped(run, trainer, LoopState(step=3), SimpleNamespace(say=said.append)))
    assert load_file(tmp_path / "adapters/adapter_model.safetensors") and not said
    assert models == [True] and checkpoints.newest() == tmp_path / "checkpoints/step000003"
    assert newest_weights(tmp_path) == tmp_path / "model"  # of the same step; servers load no checkpoint
    assert newest_weights(tmp_path, "adapters") == tmp_path / "adapters"

    run.folder, run.checkpoints, settings.save_model = tmp_path / "b", Checkpoints(tmp_path / "b/checkpoints", 2), False
    run.folder.mkdir()
    asyncio.run(save_stopped(run, trainer, LoopState(step=3), SimpleNamespace(say=said.append)))
    assert run.checkpoints.newest() is None and not (run.folder / "model").exists()  # it saves no weights at all


def test_adapters_give_the_merged_model_on_their_real_base(adapted, tmp_path):
    from peft import PeftModel

    export_model(adapted / "checkpoints/step000001", str(tmp_path / "adapters"), adapters=True)
    saved = load_file(adapted / "adapters/adapter_model.safetensors")
    assert_equal(load_file(tmp_path / "adapters/adapter_model.safetensors"), saved)
    settings = (adapted / "adapters/adapter_config.json").read_text()
    assert "tiny:" not in settings and str(adapted.parent / ".models") in settings
    base = AutoModelForImageTextToText.from_pretrained(next((adapted.parent / ".models").glob("tiny-*")))
    merged = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged.state_dict()[name], weights(adapted / "model")[name])


def test_of_a_run_the_weights_that_it_wrote_last_are_exported(adapted, tmp_path):
    def exported(name: str, **options: bool) -> Path:
        return export_model(adapted, str(tmp_path / name), **options)

    assert exported("saved") == adapted / "model"
    assert exported("own", adapters=True) == adapted / "adapters"
    # As a run that went on, and was killed before it saved a model.
    later = shutil.copytree(adapted / "checkpoints/step000001", adapted / "checkpoints/step000002")
    try:
        state = json.loads((later / "run.json").read_text())
        (later / "run.json").write_text(json.dumps(state | {"step": 2}))
        (adapted / "model/config.json").touch()
        (adapted / "adapters/adapter_config.json").touch()
        assert exported("later") == exported("later-own", adapters=True) == later
    finally:
        shutil.rmtree(later)


def test_what_cannot_be_exported_is_said(full, tmp_path):
    with pytest.raises(ValueError, match="has none"):
        export_model(full, str(tmp_path / "out"), adapters=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="it holds no model, nor a checkpoint"):
        export_model(tmp_path, str(tmp_path / "out"))
    with pytest.raises(ValueError, match="there is no such folder"):
        export_model(tmp_path / "none", str(tmp_path / "out"))
    with pytest.raises(ValueError, match="new or an empty folder"):
        export_model(full, str(full))


@pytest.mark.parametrize("to", ["model/hf", "link/hf", "model/a/b/../hf"])
def test_no_folder_is_exported_into_itself(tmp_path, to, monkeypatch):
    monkeypatch.setattr(model_export, "_write", lambda *_: pytest.fail("it would be copied into itself"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("model")
    with pytest.raises(ValueError, match="must not be in the folder that is exported"):
        export_model(tmp_path, str(tmp_path / to))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_the_hub_gets_it_when_it_is_named(full, tmp_path, monkeypatch):
    calls = []

    class FakeApi:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, repo_id, folder_path):
            calls.append((repo_id, {path.name for path in folder_path.iterdir()}))

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    export_model(full, "hub:me/zoomer")
    files = {path.name for path in (full / "model").iterdir()}
    assert calls == [("me/zoomer", {"private": True, "exist_ok": True}), ("me/zoomer", files)]

    def unreachable(self, name, **options):
        raise HfHubHTTPError.__bases__[0]("Name or service not known")

    monkeypatch.setattr(FakeApi, "create_repo", unreachable)
    with pytest.raises(OSError, match="--to hub:me/zoomer: the model cannot be uploaded: Name or service not known"):
        export_model(full, "hub:me/zoomer")


def test_a_checkpoint_as_the_model_says_how_to_export_it(full):
    checkpoint = full / "checkpoints/step000001"
    with pytest.raises(ValueError, match=f"vlmrl export {checkpoint} --to FOLDER"):
        load_reader(Model(path=str(checkpoint)), full.parent)
    with pytest.raises(ValueError, match=r"model\.path must be a model in Hugging Face form"):
        load_reader(Model(path=str(full)), full.parent)


def test_the_config_of_a_run_can_be_read_again(full):
    config = read_config(full)
    assert plain(config) == plain(short_quickstart(full.parents[1])) | {
        name: plain(getattr(config, name)) for name in ("checkpoint", "train", "warm_start", "eval")
    }
    task = config.data.generator
    assert isinstance(task, str) and task.endswith("datasets/shapes.py:make_task")
