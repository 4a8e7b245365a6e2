"""Rows, differences and tables of an evaluation, from episodes of a scripted engine."""

import io
import json

import pytest
from rich.console import Console
from testing.episodes import a_task, turn_loop

from vlmrl import Env, obs
from vlmrl.config import Config
from vlmrl.report.estimators import Estimate
from vlmrl.rollout.runner import Runner
from vlmrl.run.eval_report import Difference, EvalRow, differences, eval_document, print_report
from vlmrl.run.evaluate import LeftOut, summarize_rollouts
from vlmrl.utils.threads import run_awake


class Parity(Env):
    """Pays where the response is as long as the task's answer says; its first tasks may crash."""

    def step(self, response_text):
        if self.task.answer is None:
            raise OSError("no browser")
        return obs(), True, {"reward": float(len(response_text) <= self.task.answer)}


def row(
    model: str, responses: list[str], answers: list[int | None], *, blanked: bool = False, source: str = ""
) -> EvalRow:
    """The row of a model that gives each task these ``responses``, one a sample."""
    tasks = [
        a_task(id=f"{number}", answer=answer, source=source and f"{source}{number % 2}")
        for number, answer in enumerate(answers)
    ]
    loop = turn_loop(
        Parity,
        lambda request, turn: responses[int(request.trajectory_id.split("/")[2][:2])],
        max_failed_fraction=1.0,
        max_refills=0,
    )
    runner = Runner(loop, group_size=len(responses))
    rollouts = run_awake(runner.play(iter(tasks), len(tasks), "eval"))
    return EvalRow.of(model, summarize_rollouts(rollouts, model), blanked=blanked, seed=0, seconds=1.0)


def test_a_row_has_the_estimates_by_hand():
    """Of responses with 1, 2, 3 and 4 letters, tasks with answers 1 and 3 pay one and three."""
    result = row("a", ["x", "xx", "xxx", "xxxx"], [1, 3, 0, 4])
    assert result.task_rewards == {"0": [1, 0, 0, 0], "1": [1, 1, 1, 0], "2": [0, 0, 0, 0], "3": [1, 1, 1, 1]}
    assert result.scores.reward.mean == pytest.approx(0.5)
    means = {k: estimate.mean for k, estimate in result.scores.pass_at.items()}
    assert means == {"1": pytest.approx(0.5), "2": pytest.approx((1 / 2 + 1 + 0 + 1) / 4), "4": pytest.approx(3 / 4)}
    assert result.scores.standard_error == pytest.approx((2 * (0.25**2 + 0.5**2) / 3 / 4) ** 0.5)
    assert (result.trajectories, result.failed, result.turns) == (16, 0, 1.0)
    assert result.endings == {"env_done": 1.0} and result.sources == {}


def test_a_failed_task_is_counted_and_in_no_estimate():
    result = row("a", ["x", "xx"], [1, None, 2])
    assert result.left_out == LeftOut(failed=1) and result.failed == 2 and result.trajectories == 4
    assert list(result.task_rewards) == ["0", "2"] and result.scores.tasks == 2


def test_sources_have_scores_of_their_own():
    result = row("a", ["x"], [1, 0, 1, 0], source="s")
    assert {name: (each.tasks, each.reward) for name, each in result.sources.items()} == {
        "s0": (2, Estimate(1.0, 1.0, 1.0)),
        "s1": (2, Estimate(0.0, 0.0, 0.0)),
    }


def test_models_are_compared_with_the_first_and_blanked_images_with_the_same_model():
    rows = [
        row("a", ["xx"], [2, 2, 1]),
        row("a", ["xxx"], [2, 2, 1], blanked=True),
        row("b", ["x"], [2, 2, 1]),
        row("b", ["xx"], [2, None, 1], blanked=True),
    ]
    found = differences(rows, seed=0)
    assert [(each.model, each.baseline, each.tasks) for each in found] == [
        ("b", "a", 3),
        ("a (images blanked)", "a", 3),
        ("b (images blanked)", "b", 2),
    ]
    assert [each.reward.mean for each in found] == pytest.approx([1 / 3, -2 / 3, -1 / 2])


def test_models_without_a_common_task_are_not_compared():
    assert differences([row("a", ["x"], [1, None]), row("b", ["x"], [None, 1])], seed=0) == []
    assert isinstance(differences([row("a", ["x"], [1]), row("b", ["x"], [1])], seed=0)[0], Difference)


def test_the_document_has_all_numbers_and_only_json():
    rows = [row("a", ["x", "xx"], [1, None, 2], source="s"), row("b", ["x", "xx"], [1, 1, 2], source="s")]
    origin = {"versions": {"vlmrl": "1"}, "commit": None, "machine": {}}
    document = json.loads(json.dumps(eval_document(rows, 0, origin, Config()), allow_nan=False))
    assert document["format"] == 1 and origin.items() <= document.items()
    assert document["settings"]["eval"]["solved"] == 1.0 and document["interval"]["level"] == 0.95
    (result, other), (difference,) = document["results"], document["differences"]
    assert (difference["model"], difference["baseline"], difference["tasks"]) == ("b", "a", 2)
    assert difference["reward"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    scores = result.pop("scores")
    assert scores["tasks"] == 2 and scores["reward"] == {"mean": 0.75, "low": 0.5, "high": 1.0}
    assert set(scores) == {"tasks", "reward", "standard_error", "pass_at"} and set(scores["pass_at"]) == {"1", "2"}
    assert other["sources"]["s0"]["pass_at"]["1"] == {"mean": 0.75, "low": 0.5, "high": 1.0}
    assert result == {
        "model": "a",
        "blanked": False,
        "sources": {},
        "left_out": {"too_long": 0, "bad_rows": 0, "rejected": 0, "failed": 1},
        "trajectories": 4,
        "failed": 2,
        "endings": {"env_done": 1.0},
        "turns": 1.0,
        "sampled_tokens": result["sampled_tokens"],
        "seconds": 1.0,
        "task_rewards": {"0": [1.0, 0.0], "2": [1.0, 1.0]},
    }


def test_brackets_in_the_names_of_models_and_sources_are_no_markup():
    """A row names its source. The tables are printed before the results are written, which an error in them lost."""
    console = Console(file=io.StringIO(), width=200)
    names = ["a [/mnt/b]", "[link=http://evil]c"]
    print_report(console, [row(name, ["x", "xx"], [1, 2, None], source="[red][/d]") for name in names], seed=0)
    shown = console.file.getvalue()
    assert all(f"{name}: [red][/d]0" in shown and f"{name}: 1 left out" in shown for name in names)


def test_the_tables_show_what_is_left_out():
    console = Console(file=io.StringIO(), width=80)
    print_report(
        console, [row("a", ["x", "xx"], [1, 2, None, 1], source="s"), row("b", ["x", "xx"], [1, 1, 2])], seed=0
    )
    shown = console.file.getvalue()
    assert "a: 1 left out (1 failed)" in shown and "pass@2" in shown and "env_done 100%" in shown
    assert "a: s0" in shown and "0.500 to 1.000" in shown and "+0.000 to +0.500" not in shown
    assert max(map(len, shown.splitlines())) <= 120
