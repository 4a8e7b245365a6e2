"""`vlmrl eval --api`: the baseline of an API's model beside the policy."""

import json
import sys

import pytest
from testing.fake_api import fake_api

from vlmrl.cli import main as cli

pytestmark = pytest.mark.slow

RECIPE = """
from PIL import Image
from vlmrl import Config, Data, Rollout, Task


def tasks(index, seed):
    image = Image.new("RGB", (32, 32), ["red", "blue"][index % 2])
    prompt = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": f"{index}?"}]}]
    return Task(f"say/{index}", prompt, [image], answer="a")


def reward(text, task):
    return float("a" in text)


def config():
    return Config(
        name="say",
        data=Data(generator=tasks, size=16, held_out=4),
        reward=reward,
        rollout=Rollout(max_tokens=128, max_response_tokens=16),
    )
"""


def vlmrl(*arguments: object) -> None:
    before, sys.argv = sys.argv, ["vlmrl", *map(str, arguments)]
    try:
        cli.main()
    finally:
        sys.argv = before


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def test_an_apis_model_is_the_baseline_of_the_policy(recipe, tmp_path, capsys):
    asked = []

    def respond(body):
        asked.append(body["messages"][0]["content"][1]["text"])
        return {"content": "a" if asked.count(asked[-1]) == 1 else "no"}

    options = ["--eval.samples-per-task", "2", "--out", tmp_path / "out.json", "--models", "tiny:qwen3_vl"]
    with fake_api(respond) as (api, url):
        vlmrl("eval", recipe, "--output-dir", tmp_path, "--api", url, "--model", "gpt", *options)
    document = json.loads((tmp_path / "out.json").read_text())
    first, second = document["results"]
    assert (first["model"], first["scores"]["reward"]["mean"], first["trajectories"]) == ("gpt", 0.5, 8)
    assert first["scores"]["pass_at"]["2"]["mean"] == 1.0 and first["sampled_tokens"] == {"mean": 2.0, "max": 2}
    assert second["model"] == "tiny:qwen3_vl" and second["task_rewards"].keys() == first["task_rewards"].keys()
    (difference,) = document["differences"]
    assert (difference["model"], difference["baseline"], difference["tasks"]) == ("tiny:qwen3_vl", "gpt", 4)
    assert len(api.requests) == 8 and "gpt: 96 tokens spent" in capsys.readouterr().out


def test_the_api_alone_loads_no_weights(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrl.run.eval_program.build_run", None)
    with fake_api(lambda body: {"content": "a"}) as (_, url):
        vlmrl("eval", recipe, "--output-dir", tmp_path, "--api", url, "--model", "gpt", "--out", tmp_path / "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["scores"]["reward"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api", "localhost"], "--api must be a URL"),
        (["--api", "http://127.0.0.1:1"], "--api needs --model"),
        (["--budget", "5"], "--budget needs --api"),
        (["--api", "http://127.0.0.1:1", "--model", "m", "--api-body", "[1]"], "--api-body must be a JSON object"),
        (["--api", "http://127.0.0.1:1", "--model", "m", "--budget", "0"], "--budget must be positive"),
    ],
)
def test_options_that_do_not_fit_are_one_line(recipe, options, message, capsys):
    with pytest.raises(SystemExit, match="1"):
        vlmrl("eval", recipe, *options)
    error = capsys.readouterr().err
    assert error.startswith("vlmrl: ") and message in error and "Traceback" not in error
