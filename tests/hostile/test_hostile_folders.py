"""Runs' folders of somebody else, and what a policy and a task may name in a browser."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hostile import folders
from testing.hostile import PLACES, harmless, text, value
from testing.run_folders import write_run_folder

from vlmrl import BrowserEnv, Task
from vlmrl.env.browser.computer_use import KINDS, NAME, Action, computer_use_schema, read_action
from vlmrl.env.browser.miniwob import miniwob_tasks, page_of
from vlmrl.env.tool_calls import read_tool_calls
from vlmrl.env.tools import problem_with

FIELDS = ("action", "coordinate", "start_coordinate", "text", "keys", "pixels", "time", "status", "mark")
FRAME = (1000, 1000)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_run_folder(tmp_path_factory.mktemp("good") / "run", steps=1, groups=1, group_size=2)


def test_hostile_run_folders_are_shown_without_their_links_or_refused(good, tmp_path, hostile):
    ended: Counter[str] = Counter()
    for number, rng in enumerate(hostile("run folders")):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended[folders.run(rng, good, folder)] += 1
        folders.shutil.rmtree(folder)
    assert {"shown", "refused"} <= set(ended)


def refused(error: ValueError, most: int) -> None:
    """An error shows a bounded part of what it refuses."""
    assert 0 < len(str(error)) < most


def odd_action(rng: random.Random) -> dict[str, object]:
    """Arguments of computer_use: a known action most of the time, with fields at their edges or of any type."""
    given = {"action": rng.choice(KINDS), "coordinate": [rng.uniform(-1, 1001), rng.choice((0, 1000, 1e308))]}
    for name in rng.sample(FIELDS, rng.randint(0, 4)):
        given[name] = rng.choice((value(rng), text(rng), [1, 2], ["ctrl", "a"], 5, True))
    return given


@pytest.mark.slow  # long arguments are checked in a process of their own
def test_hostile_actions_are_done_or_explained(hostile):
    schema = computer_use_schema(FRAME, marks=True)
    ended: Counter[bool] = Counter()
    for rng in hostile("actions"):
        response = f"<tool_call>\n{json.dumps({'name': NAME, 'arguments': odd_action(rng)})}\n</tool_call>{text(rng)}"
        with harmless(response, ("bounded_worker",)):
            for call in read_tool_calls(response, [schema], "json")[:8]:
                try:
                    problem = problem_with(call, [schema])
                    done = None if problem else read_action(call.arguments, FRAME, marks=True)
                except ValueError as error:
                    done, problem = None, str(error)
                assert done is None or isinstance(done, Action)
                assert done is None or (
                    all(0 <= each <= 1 for point in done.points for each in point) and done.seconds >= 0
                )
                assert done or (problem and len(problem) < 5000)
                ended[done is None] += 1
    assert set(ended) == {True, False}


def test_hostile_names_of_pages_lead_to_no_other_file(hostile, tmp_path, monkeypatch):
    inside, outside = tmp_path / "envs", tmp_path / "other.html"
    (inside / "sub").mkdir(parents=True)
    for path in (outside, inside / "page.html", inside / "sub/page.htm", inside / "keys.env"):
        path.write_text("<p>")
    (inside / "link.html").symlink_to(outside)
    (inside / "up").symlink_to(tmp_path)
    monkeypatch.setattr("vlmrl.env.browser.browser_env.inspect.getfile", lambda kind: str(inside / "env.py"))
    pieces = (
        "..",
        ".",
        "sub",
        "up",
        "page.html",
        "page.htm",
        "other.html",
        "link.html",
        "keys.env",
        "",
        "~",
        "%2e%2e",
        "\0",
    )
    env, found = BrowserEnv.__new__(BrowserEnv), 0
    for rng in hostile("pages"):
        joined = rng.choice(("/", "\\", "//")).join(rng.choices(pieces, k=rng.randint(1, 5)))
        page = rng.choice(
            (joined, joined, joined, str(inside) + "/" + joined, value(rng), text(rng), rng.choice(PLACES))
        )
        with harmless(page):
            try:
                name = env._page_of(Task("t", [], data={"page": page}))
            except ValueError as error:
                refused(error, 1000)
                continue
        where = inside / "page.html" if name is None else Path(name).resolve()
        assert where.is_relative_to(inside) and where.suffix in (".html", ".htm")
        found += 1
    assert found


def test_hostile_names_of_miniwob_tasks_lead_to_its_pages(hostile):
    pytest.importorskip("miniwob")
    names = miniwob_tasks()
    for rng in hostile("miniwob"):
        name = rng.choice(
            (rng.choice(names), f"../miniwob/{rng.choice(names)}", value(rng), text(rng), rng.choice(PLACES))
        )
        with harmless(name):
            try:
                assert page_of(name).stem in names  # type: ignore[arg-type]
            except ValueError as error:
                refused(error, 10_000)  # it lists the tasks
