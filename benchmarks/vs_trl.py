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

Both run whole training loops, their logs included: metrics here and there, and here also the records and images of the trajectories.
A step lasts from one row of metrics to the next. The members of a group see the same images, or, after the prompt's, images of their
own, as with crops and browsers (``--images``).

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
import tyro
from bare_loop import BareLoop
from datasets import Dataset
from look_task import QUESTION, LookEnv, LookTRL, demonstrate, image, make_task
from rich.console import Console
from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback, TrainerCallback
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from vlmrl import Config, Data, Model, Optim, Rollout, Train, WarmStart
from vlmrl.data import TaskStream
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run.build import Run, build_run
from vlmrl.run.loop import train
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
    images: tuple[Literal["shared", "own"], ...] = ("shared", "own")
    """Whether the members of a group see the same images, or, after the prompt's, images of their own."""
    threads: tuple[int, ...] = (1, 2)
    """Threads of torch; each number is measured in a process of its own, since torch reads it when it starts."""
    steps: int = 5
    """Measured steps of each side per round, after one that is not counted."""
    rounds: int = 3
    teach: int = 200
    """Supervised steps before the two sides are compared."""
    teach_rounds: int = 5
    """How often they are taught again, if their responses differ."""

    @property
    def own_images(self) -> bool:
        return self.images == ("own",)

    @property
    def distinct_images(self) -> int:
        return self.groups * (1 + (self.turns - 1) * (MEMBERS if self.own_images else 1))


@dataclass
class Cost:
    """What one side's steps took; times in seconds, images summed over the steps."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    sampled_tokens: list[float] = field(default_factory=list)  # mean of a trajectory
    pages: float = 0.0  # CPU seconds of what is drawn once, at the end of the run

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


def teach(settings: Settings, folder: Path) -> Path:
    """The folder of a tiny model that gives the scripted responses and no others, in vlmrl and in TRL.

    Raises SystemExit if the two sides still sample different numbers of tokens after ``settings.teach_rounds`` rounds.
    """
    probe, model = replace(settings, steps=1, images=("shared",)), "tiny:qwen3_vl"
    for number in range(settings.teach_rounds):
        ours, theirs = Cost(), Cost()
        run, trajectories = train_vlmrl(probe, folder, f"taught{number}", model, ours, settings.teach)
        model = str(run.folder / "model")
        train_trl(probe, folder, model, theirs)
        lengths = {each.num_sampled for each in trajectories}
        scripted = {len(trajectory.turns) for trajectory in trajectories} == {settings.turns} and len(lengths) == 1
        if scripted and differ(ours, theirs) <= SAME:
            return Path(model)
    raise SystemExit(
        f"after {settings.teach_rounds} x {settings.teach} supervised steps the two sides do not sample equal responses: "
        f"{ours.sampled_tokens} and {theirs.sampled_tokens} tokens a trajectory. Raise --teach or --teach-rounds."
    )


def differ(ours: Cost, theirs: Cost) -> float:
    """The relative difference of the sampled tokens of a trajectory."""
    return abs(statistics.mean(ours.sampled_tokens) / statistics.mean(theirs.sampled_tokens) - 1)


def make_run(settings: Settings, folder: Path, name: str, model: str, teach_steps: int) -> Run:
    template = folder / "template.jinja"
    template.write_text(qwen3_vl_chat_template)
    options = {"turns": settings.turns, "side": settings.side}
    return build_run(
        Config(
            name=name,
            output_dir=str(folder),
            model=Model(path=model, device="cpu", dtype="float32", chat_template=str(template)),
            data=Data(generator=make_task, size=10_000, options=options),
            env=LookEnv,
            env_options=options | {"own_images": settings.own_images},
            rollout=Rollout(max_turns=settings.turns, max_tokens=16_384, max_response_tokens=64, top_p=TOP_P),
            warm_start=WarmStart(demonstrate=demonstrate, steps=teach_steps, trajectories_per_step=4),
            optim=Optim(lr=TINY_LR),
            train=Train(steps=settings.steps + 1, groups_per_batch=settings.groups),
            save_model=teach_steps > 0,
        )
    )


def train_vlmrl(
    settings: Settings, folder: Path, name: str, model: str, cost: Cost, teach_steps: int = 0
) -> tuple[Run, list[Trajectory]]:
    """A whole run. Returns it, closed, with trajectories that were played after it."""
    run = make_run(settings, folder, name, model, teach_steps)
    IMAGES.watch_tower(run.model.policy.model)
    times = StepTimes(cost)

    def on_row(row: Mapping[str, Any]) -> None:
        if "sampled_tokens/mean" in row:  # the others are of supervised steps
            times.ended(Marks.now(run.engine.seconds_busy), row["sampled_tokens/mean"])

    with RunLog(run.folder) as log:
        log.on_row = on_row
        asyncio.run(train(run, log, RunProgress(Console(quiet=True))))
    if not teach_steps:
        cost.pages = time.process_time() - times.last.cpu
    trajectories = asyncio.run(run.runner().play(TaskStream(run.tasks), settings.groups, "played")).trajectories
    run.close()
    return run, trajectories


def train_trl(settings: Settings, folder: Path, path: str, cost: Cost) -> None:
    processor = AutoProcessor.from_pretrained(path)
    processor.chat_template = processor.tokenizer.chat_template = qwen3_vl_chat_template
    model = AutoModelForImageTextToText.from_pretrained(path, dtype="float32", attn_implementation="sdpa")
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
        environment_factory=lambda: LookTRL(settings.turns, settings.side, settings.own_images),
        callbacks=[TRLSteps(clock, cost)],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
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


class StepTimes:
    """From the end of one step to the end of the next; the first is not counted."""

    last: Marks | None = None

    def __init__(self, cost: Cost) -> None:
        self.cost = cost

    def ended(self, now: Marks, sampled_tokens: float) -> None:
        if self.last is not None:
            self.cost.add(self.last, now, sampled_tokens)
        self.last = now


class TRLSteps(TrainerCallback):
    def __init__(self, clock: Clock, cost: Cost) -> None:
        self.clock, self.times = clock, StepTimes(cost)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self.times.ended(Marks.now(self.clock.seconds), float(logs["completions/mean_length"]))


@dataclass
class Round:
    """Of one round: both sides' steps, and the medians of the bare loop in seconds."""

    ours: Cost
    theirs: Cost
    bare: tuple[float, ...]
    """Generating, training, and the CPU time of both."""


