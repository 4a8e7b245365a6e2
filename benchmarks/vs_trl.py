"""The same multi-turn task with images in vlmrl and in TRL's GRPOTrainer, on this machine.

    pip install -e '.[bench]'
    python benchmarks/vs_trl.py --turns 8

An agent sees ``turns`` images, the first in its prompt and one more after each tool call, and then says that it is done
(`look_task.py`). A tiny Qwen3-VL is first trained until sampling (top_p 0.9) gives only these responses on both sides, with
one of seven digits in each call. So both sides really generate, their responses have equal lengths (this is checked again after the
measurement), and
members of a group differ. Both use the same weights, template, processor and batch: one optimizer step on ``groups`` groups of 8.
Unknown tools, malformed calls and wrong arguments have the same consequences on both sides. TRL generates with its transformers
backend and an `environment_factory`; its vLLM backend is not compared, nor is a server of ours.

The two alternate, and a round's number is the median of its steps. Medians over the rounds are printed, for each number of threads in
a process of its own: step times, their share of generation (prefill included), CPU times, how often each distinct image was processed
(its pixels rescaled and normalized for the vision tower, the step that both sides share) and encoded, and the bound of a bare loop
(`bare_loop.py`).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
import tyro
from bare_loop import BareLoop
from datasets import Dataset
from look_task import QUESTION, LookEnv, LookTRL, demonstrate, image, make_task
from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback, TrainerCallback
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from vlmrl import Config, Data, Model, Optim, Rollout, Train, WarmStart
from vlmrl.data import TaskStream
from vlmrl.report.progress import RunProgress
from vlmrl.run.build import Run, build_run
from vlmrl.run.loop import train_on
from vlmrl.run.sft import fine_tune
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import Trajectory

TOP_P = 0.9
MEMBERS = 8
SAME = 0.002  # the largest relative difference of the sampled tokens of a trajectory
TINY_LR = 1e-12  # the optimizer works as ever, and the taught responses stay as they are


@dataclass(frozen=True)
class Settings:
    turns: int = 4
    """Responses per trajectory, each after a new image."""
    groups: int = 2
    """Groups of 8 trajectories per step."""
    side: int = 128
    """Of the images, in pixels; 32 x 32 make a visual token."""
    threads: tuple[int, ...] = (1, 2)
    """Threads of torch; each number is measured in a process of its own, since torch reads it when it starts."""
    steps: int = 5
    """Measured steps of each side per round, after one that is not counted."""
    rounds: int = 3
    teach: int = 200
    """Supervised steps before the two sides are compared."""
    teach_rounds: int = 5
    """How often they are taught again, if their responses differ."""
    share_prefixes: bool = True
    """vlmrl's setting of that name; without it the trainer runs every row whole, as TRL does."""


