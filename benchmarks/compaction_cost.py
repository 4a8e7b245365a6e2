"""Whether a shorter context pays for its summaries: a training step of episodes of 32 turns, whole and with `compact`, side by side.

    OMP_NUM_THREADS=1 python benchmarks/compaction_cost.py

A tiny Qwen3 with random weights; each response has the same number of tokens, whatever it says, so that both have the same turns and
observations. The trees of the whole context are as long as 32 turns, those of `compact` have a path for each summary. Printed are CPU
seconds of this process: medians of rounds in which both alternate, the first of each left out.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import tyro

from vlmrl import Config, Data, Env, Model, Rollout, Train, obs
from vlmrl.data import TaskStream
from vlmrl.engine.base import Request
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.rollout.batches import fill
from vlmrl.run.build import Run, build_run
from vlmrl.run.loop import new_trainer, train_on
from vlmrl.types import Completion

PARTS = ("rollout", "update", "step")


class Pages(Env):
    """A page of ``words`` words after each response, until ``max_turns``; the reward is the last response's length, modulo 2."""

    def __init__(self, task, words):
        super().__init__(task)
        self.words = words

    def step(self, response_text):
        return (
            obs(" the color of the square is red" * (self.words // 7)),
            False,
            {"reward": float(len(response_text) % 2)},
        )


class EqualLengths(HFEngine):
    """A response that its limit ends counts as complete."""

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        return replace(completion, stop_reason="stop") if completion.stop_reason == "length" else completion


def make_task(index: int, seed: int) -> dict:
    return {"prompt": "What color is the square"}


@dataclass
class Arm:
    """One history, with what its steps took."""

    run: Run
    seconds: dict[str, list[float]]
    metrics: dict[str, float]

    async def step(self, number: int) -> None:
        """Play a batch and train on it."""
        config, begin = self.run.config, time.process_time()
        batch = await fill(self.run.runner(), self.tasks, config.train.groups_per_batch, f"step{number}", [], "off")
        played = time.process_time()
        self.metrics = train_on(self.run, self.trainer, batch.trajectories)
        self.run.engine.weights_changed(number)
        end = time.process_time()
        for part, seconds in zip(PARTS, (played - begin, end - played, end - begin), strict=True):
            self.seconds[part].append(seconds)
        self.metrics["sampled"] = sum(trajectory.num_sampled for trajectory in batch.trajectories)
        self.metrics["turns"] = sum(not turn.asked for trajectory in batch.trajectories for turn in trajectory.turns)

    def __post_init__(self) -> None:
        self.tasks, self.trainer = TaskStream(self.run.tasks), new_trainer(self.run)


def new_arm(folder: Path, history: str, turns: int, words: int, tokens: int, context: int) -> Arm:
    whole = turns * (words + tokens + 16)
    rollout = Rollout(group_size=4, max_turns=turns, max_tokens=whole, max_response_tokens=tokens, samples="merged")
    if history == "compact":
        rollout = replace(rollout, history="compact", history_options={"request": "Which"}, max_tokens=context)
    config = Config(
        name=history,
        output_dir=str(folder),
        model=Model(path="tiny:qwen3"),
        data=Data(generator=make_task, size=64),
        env=Pages,
        env_options={"words": words},
        rollout=rollout,
        train=Train(groups_per_batch=1, tokens_per_micro_batch=4 * whole),
    )
    run = build_run(config)
    run.engine.close()
    run = replace(run, engine=EqualLengths(run.model.policy, run.model.renderer))
    return Arm(run, {part: [] for part in PARTS}, {})


async def measure(arms: Sequence[Arm], rounds: int) -> None:
    for number in range(rounds + 1):
        for arm in arms:
            await arm.step(number + 1)


def main(turns: int = 32, words: int = 98, tokens: int = 24, context: int = 1024, rounds: int = 3) -> None:
    """``words`` of a page, ``tokens`` of a response, and of a ``context`` with `compact`."""
    with TemporaryDirectory() as folder:
        arms = [new_arm(Path(folder), name, turns, words, tokens, context) for name in ("append", "compact")]
        asyncio.run(measure(arms, rounds))
        for arm in arms:
            arm.run.engine.close()
    counts = [arm.metrics["turns"] for arm in arms]
    assert counts == [arms[0].run.config.rollout.group_size * turns] * 2, f"the episodes have {counts} turns"
    print("| | whole context | compact | ratio |\n| --- | --- | --- | --- |")
    for part in PARTS:
        whole, compact = (median(arm.seconds[part][1:]) for arm in arms)
        print(f"| {part}, CPU seconds | {whole:.2f} | {compact:.2f} | {compact / whole:.2f} |")
    for name in ("sampled", "tokens", "row_tokens", "shared_tokens"):
        whole, compact = (arm.metrics[name] for arm in arms)
        print(f"| {name} | {whole:,.0f} | {compact:,.0f} | {compact / max(1, whole):.2f} |")


if __name__ == "__main__":
    tyro.cli(main)
