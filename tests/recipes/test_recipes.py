"""The recipes, run as a user would: short, from another folder, on tiny models."""

import inspect
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from testing.browser import need_chromium
from testing.client_episodes import need
from transformers import AutoConfig

from vlmrl import Config, Data, EvalData
from vlmrl.cli.recipe import errors_in_one_line
from vlmrl.cli.train import TrainCommand
from vlmrl.config.code import load_object

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = {  # of the agents; zoom_script.py is started by zoom_command.py
    "agents/zoom_openai": "openai",
    "agents/zoom_openai_agents": "agents",
    "agents/zoom_smolagents": "smolagents",
    "agents/zoom_langgraph": "langgraph",
    "agents/zoom_command": "openai",
}
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem != "minimal_grpo") + list(PACKAGES)
SMALL = [
    *(
        "--model.device",
        "cpu",
        "--train.steps",
        "2",
        "--train.groups-per-batch",
        "2",
        "--train.groups-per-step",
        "None",
    ),
    *("--rollout.group-size", "2", "--rollout.max-response-tokens", "8", "--rollout.truncated-reward", "0.0"),
    *("--eval.every", "0", "--eval.no-blank-images", "--no-save-model"),
]
EXTRA: dict[str, list[str]] = {  # what else a recipe needs to be small
    "search": ["--env-options.retriever", "nothing"],
    "miniwob": ["--rollout.max-tokens", "8192"],  # the tiny tokenizer needs more tokens for the tool's schema
}
SHARED = Path(os.environ.get("VLMRL_SHARED", ROOT.parent / "shared"))
SMALL_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}


def test_minimal_grpo_is_a_page_and_runs(tmp_path, monkeypatch, capsys):
    recipe = ROOT / "recipes/minimal_grpo.py"
    assert len(recipe.read_text().splitlines()) <= 200
    options = ["--steps", "2", "--warm-steps", "2", "--groups", "2", "--group-size", "2"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(recipe), *options])
    runpy.run_path(str(recipe), run_name="__main__")
    assert "step    2  reward" in capsys.readouterr().out


@pytest.fixture(params=RECIPES)
def recipe(request) -> str:
    """Each recipe in turn, if the libraries of its agent are installed."""
    if request.param in PACKAGES:
        need(PACKAGES[request.param])
    return request.param


def test_all_recipes_of_agents_are_tested():
    files = {f"agents/{path.stem}" for path in (ROOT / "recipes/agents").glob("*.py")}
    assert files == {*PACKAGES, "agents/zoom_script"}


