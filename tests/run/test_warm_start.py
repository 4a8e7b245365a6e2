"""The supervised steps before reinforcement learning."""

from vlmrl.engine.base import Request
from vlmrl.run.warm_start import Demonstrations
from vlmrl.types import Task


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
