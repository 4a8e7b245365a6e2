"""Trajectories made by hand, without a model."""

from PIL import Image

from testing.fakes import item_of, linked
from vlmrl.types import Task, Trajectory, Turn

IMAGE = item_of("c0ffee", Image.new("RGB", (8, 8), "red"), 4)


def turn(reward=None, metrics=None, media=(), response_ids=(7, 8), messages=()):
    ids, logprobs = list(response_ids), [-0.5, -1.5][: len(response_ids)]
    return Turn(
        [1, 2, 3], list(media), ids, logprobs, [4] * len(ids), "stop", "ok", list(messages), reward, metrics or {}
    )


def trajectory(turns, ending="env_done", task=None, **more):
    return Trajectory(
        "t#0", "t", task or Task("t", [{"role": "user", "content": "2+2?"}], answer="4"), linked(turns), ending, **more
    )
