"""docs/metrics.md has every metric that runs log, and no other."""

import ast
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from testing.runs import short_quickstart, train
from testing.trajectories import trajectory, turn

from vlmrl import Algo, Checkpoint, Task
from vlmrl.report.metrics import trajectory_metrics

ROOT = Path(__file__).parents[2]
EVALUATED = re.compile(r"^(?:eval|blanked)/")


def documented():
    """The names of each section's table."""
    names, section = defaultdict(list), ""
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `") and section != "Trackers":
            names[section] += re.findall(r"`([^`]+)`", line.split("|")[1])
    return names


def test_a_section_has_each_name_once():
    for section, names in documented().items():
        assert sorted(names) == sorted(set(names)), section


def patterns(names):
    """``env/<name>`` matches ``env/zooms``."""
    return [re.compile(re.sub(r"<\w+>", ".+", name) + "$") for name in names]


def unknown(logged):
    """The logged names that the tables do not have."""
    tables = documented()
    evaluated = patterns(tables["Rollouts"] + tables["Evaluations"])
    of_steps = patterns([name for section, names in tables.items() if section != "Evaluations" for name in names])
    return {
        name
        for name in logged
        if not any(known.match(EVALUATED.sub("", name)) for known in (evaluated if EVALUATED.match(name) else of_steps))
    }


def length_bonus(trajectories):
    return [float(len(trajectory.turns)) for trajectory in trajectories]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The names in the rows of a synchronous and of an asynchronous run, and of trajectories from two datasets."""
    folder = tmp_path_factory.mktemp("runs")
    config = short_quickstart(folder, checkpoint=Checkpoint(every=1), group_reward=length_bonus)
    config = replace(
        config,
        data=replace(config.data, size=8),
        eval=replace(config.eval, data=replace(config.eval.data, size=2)),
        warm_start=replace(config.warm_start, steps=1, trajectories_per_step=2),
        train=replace(config.train, groups_per_batch=2),
        rollout=replace(config.rollout, group_size=2),
        algo=Algo(loss="dual_clip", kl_coef=0.1),
    )
    behind = replace(
        config,
        name="asynchronous",
        algo=Algo(corrections=("token_truncation",)),
        train=replace(config.train, max_staleness=1),
        rollout=replace(config.rollout, samples="step_wise"),
    )
    of_sources = trajectory_metrics([trajectory([turn(1.0)], task=Task(name, [], source=name)) for name in "ab"])
    return {name for each in (config, behind) for row in [*train(each)[1], of_sources] for name in row}


@pytest.mark.slow
def test_every_logged_name_is_in_the_table(logged):
    assert not unknown(logged)


@pytest.mark.slow
def test_every_name_in_the_table_is_logged_somewhere(logged):
    """By the two runs, or the sources have the name, as a text or a keyword of ``_count``: servers have tests of their own."""
    nodes = [node for path in (ROOT / "vlmrl").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    written = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    counting = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_count"]
    written |= {keyword.arg for node in counting for keyword in node.keywords}
    short = {EVALUATED.sub("", name) for name in logged}
    missing = []
    for name in (name for names in documented().values() for name in names):
        (pattern,) = patterns([name])
        pieces = [piece for piece in re.split(r"<\w+>", name.removeprefix("trajectory/")) if piece]
        if not any(map(pattern.match, short)) and not (pieces and all(piece in written for piece in pieces)):
            missing.append(name)
    assert not missing


def test_an_unknown_name_is_found():
    assert unknown({"reward/mean", "eval/tasks", "env/zooms", "step"}) == set()
    assert unknown({"tasks", "eval/loss", "reward/median"}) == {"tasks", "eval/loss", "reward/median"}
