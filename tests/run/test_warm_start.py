"""The supervised steps before reinforcement learning."""

from unittest.mock import MagicMock

import pytest

from vlmrl.config import Config, Data, Optim, Rollout, WarmStart
from vlmrl.engine.base import Request
from vlmrl.run.sft import Demonstrated, Demonstrations, describe_cuts
from vlmrl.types import Task, Trajectory


def test_demonstrations_follow_the_turns_of_a_trajectory_in_all_branches_of_an_agent_and_in_refills():
    demonstrations = Demonstrations(lambda task, turn: f"{task.id} {turn}")

    def responses(*ids: str) -> list[str]:
        return [demonstrations.response(Request(id, [1]), 0) for id in ids]

    demonstrations.begin({"warm/0/00": Task("a", []), "warm/1/00": Task("b", [])})
    assert responses("warm/0/00", "warm/0/00", "warm/1/00", "warm/0/00~1", "warm/0/00~2") == [
        "a 0",
        "a 1",
        "b 0",
        "a 2",
        "a 3",
    ]
    assert responses("warm/0/00.1", "warm/0/00.1~1") == ["a 0", "a 1"]
    demonstrations.begin({"warm/0/00": Task("c", [])})
    assert responses("warm/0/00") == ["c 0"]


def test_a_demonstration_that_is_no_text_names_the_task_the_turn_and_the_function():
    def forgets_to_return(task, turn):
        pass

    line = forgets_to_return.__code__.co_firstlineno
    demonstrations = Demonstrations(forgets_to_return)
    demonstrations.begin({"warm/0/00": Task("tasks/0/32", [])})
    said = r"^warm_start\.demonstrate\(task 'tasks/0/32', turn 0\) must return the text of a response, but it returned"
    with pytest.raises(
        ValueError, match=rf"{said} None \(.*test_warm_start.py, line {line}, in forgets_to_return\)\.$"
    ):
        demonstrations.response(Request("warm/0/00", [1]), 0)


def test_a_budget_that_ends_demonstrated_episodes_is_named():
    endings = ["length", "env_done", "length", "max_turns"]
    trajectories = [Trajectory(str(number), "g", Task("a", []), ending=end) for number, end in enumerate(endings)]
    assert describe_cuts(trajectories, Rollout(max_response_tokens=4, max_turns=2)) == [
        "2 of 4 demonstrated episodes were ended by rollout.max_response_tokens (4), not by the env: raise it, unless that is meant.",
        "1 of 4 demonstrated episodes were ended by rollout.max_turns (2), not by the env: raise it, or let step() return True for "
        "done at its last turn, unless that is meant.",
    ]
    assert describe_cuts(trajectories[1:2], Rollout()) == []


def test_the_optimizer_state_is_where_that_of_the_run_is():
    """A run whose optimizer state does not fit beside its weights needs `optim.offload` in the warm start, too."""
    data, lessons = (
        Data(generator=lambda index, seed: {"prompt": "-"}, size=1),
        WarmStart(steps=40, demonstrate=str, lr=0.1),
    )
    config = Config(data=data, reward=lambda text, task: 0.0, warm_start=lessons, optim=Optim(lr=0.5, offload=True))
    assert Demonstrated(MagicMock(config=config), MagicMock()).optim == Optim(lr=0.1, warmup_steps=2, offload=True)
