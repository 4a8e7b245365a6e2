"""Which credit assignment learns a long episode fastest? FrozenLake from images, with one warm-started tiny model for all.

    python benchmarks/credit.py teach                                        # the model that all runs begin with, once
    python benchmarks/credit.py run --method gigpo --seed 1 --slippery       # one run: 40 steps of 64 episodes
    python benchmarks/credit.py table                                        # of all runs, from their metrics.jsonl

An agent sees a 4x4 lake from above and names two steps a turn, for at most eight turns. The warm start imitates walkers that go
towards the goal in half of their steps and anywhere in the others, so that reward begins low and groups differ. Lakes are never
shown twice, so that the reward of training is that of new lakes. `credit_tables.py` asks the same without a model, in a minute.
"""

import asyncio
import json
import random
import statistics
from collections import deque
from dataclasses import replace
from pathlib import Path

import tyro

from vlmrl import Algo, Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart
from vlmrl.config.code import load_object
from vlmrl.report.progress import RunProgress
from vlmrl.run.build import build_run
from vlmrl.run.program import run_training
from vlmrl.run.sft import fine_tune

ROOT = Path(__file__).parent.parent
MOVES = {  # as Gymnasium numbers them; words of one token
    "left": (0, -1),
    "bottom": (1, 0),
    "right": (0, 1),
    "top": (-1, 0),
}
FrozenLakeEnv = load_object(f"{ROOT / 'envs/frozenlake.py'}:FrozenLakeEnv")

METHODS = {"grpo": Algo(), "turn": Algo(credit="turn"), "gigpo": Algo(credit="gigpo")}


class Lake(FrozenLakeEnv):
    """FrozenLake with one word a step, such as `` right bottom``. A tile is the state, whichever way the walker looks."""

    def read_actions(self, response):
        words = response.split()
        if not words or len(words) > self.steps_per_turn or not set(words) <= MOVES.keys():
            raise ValueError("not that")
        return [list(MOVES).index(word) for word in words]

    def describe(self, info):
        return ""

    def step(self, response_text):
        observation, done, info = super().step(response_text)
        return observation, done, {**info, "state": int(self.gym.unwrapped.s)}


def lakes(index: int, seed: int) -> dict:
    """A task; the env generates its lake from its seed."""
    return {"prompt": "go"}


def demonstrate(task: Task, turn: int) -> str:
    """Two steps of a walk over the task's lake in which every second step, by chance, is on a shortest path."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    lake, luck = generate_random_map(4, 0.8, task.seed), random.Random(task.seed)
    far = _distances(lake)
    place, words = (0, 0), []
    for _ in range(2 * turn + 2):
        word = luck.choice(list(MOVES))
        if luck.random() < 0.5:
            word = min(MOVES, key=lambda each: far[_moved(place, each)])
        place = _moved(place, word)
        words.append(word)
    return "".join(f" {word}" for word in words[-2:])


def _moved(place: tuple[int, int], word: str) -> tuple[int, int]:
    return tuple(min(3, max(0, at + by)) for at, by in zip(place, MOVES[word], strict=True))


def _distances(lake: list[str]) -> dict[tuple[int, int], float]:
    """The steps from each tile to the goal; infinite from holes."""
    far = {(row, column): float("inf") for row in range(4) for column in range(4)}
    far[3, 3], queue = 0.0, deque([(3, 3)])
    while queue:
        place = queue.popleft()
        for word in MOVES:
            near = _moved(place, word)
            if lake[near[0]][near[1]] != "H" and far[near] == float("inf"):
                far[near] = far[place] + 1
                queue.append(near)
    return far


def settings(folder: Path, slippery: bool, steps: int) -> Config:
    return Config(
        output_dir=str(folder),
        model=Model(path="tiny:qwen3_vl", max_image_pixels=128 * 128),
        data=Data(generator=lakes, size=100_000),
        env=Lake,
        env_options={"slippery": slippery, "steps_per_turn": 2},
        rollout=Rollout(group_size=8, max_turns=8, max_tokens=400, max_response_tokens=8, truncated_reward=0.0),
        warm_start=WarmStart(demonstrate=demonstrate, steps=150, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=3e-4, betas=(0.9, 0.999), warmup_steps=3),
        train=Train(steps=steps, groups_per_batch=8, image_check=False),
        eval=Eval(data=EvalData(generator=lakes, size=128, seed=1)),
        save_model=False,
    )


def teach(folder: Path = Path("runs/credit")) -> None:
    """Make the model that all runs begin with."""
    run = build_run(settings(folder, False, 0))
    asyncio.run(fine_tune(run, "warm_start", RunProgress()))
    run.model.save(folder / "taught")
    run.engine.close()


def run(
    method: str, seed: int = 0, slippery: bool = False, steps: int = 40, folder: Path = Path("runs/credit")
) -> None:
    """One run of a method, from the taught model. Every method plays as many episodes."""
    config = settings(folder, slippery, steps)
    name = f"{method}-{'slippery' if slippery else 'dry'}-{seed}"
    model = replace(config.model, path=str((folder / "taught").resolve()))
    run_training(replace(config, name=name, model=model, algo=METHODS[method], seed=seed, warm_start=WarmStart()))


def table(folder: Path = Path("runs/credit")) -> None:
    """Print the mean reward of each fourth of the steps, and the held-out rewards before and after, of every run."""
    print(
        "| run | 1st quarter | 2nd | 3rd | last | held-out before | after |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for file in sorted(folder.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        held_out = [row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row]
        size = max(1, len(rewards) // 4)
        parts = [statistics.fmean(rewards[place : place + size]) for place in range(0, 4 * size, size)]
        print(f"| {file.parent.name} | {' | '.join(f'{each:.3f}' for each in [*parts, held_out[0], held_out[-1]])} |")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"teach": teach, "run": run, "table": table})
