"""Speed and learning of asynchronous rollouts where one trajectory in 16 takes ten times as long.

    python benchmarks/async_long_tail.py speed      # simulated episodes and training steps, about two minutes
    python benchmarks/async_long_tail.py learning   # the quickstart's task, three seeds each, about three minutes a row

`speed` uses the real runner and buffers; episodes and training sleep instead of computing. Prints samples per second
relative to the synchronous loop, the staleness of trained tokens, and the share of long trajectories among generated and among
trained ones. `learning` prints held-out rewards before and after, and the training reward in between.
"""

import asyncio
import random
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, Literal

import tyro
from algorithms import teach
from rich.console import Console
from rich.table import Table

from vlmrl import Algo, Config, Model, Rollout, Task, Train, WarmStart
from vlmrl.config.code import load_object, resolve_config
from vlmrl.data import TaskStream
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.buffer import AsynchronousBuffer, SynchronousBuffer
from vlmrl.rollout.runner import Runner
from vlmrl.run.build import build_run
from vlmrl.run.loop import train
from vlmrl.types import Trajectory, Turn

TooOld = Literal["wait", "correct", "drop"]
ROOT = Path(__file__).parent.parent
EVERY, TIMES = 16, 10  # one trajectory in so many takes so many times as long
UNIT = 0.04  # seconds of a short episode
HELD_BACK = 2.0  # seconds of a long episode, where learning is real
CURVE = 20  # steps that a point of the learning curve is a mean over
GROUPS, MEMBERS = 8, 8


class Sleeping:
    """A loop whose episodes sleep. Which ones are long is drawn by the task and the member, the same for every setting."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(policy_version=0)
        self.config = Rollout(group_size=MEMBERS, max_concurrent=100_000)
        self.generated: dict[str, bool] = {}

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory:
        long = random.Random(f"{task.id}/{trajectory_id[-2:]}").random() < 1 / EVERY
        self.generated[trajectory_id] = long
        versions = []
        for _ in range(TIMES if long else 1):  # each token under the weights of its time, as with partial rollouts
            versions.append(self.engine.policy_version)
            await asyncio.sleep(UNIT)
        size = len(versions)
        turn = Turn([1], [], [5] * size, [0.0] * size, versions, "stop", "", reward=0.0)
        return Trajectory(trajectory_id, group_id, task, [turn], "env_done")


class Endless:
    """A task for each draw."""

    def __len__(self) -> int:
        return 2**31

    def draw(self, number: int) -> Task:
        return Task(str(number), [])

    def limit_of(self, task: Task) -> None:
        return None


@dataclass(frozen=True)
class Speed:
    rate: float
    oldest: float
    generated: float
    trained: float


async def run(settings: Train, steps: int, training: float) -> Speed:
    """``steps`` batches, each trained for ``training`` seconds. Shares are of the groups that ended."""
    loop = Sleeping()
    kind = AsynchronousBuffer if settings.max_staleness else SynchronousBuffer
    tasks: Any = Endless()
    batches = kind(Runner(loop), TaskStream(tasks), [], Algo(), settings)
    long, oldest, began = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        batch = await batches.take(step)
        long += [len(trajectory.turns[0].response_ids) > 1 for trajectory in batch.trajectories]
        oldest.append(step - 1 - min(v for t in batch.trajectories for v in t.turns[0].policy_versions))
        await asyncio.sleep(training)
        loop.engine.policy_version = step
        batches.trained()
    seconds = time.perf_counter() - began
    await batches.close()
    return Speed(len(long) / seconds, max(oldest), mean(loop.generated.values()), mean(long))


def speed(steps: int = 80, training: float = 2.5) -> None:
    """``training``: how long a batch trains, in short episodes' time."""
    rows = [("synchronous", Train(groups_per_batch=GROUPS))]
    for too_old in ("wait", "correct", "drop"):
        for staleness in (1, 2, 4):
            settings = Train(groups_per_batch=GROUPS, max_staleness=staleness, too_old=too_old)
            rows.append((f"staleness {staleness}, {too_old}", settings))
    table = Table("", "samples/s, ratio", "oldest token", "long: generated", "long: trained")
    base = None
    for name, settings in rows:
        result = asyncio.run(run(settings, steps, training * UNIT))
        base = base or result.rate
        shares = [f"{100 * share:.1f}%" for share in (result.generated, result.trained)]
        table.add_row(name, f"{result.rate / base:.2f}", f"{result.oldest:.0f}", *shares)
    Console().print(table)


class SlowZoom(load_object(f"{ROOT / 'envs/zoom.py'}:ZoomEnv")):
    """One episode in 16 is held back at its first turn, for longer than a batch of the others takes."""

    def step(self, response_text):
        if self.turn == 0 and random.random() < 1 / EVERY:
            time.sleep(HELD_BACK)
        return super().step(response_text)


def learning(
    steps: int = 60,
    seeds: tuple[int, ...] = (0, 1, 2),
    ahead: tuple[int, ...] = (0, 1, 2, 4),
    lr: float = 1e-4,
    corrections: tuple[str, ...] = (),
    folder: Path = Path("runs/async_long_tail"),
) -> None:
    """From one warm-started model at a constant rate. Ratios are to the weights that sampled, unless ``corrections`` are given."""
    recipe = resolve_config(load_object(f"{ROOT / 'recipes/quickstart.py'}:config")(), ROOT / "recipes")
    config = replace(recipe, output_dir=str(folder), save_model=False, optim=replace(recipe.optim, lr=lr))
    config = replace(config, eval=replace(recipe.eval, every=0, blank_images=False))
    config = replace(config, model=Model(path=teach(config)), warm_start=WarmStart())
    firsts = range(0, steps, CURVE)
    spans = [f"steps {first + 1} to {min(first + CURVE, steps)}" for first in firsts]
    print("| " + " | ".join(["", "before", *spans, "after"]) + " |\n" + "| --- " * (3 + len(spans)) + "|", flush=True)
    for staleness, seed in product(ahead, seeds):
        too_old: TooOld = "correct" if staleness > 1 else "wait"
        name = f"staleness {staleness}, {too_old}" if staleness else "synchronous"
        made = replace(
            config,
            name=f"{name}, lr {lr:g}, seed {seed}",
            seed=seed,
            algo=Algo(corrections=corrections if staleness else ()),
            train=replace(config.train, steps=steps, max_staleness=staleness, too_old=too_old),
            env=SlowZoom if staleness else recipe.env,
        )
        before, after, rewards = asyncio.run(learn(made))
        curve = [mean(rewards[first : first + CURVE]) for first in firsts]
        print(f"| {made.name} | " + " | ".join(f"{value:.3f}" for value in (before, *curve, after)) + " |", flush=True)


async def learn(config: Config) -> tuple[float, float, list[float]]:
    """Held-out reward before and after, and the training reward of each step."""
    run = build_run(config)
    log = RunLog(run.folder, {})  # a run of before is written over
    summary = await train(run, log, RunProgress(Console(quiet=True)))
    run.engine.close()
    rewards = [row["reward/mean"] for row in log.rows() if "loss" in row]
    log.close()
    return summary["reward_before"], summary["reward_after"], rewards


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"speed": speed, "learning": learning})
