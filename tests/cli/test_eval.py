"""`vlmrl eval`: a run's checkpoints and models side by side, the blanked control, and the results as JSON."""

import json
import sys
from pathlib import Path

import pytest

from vlmrl.cli import main as cli

pytestmark = pytest.mark.slow

RECIPE = """
import vlmrl
from PIL import Image
from vlmrl import Checkpoint, Config, Data, Eval, Optim, Rollout, Task, Train


def tasks(index, seed):
    image = Image.new("RGB", (32, 32), ["red", "blue"][index % 2])
    prompt = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Say a."}]}]
    return Task(f"say/{index}", prompt, [image], answer="a", source=f"s{index % 2}")


def reward(text, task):
    return float("a" in text)


def config():
    return Config(
        name="say",
        data=Data(generator=tasks, size=16, held_out=4),
        reward=reward,
        rollout=Rollout(group_size=4, max_tokens=128, max_response_tokens=16),
        optim=Optim(lr=1e-3),
        train=Train(steps=2, groups_per_batch=4, image_check=False),
        checkpoint=Checkpoint(every=1),
    )
"""


def vlmrl(*arguments: object) -> None:
    before, sys.argv = sys.argv, ["vlmrl", *map(str, arguments)]
    try:
        cli.main()
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a recipe, and its run of two steps."""
    folder = tmp_path_factory.mktemp("say")
    (folder / "recipe.py").write_text(RECIPE)
    vlmrl("train", folder / "recipe.py", "--output-dir", folder / "runs")
    return folder


def test_checkpoints_and_a_model_stand_in_one_table(folder, tmp_path, capsys):
    run = folder / "runs/say"
    models = [run, run / "checkpoints/step000001", run / "checkpoints/step000002"]
    options = ["--eval.samples-per-task", "4", "--eval.blank-images", "--out", tmp_path / "a/results.json"]
    vlmrl("eval", folder / "recipe.py", "--output-dir", folder / "runs", *options, "--models", *models)
    shown = capsys.readouterr().out
    assert "pass@4" in shown and "by source" in shown and "paired over the same tasks" in shown
    document = json.loads((tmp_path / "a/results.json").read_text())
    names = [(row["model"], row["blanked"]) for row in document["results"]]
    assert names == [(str(model), blanked) for model in models for blanked in (False, True)]
    last, _, first, _, second, _ = [row["task_rewards"] for row in document["results"]]
    assert last == second != first  # the model is the last checkpoint, and one step makes another
    assert all(len(rewards) == 4 for rewards in last.values()) and len(last) == 4
    assert [each["tasks"] for each in document["differences"]] == [4] * 5
    assert {"vlmrl", "torch", "transformers", "python"} <= document["versions"].keys()
    assert document["settings"]["eval"]["samples_per_task"] == 4
    own = [json.loads(path.read_text()) for path in (run / "evaluations").glob("*.json")]
    assert sorted(each["results"][0]["model"] for each in own) == sorted(map(str, models))


def test_greedy_samples_of_a_task_are_equal(folder, tmp_path):
    out = tmp_path / "results.json"
    options = ["--eval.samples-per-task", "2", "--eval.temperature", "0", "--model.path", folder / "runs/say/model"]
    vlmrl("eval", folder / "recipe.py", "--output-dir", folder / "runs", "--out", out, *options)
    (row,) = json.loads(out.read_text())["results"]
    assert row["model"] == str(folder / "runs/say/model")
    assert all(len(set(rewards)) == 1 for rewards in row["task_rewards"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.held-out", "0"], "there are no held-out tasks to evaluate on"),
        (["--model.path", "tiny:qwen3", "--eval.blank-images"], "eval.blank_images must be False with a text model"),
        (["--models", "runs"], "runs"),
        (["--out", "recipe.py/out.json"], "set --out to another"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(folder, options, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="1"):
        vlmrl("eval", "recipe.py", *options)
    error = capsys.readouterr().err
    assert error.startswith("vlmrl: ") and message in error and "Traceback" not in error
