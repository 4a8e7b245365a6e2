"""Cost of a turn by its number: two long episodes, each turn's time split into engine, env and the turn loop itself.

    python benchmarks/long_episodes.py

20 turns with an image of 1,600 tokens each (33,000 tokens in all), and 200 turns of text. Responses are scripted, so that
only the turn loop's own work remains: rendering, encoding, image processing, the request. Prints a linear fit to its milliseconds by
turn, and the ratio of the last quarter of the turns to the first.
"""

import asyncio
import time
from collections.abc import Callable

import numpy as np
import tyro
from PIL import Image

from vlmrl import Env, Model, Rollout, Task, obs
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import resolve_env
from vlmrl.model.loading import load_model
from vlmrl.model.tiny import build
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.types import Trajectory


class LongEnv(Env):
    """A page of text or a new image after each response."""

    def __init__(self, task: Task, side: int) -> None:
        super().__init__(task)
        self.side = side

    def step(self, response_text):
        done = self.turn == self.max_turns - 1
        pixels = np.random.default_rng([self.seed, self.turn]).integers(
            0, 256, (self.side, self.side, 3), dtype=np.uint8
        )
        shown = [Image.fromarray(pixels)] if self.side else None
        return obs("Go on with the next page, please. " * 4, images=shown), done, {"reward": 0.0}


def own_milliseconds(trajectories: list[Trajectory], ends: list[list[float]]) -> np.ndarray:
    """By turn, the median over the repeats of what a turn took beside engine and env."""
    rows = []
    for trajectory, times in zip(trajectories, ends, strict=True):
        whole = np.diff(times)
        rows.append(1000 * (whole - [turn.engine_seconds + turn.env_seconds for turn in trajectory.turns[1:]]))
    return np.median(rows, axis=0)


def play(title: str, turns: int, side: int, repeats: int) -> None:
    folder = build("runs/.models/long", max_pixels=2**22)
    model = load_model(Model(path=str(folder), device="cpu"), folder, seed=0)
    times: list[float] = []

    def response(request, turn: int) -> str:
        return "I have read it. " * 4

    played, ends = [], []
    for repeat in range(repeats + 1):
        times = []
        engine = ScriptedEngine(watched(response, times), model.renderer)
        config = Rollout(max_turns=turns, max_tokens=200_000, max_response_tokens=500)
        loop = TurnLoop(resolve_env(LongEnv, options={"side": side}), engine, model.renderer, model.new_store(), config)
        task = Task("t", [{"role": "user", "content": "Read."}], seed=repeat)
        trajectory = asyncio.run(loop.play(task, "g", f"g/{repeat}"))
        if repeat:  # the first is a warm-up
            played.append(trajectory)
            ends.append(times)
    own = own_milliseconds(played, ends)
    slope, start = np.polyfit(np.arange(len(own)), own, 1)
    quarter = max(1, len(own) // 4)
    print(f"{title}: {trajectory.num_tokens} tokens, {turns} turns")
    print(
        f"  the loop's own work: {start:.2f} ms, {1000 * slope:+.1f} us with each turn; last quarter / first: ", end=""
    )
    print(f"{own[-quarter:].mean() / own[:quarter].mean():.2f}")


def watched(response: Callable, times: list[float]) -> Callable:
    """``response``, which also appends the time of each call to ``times``."""

    def noting(request, turn: int) -> str:
        times.append(time.perf_counter())
        return response(request, turn)

    return noting


def main(repeats: int = 5) -> None:
    play("an image each turn", turns=20, side=1280, repeats=repeats)
    play("text", turns=200, side=0, repeats=repeats)


if __name__ == "__main__":
    tyro.cli(main)
