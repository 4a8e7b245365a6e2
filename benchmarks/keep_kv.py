"""Speed of the embedded engine with the KV cache kept between turns, and how often images are processed and encoded.

    python benchmarks/keep_kv.py --turns 8

One tiny model plays the same groups twice, with a new image every turn: once with each trajectory's KV cache kept from turn to turn,
once with each prompt prefilled again. Prints the ratio of rollout times and of prefilled tokens.
"""

import asyncio
import statistics
import time
from pathlib import Path

import tyro
from PIL import Image

from vlmrl import Env, Model, Rollout, Task, obs
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.env.base import resolve_env
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop


class ImagesEnv(Env):
    """A new image after each response, the same for all members of a group."""

    def step(self, response_text):
        done = self.turn == self.max_turns - 1
        image = Image.new("RGB", (96, 96), (self.seed % 256, self.turn * 20, 90))
        return obs("Next.", images=[image]), done, {"reward": 0.0} if done else {}


def play(model: LoadedModel, keep_kv: bool, turns: int, groups: int, repeat: int) -> tuple[float, int, float]:
    """Seconds, prompt tokens run, and images processed over distinct ones, for ``groups`` groups of 8."""
    engine = HFEngine(model.policy, model.renderer, keep_kv=keep_kv)
    store = model.new_store()
    config = Rollout(group_size=8, max_turns=turns, max_tokens=4096, max_response_tokens=32, stop=("e", "a", "o"))
    runner = Runner(TurnLoop(resolve_env(ImagesEnv), engine, model.renderer, store, config, seed=repeat))
    prompt = [{"role": "user", "content": "Look at the images. " * 20}]
    tasks = [Task(str(index), prompt, seed=index) for index in range(groups)]
    began = time.perf_counter()
    rollouts = asyncio.run(runner.play(iter(tasks), groups, f"play{repeat}"))
    seconds = time.perf_counter() - began
    distinct = {item.id for trajectory in rollouts.trajectories for turn in trajectory.turns for item in turn.media}
    engine.close()
    return seconds, engine.tokens_prefilled, store.processed / max(1, len(distinct))


def main(turns: int = 8, groups: int = 4, repeats: int = 5) -> None:
    """Alternate both ways, ``repeats`` times each, and compare the medians."""
    model = load_model(Model(device="cpu"), Path("runs/.models"), seed=0)
    # Responses end by a stop string or at the limit, never by chance at an end of turn.
    model.renderer.stop_ids = frozenset()
    results: dict[bool, list[tuple[float, int, float]]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for keep in results:
            result = play(model, keep, turns, groups, repeat)
            if repeat:  # the first is a warm-up
                results[keep].append(result)
    seconds = {keep: statistics.median(r[0] for r in rows) for keep, rows in results.items()}
    tokens = {keep: statistics.median(r[1] for r in rows) for keep, rows in results.items()}
    print(f"{turns} turns, {groups} groups of 8, an image each turn")
    print(f"rollout time, prefilled again / kept:     {seconds[False] / seconds[True]:.2f}")
    print(f"prefilled tokens, prefilled again / kept: {tokens[False] / tokens[True]:.2f}")
    print(f"images processed / distinct:        {max(r[2] for rows in results.values() for r in rows):.2f}")


if __name__ == "__main__":
    tyro.cli(main)
