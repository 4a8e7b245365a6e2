"""Every command that the README and the docs print, from the line as it stands.

`vlmrl` commands are run in a folder with what the pages tell a reader to write; what would take too long, or wait for somebody, is in
``REPLACED`` with its reason: then everything is parsed, loaded and resolved, and only the last call is replaced.
A command of a program that has no place here fails the test.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from testing.browser import need_chromium
from testing.run_folders import write_run_folder

from vlmrl.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "envs/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PROGRAMS = "vlmrl|python|torchrun|make|pip|git|export"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) .*")
REPLACED = {
    "train": (
        "vlmrl.run.program.run_training",
        "trains for minutes to days; tests/docs/test_readme.py trains the README's",
    ),
    "sft": ("vlmrl.run.program.run_training", "trains for minutes to days; tests/run/test_sft.py is short"),
    "eval": (
        "vlmrl.run.eval_program.run_evaluation",
        "needs a trained model; tests/docs/test_readme.py evaluates the README's",
    ),
    "collect": ("vlmrl.run.collector.run_collection", "plays for minutes to days; tests/run/test_collect.py is short"),
    "reproduce": (
        "vlmrl.cli.reproduce.run_reproduction",
        "trains for hours; tests/cli/test_reproduce.py runs a short one",
    ),
    "export": (
        "vlmrl.run.model_export.export_model",
        "needs a trained model; tests/run/test_model_export.py exports real ones",
    ),
    "view": ("vlmrl.utils.http_server.serve_on", "serves until it is interrupted; without --serve, it is run"),
    "env": ("vlmrl.env.remote.env_server.serve_env", "serves until it is interrupted"),
    "retriever": ("vlmrl.retrieval.retrieval_server.serve_retriever", "serves until it is interrupted"),
}
RUN = ("plan", "play", "data", "init", "doctor", "view")
"""Subcommands that are run to their end."""


def commands_of(page: Path) -> list[str]:
    """The command lines in a page's blocks without a language, or of a shell."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if language in ("", "bash", "sh") for line in _joined(block)]
    return [line for line in lines if COMMAND.fullmatch(line)]


def _joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


COMMANDS = [pytest.param(line, id=f"{page.stem}: {line[:60]}") for page in PAGES for line in commands_of(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder like the repository, with the files that the pages tell a reader to write."""
    made = tmp_path_factory.mktemp("reader")
    for name in ("envs", "recipes", "datasets"):
        shutil.copytree(ROOT / name, made / name)
    env, recipe, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    guide = (ROOT / "docs/your_own_environment.md").read_text()
    (made / "guess.py").write_text(env)
    (made / "recipe.py").write_text(recipe)
    (made / "dots.py").write_text(re.findall(r"```python\n# dots\.py\n(.*?)```", guide, re.DOTALL)[0])
    agents = (ROOT / "docs/agents.md").read_text()
    (made / "sums.py").write_text(re.findall(r"```python\n# sums\.py\n(.*?)```", agents, re.DOTALL)[0])
    browser = (ROOT / "docs/browser.md").read_text()
    for body, name in re.findall(r"```\w+\n((?:# |<!-- )(counter\.\w+).*?)```", browser, re.DOTALL):
        (made / name).write_text(body)
    (made / "corpus.jsonl").write_text(json.dumps({"id": "a", "text": "A passage."}) + "\n")
    for name in ("quickstart", "shuffled", "guess", "guess-episodes", "vlm"):
        write_run_folder(made / "runs" / name)
    (made / "runs/zoom_episodes").mkdir()
    talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
    (made / "runs/zoom_episodes/episodes.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 9)
    (made / "data/geo3k").mkdir(parents=True)
    for split in ("train", "validation"):
        (made / f"data/geo3k/{split}.parquet").write_bytes(b"")
    return made


def vlmrl_command(words, monkeypatch):
    """Run it, up to what ``REPLACED`` replaces."""
    reached = []
    if words[0] in REPLACED:
        monkeypatch.setattr(REPLACED[words[0]][0], lambda *values, **named: reached.append(values))
    else:
        assert words[0] in RUN, f"vlmrl {words[0]} needs a place in REPLACED or RUN"
    monkeypatch.setattr(sys, "argv", ["vlmrl", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n" * 99))
    monkeypatch.setenv("VLMRL_ENV_TOKEN", "a-token-for-a-test")
    cli.main()
    assert reached or words[0] in RUN


def check_python(words, monkeypatch):
    """``python recipes/x.py`` is ``vlmrl train recipes/x.py``. Of other programs, the options are looked up in their source."""
    path, *options = words
    if path.startswith("recipes/") and path != "recipes/minimal_grpo.py":
        return vlmrl_command(["train", path, *options], monkeypatch)
    source = (ROOT / path).read_text()
    for option in (word for word in options if word.startswith("--")):
        name = option.removeprefix("--").removeprefix("no-")
        assert name in source or name.replace("-", "_") in source, f"{path} has no option {option}"


def check_make(words):
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in [*targets, ".venv-sglang/.installed", ".venv-vllm/.installed"], (
        f"the Makefile has no target {words[0]}"
    )


def check_pip(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"vlmrl\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_commands_are_found():
    assert len(COMMANDS) > 40


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_works(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = shlex.split(line, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *words = words
    if "counter.py:Counter" in words:
        need_chromium()
    if program == "vlmrl":
        vlmrl_command(words, monkeypatch)
    elif program == "python":
        check_python(words, monkeypatch)
    elif program == "torchrun":
        check_python(words[words.index("--nproc-per-node") + 2 :], monkeypatch)
    elif program == "make":
        check_make(words)
    elif program == "pip":
        check_pip(words)
    else:
        assert program in ("git", "export"), f"{program} needs a place in this test"