def play_round(settings: Settings, folder: Path, model: Path, name: str) -> Round:
    ours, theirs = Cost(), Cost()
    run, trajectories = train_vlmrl(settings, folder, name, str(model), ours)
    train_trl(settings, folder, str(model), theirs)
    bare = BareLoop(model, trajectories, MEMBERS, run.model.policy.family)
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
    distinct, threads = settings.distinct_images, torch.get_num_threads()
    print(
        f"\n{settings.turns} turns, {settings.images[0]} images, {settings.groups} groups of {MEMBERS}, "
        f"{rounds[0].ours.sampled_tokens[0]:.0f} sampled tokens a trajectory, {threads} thread{'s'[: threads > 1]}; "
        f"medians of {len(rounds)} rounds"
    )
    print(f"{'':<34}{'TRL':>10}{'vlmrl':>10}{'ratio':>10}{'bare loop':>12}{'vlmrl / bare':>14}")
    line("step, seconds", rounds, lambda cost: cost.step, lambda bare: bare[0] + bare[1])
    line("of it generating, seconds", rounds, lambda cost: cost.generating, lambda bare: bare[0])
    line("the rest, seconds", rounds, lambda cost: np.subtract(cost.step, cost.generating), lambda bare: bare[1])
    line("step, CPU seconds", rounds, lambda cost: cost.cpu, lambda bare: bare[2])
    line("images processed / distinct", rounds, lambda cost: np.divide(cost.processed, distinct))
    line("images encoded / distinct", rounds, lambda cost: np.divide(cost.encoded, distinct))
    pages = max(each.ours.pages for each in rounds)
    print(f"Not in a step: vlmrl's curve and page, once at the end of a run: at most {pages:.2f} CPU seconds")


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
        folder = Path(scratch)
        model = teach(settings, folder)
        for images in settings.images:
            own = replace(settings, images=(images,))
            report(own, [play_round(own, folder, model, f"{images}{number}") for number in range(settings.rounds)])


def main(settings: Settings) -> None:
    if list(map(str, settings.threads)) == [os.environ.get("OMP_NUM_THREADS")]:
        measure(settings)
        return
    for count in settings.threads:
        command = [sys.executable, *sys.argv, "--threads", str(count)]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(count)}, check=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))