def test_a_recipe_is_a_page_whose_help_is_its_documentation(recipe, capsys):
    file = ROOT / f"recipes/{recipe}.py"
    assert len(file.read_text().splitlines()) <= 100
    with pytest.raises(SystemExit, match="0"):
        TrainCommand(str(file)).run(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert " ".join(inspect.getmodule(_config(file)).__doc__.split()) in output
    assert "--optim.lr FLOAT" in output and "Trajectories per task." in output


def test_a_recipe_runs_two_steps(recipe, tmp_path, monkeypatch, qwen3_vl):
    """On a tiny model, with tiny data of the recipe's own columns and with responses that are noise."""
    if recipe.startswith("miniwob"):
        need_chromium()
    file = ROOT / f"recipes/{recipe}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    options = [*SMALL, "--model.path", str(qwen3_vl), "--output-dir", str(tmp_path / "runs"), *EXTRA.get(recipe, [])]
    config = _config(file)()
    if config.warm_start.steps:
        options += ["--warm-start.steps", "2", "--warm-start.trajectories-per-step", "2"]
    for name in config.sft.data:
        talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
        (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 4)
        options += [
            f"--sft.data.{name}.path",
            "talks.jsonl",
            f"--sft.data.{name}.held-out",
            "1",
            "--sft.rows-per-step",
            "1",
        ]
    for name, data, columns in data_of(config):
        options += small_data(name, data, columns, tmp_path)
    try:
        with errors_in_one_line():
            TrainCommand(str(file)).run(options)
    except SystemExit as end:
        if "pip install" in str(end.__cause__):
            pytest.skip(str(end.__cause__))
        raise
    rows = [json.loads(line) for line in next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["trajectories"] == 4 and row["logprob_mismatch/max"] < 1e-4 for row in steps)


def _config(file: Path) -> Callable[[], Config]:
    return load_object(f"{file}:config")


def data_of(config: Config) -> Iterator[tuple[str, Data | EvalData, dict[str, str]]]:
    """How the options of each dataset of a config begin, the dataset, and its columns."""
    yield from (
        (name, data, config.data.columns) for name, data in (("data", config.data), ("eval.data", config.eval.data))
    )
    for name, part in config.mixture.items():
        yield f"mixture.{name}.data", part.data, part.data.columns
        yield f"mixture.{name}.eval-data", part.eval_data, part.data.columns


def small_data(name: str, data: Data | EvalData, named: dict[str, str], folder: Path) -> list[str]:
    """Options for four tasks: of the recipe's own generator, or rows with a question and, for images, an image."""
    if data.generator is not None:
        return [f"--{name}.size", "4"]
    if data.path is None:
        return []
    Image.new("RGB", (64, 64), "red").save(folder / "red.png")
    values = {"prompt": "What color is it?", "answer": "red", "images": ["red.png"], "id": "a", "source": "b"}
    columns = {"prompt": "prompt", "answer": "answer", "images": "images"} | named
    row = {column: values[key] for key, column in columns.items()}
    rows = folder / "rows.jsonl"
    rows.write_text((json.dumps(row) + "\n") * 4)
    return [f"--{name}.path", str(rows), f"--{name}.split", "train"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    TrainCommand(str(ROOT / "recipes/quickstart.py")).run(["--dry-run", "--train.max-staleness", "2"])
    output = capsys.readouterr().out
    assert "ZoomEnv, at most 2 turns and 256 tokens" in output and "4096 tasks, 256 held out" in output
    assert "warmstart 400 steps of 32 scripted trajectories, lr 0.001" in output
    assert "asynchronous, 2 updates ahead at most; too old: wait; corrected by the loss's ratio" in output
    assert not (tmp_path / "runs/quickstart").exists()


def small_model(folder: Path) -> Path:
    """Qwen3-VL's processor, tokenizer and chat template beside a small configuration of the real vocabulary."""
    shutil.copytree(SHARED / "data/qwen/qwen3-vl", folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    (folder / "config.json").write_text((SHARED / "data/qwen/configs/Qwen3-VL-2B-Instruct.config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    for part, changes in ((text, SMALL_TEXT), (config.vision_config, SMALL_VISION)):
        for name, value in changes.items():
            setattr(part, name, value)
    text.head_dim = 32
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [6, 5, 5]}
    text.pad_token_id = None
    config.save_pretrained(folder)
    return folder


def test_geo3k_runs_two_steps_on_real_problems(tmp_path):
    """Real diagrams, processor and tokenizer; random weights, so responses are noise and are cut off: rewards are 0."""
    if not (SHARED / "data/geometry3k").is_dir():
        pytest.skip(f"no shared data at {SHARED}: set VLMRL_SHARED")
    load_object(f"{ROOT}/datasets/geo3k.py:prepare")(tmp_path, str(SHARED / "data/geometry3k"))
    options = [
        *("--model.path", f"random:{small_model(tmp_path / 'model')}", "--model.device", "cpu"),
        *("--data.path", tmp_path / "train.parquet", "--eval.data.path", tmp_path / "validation.parquet"),
        *("--train.steps", 2, "--train.groups-per-batch", 2, "--rollout.group-size", 4, "--eval.data.size", 2),
        *("--rollout.max-response-tokens", 16, "--model.max-image-pixels", 128 * 128),
        *("--output-dir", tmp_path / "runs", "--no-save-model"),
    ]
    TrainCommand(str(ROOT / "recipes/geo3k.py")).run([str(option) for option in options])
    rows = [json.loads(line) for line in (tmp_path / "runs/geo3k/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2
    assert all(row["images/mean"] == 1.0 and row["logprob_mismatch/max"] < 1e-4 for row in steps)
    assert torch.isfinite(torch.tensor([row["grad_norm"] for row in steps])).all()
