"""`vlmrl eval`: a run's checkpoints, models and an API's model side by side, the blanked control, and the results as JSON."""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from testing.fake_api import fake_api

from vlmrl.cli import main as cli
from vlmrl.run import eval_program as program

pytestmark = pytest.mark.slow

RECIPE = """
import vlmrl
from PIL import Image
from vlmrl import Checkpoint, Config, Data, Eval, Optim, Rollout, Task, Train


def tasks(index, seed):
    image = Image.new("RGB", (32, 32), ["red", "blue"][index % 2])
    prompt = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": f"{index}?"}]}]
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


def test_the_results_of_a_model_stay_if_a_later_one_fails(folder, tmp_path, capsys):
    broken, out = tmp_path / "broken", tmp_path / "results.json"
    shutil.copytree(folder / "runs/say/model", broken)
    (broken / "model.safetensors").write_bytes(b"x")
    options = ["--models", folder / "runs/say/model", broken, "--out", out]
    with pytest.raises((Exception, SystemExit)):
        vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, *options)
    document, shown = json.loads(out.read_text()), " ".join(capsys.readouterr().out.split())
    (row,) = document["results"]
    assert row["model"] == str(folder / "runs/say/model") and "pass@1" in shown
    assert document["not_evaluated"] == [str(broken)] and "without those of" in shown


def test_the_results_of_a_model_are_in_the_file_while_the_next_one_plays(folder, tmp_path, monkeypatch):
    """The next one may need more memory than there is: its process is killed, and no code runs after that."""
    original, out = program.evaluate_model, tmp_path / "results.json"
    seen = []

    def looked(*args):
        seen.append(json.loads(out.read_text()) if out.exists() else None)
        original(*args)

    monkeypatch.setattr(program, "evaluate_model", looked)
    models = [str(folder / "runs/say/model"), str(folder / "runs/say/checkpoints/step000001")]
    vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, "--models", *models, "--out", out)
    first, second = seen
    assert first is None
    assert [row["model"] for row in second["results"]] == models[:1] and second["not_evaluated"] == models[1:]
    assert json.loads(out.read_text())["not_evaluated"] == []


def test_the_results_stay_if_the_pass_with_blanked_images_fails(folder, tmp_path, monkeypatch):
    original = program.evaluate_run

    async def fails_blanked(*args, label, **kwargs):
        if label == "blanked":
            raise OSError("the disk is full")
        return await original(*args, label=label, **kwargs)

    monkeypatch.setattr(program, "evaluate_run", fails_blanked)
    model, out = folder / "runs/say/model", tmp_path / "results.json"
    options = ["--models", model, "--eval.blank-images", "--out", out]
    with pytest.raises((OSError, SystemExit)):
        vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, *options)
    document = json.loads(out.read_text())
    assert [row["blanked"] for row in document["results"]] == [False]
    assert document["not_evaluated"] == [f"{model} (images blanked)"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_results_stay_if_a_scheduler_or_the_end_of_the_terminal_stops_a_later_pass(
    folder, tmp_path, monkeypatch, number
):
    original = program.evaluate_run

    async def stopped(*args, label, **kwargs):
        if label == "blanked":
            os.kill(os.getpid(), number)
            await asyncio.get_running_loop().create_future()
        return await original(*args, label=label, **kwargs)

    monkeypatch.setattr(program, "evaluate_run", stopped)
    model, out = folder / "runs/say/model", tmp_path / "results.json"
    options = ["--models", model, "--eval.blank-images", "--out", out]
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(128 + number)):
            vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, *options)
    finally:
        signal.signal(number, handler)
    document = json.loads(out.read_text())
    assert [row["blanked"] for row in document["results"]] == [False] and len(document["not_evaluated"]) == 1


def test_a_run_whose_folder_cannot_be_written_is_evaluated(folder, tmp_path, capsys):
    run, out = tmp_path / "theirs/say", tmp_path / "results.json"
    shutil.copytree(folder / "runs/say", run)
    shutil.rmtree(run / "evaluations", ignore_errors=True)
    (run / "evaluations").write_text("")  # the superuser may write everywhere
    vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, "--models", run, "--out", out)
    assert len(json.loads(out.read_text())["results"]) == 1
    assert "are not in its run's folder, which cannot be written" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("aside", ["say.1", "elsewhere"])
def test_the_results_go_to_no_run_that_took_the_name_meanwhile(aside, folder, tmp_path, monkeypatch, capsys):
    """The folder that was evaluated gets them if the new run has set it aside."""
    original, run = program.evaluate_run, tmp_path / "say"
    shutil.copytree(folder / "runs/say", run, ignore=shutil.ignore_patterns("evaluations"))

    async def replaced(*args, **kwargs):
        result = await original(*args, **kwargs)
        shutil.copytree(run.rename(tmp_path / aside), run)
        return result

    monkeypatch.setattr(program, "evaluate_run", replaced)
    vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, "--models", run)
    assert not (run / "evaluations").exists()
    assert len(list((tmp_path / aside).glob("evaluations/*"))) == (aside == "say.1")
    moved = "which was moved or deleted meanwhile" in " ".join(capsys.readouterr().out.split())
    assert moved == (aside == "elsewhere")


def test_greedy_samples_of_a_task_are_equal(folder, tmp_path):
    out = tmp_path / "results.json"
    options = ["--eval.samples-per-task", "2", "--eval.temperature", "0", "--model.path", folder / "runs/say/model"]
    vlmrl("eval", folder / "recipe.py", "--output-dir", folder / "runs", "--out", out, *options)
    (row,) = json.loads(out.read_text())["results"]
    assert row["model"] == str(folder / "runs/say/model")
    assert all(len(set(rewards)) == 1 for rewards in row["task_rewards"].values())


def test_an_apis_model_is_the_baseline_of_the_policy(folder, tmp_path, capsys):
    asked = []

    def respond(body):
        asked.append(body["messages"][0]["content"][1]["text"])
        return {"content": "a" if asked.count(asked[-1]) == 1 else "no"}

    options = ["--eval.samples-per-task", "2", "--out", tmp_path / "out.json", "--models", "tiny:qwen3_vl"]
    with fake_api(respond) as (api, url):
        vlmrl("eval", folder / "recipe.py", "--output-dir", tmp_path, "--api", url, "--model", "gpt", *options)
    document = json.loads((tmp_path / "out.json").read_text())
    first, second = document["results"]
    assert (first["model"], first["scores"]["reward"]["mean"], first["trajectories"]) == ("gpt", 0.5, 8)
    assert first["scores"]["pass_at"]["2"]["mean"] == 1.0 and first["sampled_tokens"] == {"mean": 2.0, "max": 2}
    assert second["model"] == "tiny:qwen3_vl" and second["task_rewards"].keys() == first["task_rewards"].keys()
    (difference,) = document["differences"]
    assert (difference["model"], difference["baseline"], difference["tasks"]) == ("tiny:qwen3_vl", "gpt", 4)
    assert len(api.requests) == 8 and "gpt: 96 tokens spent" in capsys.readouterr().out


def test_an_apis_model_and_a_model_of_the_same_name_are_two_rows(folder, tmp_path, capsys):
    """As with a model that a server serves, compared with the same model here: the table had the second row alone."""
    options = ["--out", tmp_path / "out.json", "--models", "tiny:qwen3_vl"]
    with fake_api(lambda body: {"content": "a"}) as (_, url):
        vlmrl(
            "eval", folder / "recipe.py", "--output-dir", tmp_path, "--api", url, "--model", "tiny:qwen3_vl", *options
        )
    document, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    table = printed.partition("held-out tasks:")[2].partition("trajectories")[0]  # the rewards
    assert [row["model"] for row in document["results"]] == ["tiny:qwen3_vl (API)", "tiny:qwen3_vl"]
    assert (table.count("tiny:qwen3_vl (API)"), table.count("tiny:qwen3_vl")) == (1, 2)


def test_the_api_alone_loads_no_weights(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrl.run.eval_program.build_run", None)
    with fake_api(lambda body: {"content": "a"}) as (_, url):
        vlmrl(
            "eval",
            folder / "recipe.py",
            "--output-dir",
            tmp_path,
            "--api",
            url,
            "--model",
            "gpt",
            "--out",
            tmp_path / "out.json",
        )
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["scores"]["reward"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.held-out", "0"], "there are no held-out tasks to evaluate on"),
        (["--model.path", "tiny:qwen3", "--eval.blank-images"], "eval.blank_images must be False with a text model"),
        (["--models", "runs"], "runs"),
        (["--out", "recipe.py/out.json"], "set --out to another"),
        (["--api", "localhost"], "--api must be a URL"),
        (["--api", "http://127.0.0.1:1"], "--api needs --model"),
        (["--budget", "5"], "--budget needs --api"),
        (["--api", "http://127.0.0.1:1", "--model", "m", "--api-body", "[1]"], "--api-body must be a JSON object"),
        (["--api", "http://127.0.0.1:1", "--model", "m", "--budget", "0"], "--budget must be positive"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(folder, options, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="1"):
        vlmrl("eval", "recipe.py", *options)
    error = capsys.readouterr().err
    assert error.startswith("vlmrl: ") and message in error and "Traceback" not in error