@dataclass
class Cost:
    """What one side's steps took; times in seconds, images summed over the steps."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    sampled_tokens: list[float] = field(default_factory=list)  # mean of a trajectory

    def add(self, before: Marks, after: Marks, sampled_tokens: float) -> None:
        self.step.append(after.clock - before.clock)
        self.cpu.append(after.cpu - before.cpu)
        self.generating.append(after.generating - before.generating)
        self.processed.append(after.processed - before.processed)
        self.encoded.append(after.encoded - before.encoded)
        self.sampled_tokens.append(sampled_tokens)


@dataclass(frozen=True)
class Marks:
    """What had been used up at a moment."""

    clock: float
    cpu: float
    generating: float
    processed: int
    encoded: int

    @classmethod
    def now(cls, generating: float) -> Marks:
        return cls(time.perf_counter(), time.process_time(), generating, IMAGES.processed, IMAGES.encoded)


class Images:
    """Counts, wherever they come from, the images that the image processor normalizes and that the vision tower encodes."""

    processed = 0
    encoded = 0

    def watch_processor(self) -> None:
        original = Qwen2VLImageProcessor.rescale_and_normalize

        def counting(processor: Any, images: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.processed += len(images)
            return original(processor, images, *args, **kwargs)

        Qwen2VLImageProcessor.rescale_and_normalize = counting

    def watch_tower(self, model: Any) -> None:
        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.encoded += len(kwargs["grid_thw"])

        model.model.visual.register_forward_pre_hook(count, with_kwargs=True)


IMAGES = Images()


def teach(settings: Settings, folder: Path) -> Run:
    """A run whose tiny model, saved in its folder, gives the scripted responses and no others, in vlmrl and in TRL.

    Raises SystemExit if the two sides still sample different numbers of tokens after ``settings.teach_rounds`` rounds.
    """
    run = make_run(settings, folder)
    IMAGES.watch_tower(run.model.policy.model)
    probe = replace(settings, steps=1)
    for number in range(settings.teach_rounds):
        asyncio.run(fine_tune(run, "warm_start", RunProgress()))
        run.model.save(run.folder / "model")
        ours, theirs = Cost(), Cost()
        trajectories = asyncio.run(step_vlmrl(run, probe, ours, f"probe{number}"))
        step_trl(run.folder / "model", probe, theirs)
        lengths = {each.num_sampled for each in trajectories}
        scripted = {len(trajectory.turns) for trajectory in trajectories} == {settings.turns} and len(lengths) == 1
        if scripted and differ(ours, theirs) <= SAME:
            return run
    raise SystemExit(
        f"after {settings.teach_rounds} x {settings.teach} supervised steps the two sides do not sample equal responses: "
        f"{ours.sampled_tokens} and {theirs.sampled_tokens} tokens a trajectory. Raise --teach or --teach-rounds."
    )


def differ(ours: Cost, theirs: Cost) -> float:
    """The relative difference of the sampled tokens of a trajectory."""
    return abs(statistics.mean(ours.sampled_tokens) / statistics.mean(theirs.sampled_tokens) - 1)


def make_run(settings: Settings, folder: Path) -> Run:
    template = folder / "template.jinja"
    template.write_text(qwen3_vl_chat_template)
    options = {"turns": settings.turns, "side": settings.side}
    return build_run(
        Config(
            name="vs_trl",
            output_dir=str(folder),
            model=Model(device="cpu", dtype="float32", chat_template=str(template)),
            data=Data(generator=make_task, size=10_000, options=options),
            env=LookEnv,
            env_options=options,
            rollout=Rollout(max_turns=settings.turns, max_tokens=16_384, max_response_tokens=64, top_p=TOP_P),
            warm_start=WarmStart(demonstrate=demonstrate, steps=settings.teach, trajectories_per_step=4),
            optim=Optim(lr=TINY_LR),
            train=Train(groups_per_batch=settings.groups),
            save_model=False,
        )
    )


async def step_vlmrl(run: Run, settings: Settings, cost: Cost, label: str) -> list[Trajectory]:
    """The stages of `vlmrl.run.loop.train`, timed. Returns the last step's trajectories."""
    config = run.config
    budget = config.train.tokens_per_micro_batch
    sizes = {"total_steps": 100, "tokens_per_micro_batch": budget, "share_prefixes": settings.share_prefixes}
    trainer = run.trainer.start(TrainerSpec(config.algo, config.optim, **sizes))
    runner, tasks = run.runner(), TaskStream(run.tasks)
    trajectories: list[Trajectory] = []
    for step in range(settings.steps + 1):
        before = Marks.now(run.engine.seconds_busy)
        rollouts = await runner.play(tasks, settings.groups, f"{label}/{step}")
        trajectories = rollouts.trajectories
        train_on(run, trainer, trajectories)
        run.engine.weights_changed(trainer.steps_done)
        if step:
            sampled = statistics.mean(trajectory.num_sampled for trajectory in trajectories)
            cost.add(before, Marks.now(run.engine.seconds_busy), sampled)
    trainer.close()
    return trajectories


