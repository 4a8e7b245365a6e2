"""FrozenLake on a lake drawn by hand: the frames follow the steps, the goal pays."""

from pathlib import Path

import pytest
from testing.episodes import a_task, play, play_audited

from vlmrl.config.code import load_object

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'vlmrl[gymnasium]'")

ROOT = Path(__file__).parents[2]
FrozenLakeEnv = load_object(f"{ROOT / 'envs/frozenlake.py'}:FrozenLakeEnv")
TASK = a_task("Reach the goal.", seed=4)  # the lake is SHFF, FHFF, FFFH, FFFG
BIG = {"max_tokens": 4000}


def test_the_goal_is_reached_over_two_turns_and_every_frame_is_another():
    trajectory = play_audited(
        FrozenLakeEnv, ["<answer>down, Down</answer>", "I go <answer>down, right,right,right</answer>"], TASK, **BIG
    )
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0)
    first, second = (turn.media[0] for turn in trajectory.turns)
    assert first.image.size == second.image.size == (256, 256) and first.id != second.id
    assert trajectory.turns[1].messages[0]["content"][1]["text"].startswith("You are here now.")


def test_a_hole_ends_the_walk_without_reward():
    trajectory = play_audited(FrozenLakeEnv, ["<answer>right, right, right</answer>"], TASK, **BIG)
    assert (trajectory.ending, trajectory.reward) == ("env_done", 0.0)
    assert trajectory.turns[0].metrics == {"actions": 1.0, "invalid": 0.0}


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("right", "Name your steps between answer tags"),
        ("<answer>north</answer>", "a step is left, down, right, up."),
        ("<answer></answer>", "Name your steps"),
        ("<answer>up, up, up, up, up, up</answer>", "At most 5 steps at once."),
    ],
)
def test_a_response_that_names_no_steps_is_explained(response: str, text: str):
    trajectory = play(FrozenLakeEnv, [response, "<answer>right</answer>"], TASK, **BIG)
    assert text in trajectory.turns[1].messages[0]["content"] and trajectory.turns[0].metrics["invalid"] == 1


def test_a_lake_depends_on_the_task_alone():
    first, again = (play(FrozenLakeEnv, ["<answer>right</answer>"], a_task(seed=4), **BIG) for _ in range(2))
    other = play(FrozenLakeEnv, ["<answer>right</answer>"], a_task(seed=1), **BIG)
    assert first.turns[0].media[0].id == again.turns[0].media[0].id != other.turns[0].media[0].id
