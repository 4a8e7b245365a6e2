"""Does each algorithm learn? The quickstart's task, from one warm-started model, with every loss and every advantage.

    python benchmarks/algorithms.py                         # all of them, about a minute each on two cores
    python benchmarks/algorithms.py --only ppo gspo stale   # rows whose names begin with these

Two optimizer steps a batch, so that the second is off-policy and clipping has an effect. `stale` rows sample from weights that are 4
updates old, with and without a correction. Prints a table: held-out reward before and after.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console

from vlmrl import Algo, Config, Model, Optim, Train, WarmStart
from vlmrl.algos import ADVANTAGES, LOSSES
from vlmrl.config.code import load_object
from vlmrl.data import TaskStream
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.policy import Policy
from vlmrl.report.progress import RunProgress
from vlmrl.rollout.batches import fill
from vlmrl.run.build import Run, build_run
from vlmrl.run.evaluate import evaluate_run
from vlmrl.run.loop import new_trainer, train_on
from vlmrl.run.sft import fine_tune

ROOT = Path(__file__).parent.parent
STALE = 4  # weight updates that a stale engine is behind


@dataclass(frozen=True)
class Row:
    name: str
    algo: Algo
    seed: int = 0
    lag: int = 0


def rows() -> Iterator[Row]:
    for seed in range(3):
        yield Row(f"ppo, grpo, seed {seed}", Algo(), seed)
    for loss in LOSSES:
        if loss not in ("ppo", "sft"):
            yield Row(f"{loss}, grpo", Algo(loss=loss))
    for advantage in ADVANTAGES:
        if advantage != "grpo":
            yield Row(f"ppo, {advantage}", Algo(advantage=advantage))
    yield Row("ppo, grpo without std", Algo(options={"grpo.scale_by_std": False}))
    for correction in ("", "token_truncation", "token_mask"):
        name = f"stale by {STALE}, {correction or 'no correction'}"
        yield Row(name, Algo(corrections=(correction,) if correction else ()), lag=STALE)


def settings(folder: Path, steps: int) -> Config:
    config: Config = load_object(f"{ROOT / 'recipes/quickstart.py'}:config")()
    return replace(
        config,
        output_dir=str(folder),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=steps, groups_per_batch=16, groups_per_step=8),
    )


def teach(config: Config) -> str:
    """The folder of a model that knows the form of an episode, made once."""
    folder = Path(config.output_dir).resolve() / "taught"
    if not (folder / "config.json").exists():
        run = build_run(config)
        asyncio.run(fine_tune(run, "warm_start", RunProgress()))
        run.model.save(folder)
        run.engine.close()
    return str(folder)


class StaleEngine(HFEngine):
    """Samples from weights of ``lag`` updates ago, held in a model of its own."""

    def __init__(self, run: Run, lag: int) -> None:
        self.source = run.model.policy
        self.past = deque([copy.deepcopy(self.source.state_dict())], maxlen=lag + 1)
        super().__init__(Policy(copy.deepcopy(self.source.model), run.model.image_processor), run.model.renderer)

    def weights_changed(self, policy_version: int) -> None:
        self.past.append(copy.deepcopy(self.source.state_dict()))
        self.policy.load_state_dict(self.past[0])
        super().weights_changed(max(0, policy_version - self.past.maxlen + 1))


async def learn(row: Row, config: Config, model: str) -> tuple[float, float, float]:
    """Held-out reward before and after, and the mean logprob mismatch over the run."""
    config = replace(config, model=Model(path=model), algo=row.algo, seed=row.seed, warm_start=WarmStart())
    run = build_run(config)
    quiet = RunProgress(Console(quiet=True))
    before = await evaluate_run(run, quiet, label="before")
    if row.lag:
        run.engine.close()
        run = replace(run, engine=StaleEngine(run, row.lag))
    trainer, runner, tasks, mismatches = new_trainer(run), run.runner(), TaskStream(run.tasks), []
    for step in range(config.train.steps):
        batch = await fill(runner, tasks, config.train.groups_per_batch, f"step{step:06d}", [], "off")
        mismatches.append(train_on(run, trainer, batch.trajectories)["logprob_mismatch/mean"])
        run.engine.weights_changed(step + 1)
    if row.lag:  # evaluate the weights themselves
        run.engine.close()
        run = replace(run, engine=HFEngine(run.model.policy, run.model.renderer))
    after = await evaluate_run(run, quiet, label="after")
    run.engine.close()
    return before.reward, after.reward, sum(mismatches) / len(mismatches)


def main(steps: int = 65, only: tuple[str, ...] = (), folder: Path = Path("runs/algorithms")) -> None:
    """``steps`` batches of 16 groups of 8 for each row."""
    config = settings(folder, steps)
    model = teach(config)
    print(f"{steps} batches, two optimizer steps each\n")
    print(
        "| loss and advantage | before | after | mean logprob mismatch, nats |\n| --- | --- | --- | --- |", flush=True
    )
    for row in rows():
        if not only or row.name.startswith(only):
            before, after, mismatch = asyncio.run(learn(row, config, model))
            print(f"| {row.name} | {before:.3f} | {after:.3f} | {mismatch:.1e} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
