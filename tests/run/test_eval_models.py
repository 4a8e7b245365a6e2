"""Which weights the paths of `--models` name."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl.config import Config, Lora, Model
from vlmrl.report.records import plain
from vlmrl.run.eval_program import EvalModel, resolve_eval_models

TRAINED = Model(path="tiny:qwen3", lora=Lora(rank=4, alpha=8, targets=("q_proj",)), freeze=("projector",))
GIVEN = Config(model=Model(path="other", device="cuda:1", dtype="bfloat16", max_image_pixels=4096))


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with two checkpoints and a model that is older than the second."""
    folder = tmp_path / "runs/x"
    for number, name in enumerate(("checkpoints/step000010", "model", "checkpoints/step000020")):
        (folder / name).mkdir(parents=True)
        file = folder / name / ("config.json" if name == "model" else "run.json")
        file.write_text("{}")
        if name != "model":
            (folder / name / "trainer").mkdir()
        os.utime(file, (1000 + number, 1000 + number))
    (folder / "config.json").write_text(json.dumps(plain(Config(model=TRAINED))))
    return folder


def only(path: str | Path) -> EvalModel:
    (model,) = resolve_eval_models([str(path)], GIVEN)
    return model


def test_without_paths_it_is_the_model_of_the_config():
    assert resolve_eval_models([], GIVEN) == [EvalModel("other", GIVEN.model)]


def test_a_hub_name_replaces_the_model_and_its_adapters():
    config = replace(GIVEN, model=replace(TRAINED, path="random:tiny:qwen3"))
    (model,) = resolve_eval_models(["Qwen/Qwen3-VL-2B-Instruct"], config)
    assert model.settings == Model(path="Qwen/Qwen3-VL-2B-Instruct") and model.run_folder is None


def test_a_models_folder_belongs_to_the_run_around_it(run):
    assert only(run / "model") == EvalModel(
        str(run / "model"), replace(GIVEN.model, path=str(run / "model")), run_folder=run
    )


def test_a_checkpoint_has_the_model_settings_of_its_run(run):
    checkpoint = run / "checkpoints/step000010"
    settings = replace(TRAINED, device="cuda:1", dtype="bfloat16")
    assert only(checkpoint) == EvalModel(str(checkpoint), settings, checkpoint, run)


def test_a_runs_folder_is_the_weights_that_it_wrote_last(run):
    assert only(run).checkpoint == run / "checkpoints/step000020"
    os.utime(run / "model/config.json", (2000, 2000))
    assert only(run) == EvalModel(str(run), replace(GIVEN.model, path=str(run / "model")), run_folder=run)


def test_a_run_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(plain(Config())))
    with pytest.raises(ValueError, match=r"neither a model nor a checkpoint.*--save-model or with --checkpoint.every"):
        only(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2]", "{broken", "{}", '{"model_type": "qwen3"}'])
def test_a_config_that_is_no_runs_is_passed_over(run, text):
    for folder in (run / "checkpoints", run / "checkpoints/step000010"):
        (folder / "config.json").write_text(text)
    assert only(run / "checkpoints/step000010").run_folder == run
    (run / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json of its run.*vlmrl export"):
        only(run / "checkpoints/step000010")


def test_a_checkpoint_outside_its_run_is_refused(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json of its run.*vlmrl export"):
        only(tmp_path)


def test_a_model_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match="once, but 'a' is given twice"):
        resolve_eval_models(["a", "b", "a"], GIVEN)


def test_a_misspelt_run_is_not_taken_for_a_hub_name(run, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    (run.parent / "quickstart").mkdir()
    with pytest.raises(ValueError, match=r"^model 'runs/quickstrt' does not exist.*Close names there: quickstart"):
        resolve_eval_models(["runs/quickstrt"], GIVEN)
    with pytest.raises(ValueError, match=r"^model 'runs/quickstart/checkpoints/step000020' does not exist"):
        resolve_eval_models(["runs/quickstart", "runs/quickstart/checkpoints/step000020"], GIVEN)


def test_a_name_without_a_folder_is_no_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (named,) = resolve_eval_models(["tiny:qwen3_vl"], replace(GIVEN, output_dir="."))
    assert named.settings.path == "tiny:qwen3_vl"


def test_settings_of_another_version_are_refused(run):
    config = plain(Config())
    config["model"]["gone"] = 1
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="another version of vlmrl"):
        only(run / "checkpoints/step000010")