def step_trl(folder: Path, settings: Settings, cost: Cost) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    processor.chat_template = processor.tokenizer.chat_template = qwen3_vl_chat_template
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32", attn_implementation="sdpa")
    IMAGES.watch_tower(model)
    clock = Clock(model)
    rows = [
        {"prompt": [{"role": "user", "content": QUESTION}], "images": [image(index, 0, settings.side)], "seed": index}
        for index in range(settings.groups * (settings.steps + 1))
    ]
    placeholders = [model.config.image_token_id, model.config.video_token_id]
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        train_dataset=Dataset.from_list(rows),
        environment_factory=lambda: LookTRL(settings.turns, settings.side),
        callbacks=[StepTimes(clock, cost)],
        args=GRPOConfig(
            output_dir=str(folder.parent / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=settings.groups * MEMBERS,
            num_generations=MEMBERS,
            max_completion_length=16_000,
            max_tool_calling_iterations=settings.turns - 1,
            # vlmrl bans the placeholders, too; TRL crashes when one is sampled.
            generation_kwargs={"max_new_tokens": 64, "suppress_tokens": placeholders},
            top_p=TOP_P,
            learning_rate=TINY_LR,
            max_steps=settings.steps + 1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class Clock:
    """Adds up the seconds that a model spends in ``generate``."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        generate = model.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        model.generate = timed


class StepTimes(TrainerCallback):
    """From the end of one step to the end of the next; the first is not counted."""

    def __init__(self, clock: Clock, cost: Cost) -> None:
        self.clock, self.cost = clock, cost
        self.before: Marks | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        now = Marks.now(self.clock.seconds)
        if "loss" not in logs:
            return
        if self.before is not None:
            self.cost.add(self.before, now, float(logs["completions/mean_length"]))
        self.before = now


@dataclass
class Round:
    """Of one round: both sides' steps, and the medians of the bare loop in seconds."""

    ours: Cost
    theirs: Cost
    bare: tuple[float, ...]
    """Generating, training, and the CPU time of both."""


def play_round(settings: Settings, run: Run, number: int) -> Round:
    ours, theirs = Cost(), Cost()
    trajectories = asyncio.run(step_vlmrl(run, settings, ours, f"round{number}"))
    step_trl(run.folder / "model", settings, theirs)
    bare = BareLoop(run.folder / "model", trajectories, MEMBERS, run.model.policy.family)
    bare.seconds()
    times = []
    for _ in range(settings.steps):
        began = time.process_time()
        times.append((*bare.seconds(), time.process_time() - began))
    return Round(ours, theirs, tuple(map(statistics.median, zip(*times, strict=True))))


def report(settings: Settings, rounds: list[Round]) -> None:
    if any(differ(each.ours, each.theirs) > SAME for each in rounds):
        lengths = [(each.ours.sampled_tokens, each.theirs.sampled_tokens) for each in rounds]
        raise SystemExit(f"the two sides sampled different numbers of tokens, {lengths}: raise --teach.")
    distinct = settings.groups * settings.turns
    print(
        f"\n{settings.turns} turns, {settings.groups} groups of {MEMBERS}, {rounds[0].ours.sampled_tokens[0]:.0f} sampled tokens a "
        f"trajectory, {torch.get_num_threads()} thread{'s'[: torch.get_num_threads() > 1]}; medians of {len(rounds)} rounds"
    )
    print(f"{'':<34}{'TRL':>10}{'vlmrl':>10}{'ratio':>10}{'bare loop':>12}{'vlmrl / bare':>14}")
    line("step, seconds", rounds, lambda cost: cost.step, lambda bare: bare[0] + bare[1])
    line("of it generating, seconds", rounds, lambda cost: cost.generating, lambda bare: bare[0])
    line("the rest, seconds", rounds, lambda cost: np.subtract(cost.step, cost.generating), lambda bare: bare[1])
    line("step, CPU seconds", rounds, lambda cost: cost.cpu, lambda bare: bare[2])
    line("images processed / distinct", rounds, lambda cost: np.divide(cost.processed, distinct))
    line("images encoded / distinct", rounds, lambda cost: np.divide(cost.encoded, distinct))


def line(
    title: str,
    rounds: list[Round],
    values: Callable[[Cost], Any],
    bound: Callable[[tuple[float, ...]], float] | None = None,
) -> None:
    """Medians over the rounds: of each side, of the ratio within a round, of the bare loop."""
    theirs, ours = ([float(np.median(values(cost))) for cost in side] for side in both(rounds))
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    text = f"{title:<34}{statistics.median(theirs):>10.2f}{statistics.median(ours):>10.2f}{ratio:>10.2f}"
    if bound is not None:
        bare = [bound(each.bare) for each in rounds]
        above = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
        text += f"{statistics.median(bare):>12.2f}{above:>14.2f}"
    print(text)


def both(rounds: list[Round]) -> tuple[list[Cost], list[Cost]]:
    return [each.theirs for each in rounds], [each.ours for each in rounds]


def measure(settings: Settings) -> None:
    IMAGES.watch_processor()
    with tempfile.TemporaryDirectory() as scratch:
        run = teach(settings, Path(scratch))
        rounds = [play_round(settings, run, number) for number in range(settings.rounds)]
        run.engine.close()
    report(settings, rounds)


def main(settings: Settings) -> None:
    if list(map(str, settings.threads)) == [os.environ.get("OMP_NUM_THREADS")]:
        measure(settings)
        return
    for count in settings.threads:
        command = [sys.executable, *sys.argv, "--threads", str(count)]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(count)}, check=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))
