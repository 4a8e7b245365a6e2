"""The same multi-turn task with images in vlmrl and in TRL's GRPOTrainer, in one run on this machine.

    pip install -e '.[bench]'
    python benchmarks/vs_trl.py --turns 8

An agent sees ``turns`` images, the first in its prompt and one more after each tool call, and then says that it is done. A tiny
Qwen3-VL is first trained until sampling (top_p 0.9) gives only these replies, with one of eight digits in each call. So both sides
really generate, their replies have equal lengths (this is checked), and members of a group differ. Both use the same weights,
template, processor and batch: one optimizer step on ``groups`` groups of 8. TRL generates with its transformers backend and an
`environment_factory`. The two alternate, and medians of their steps are compared. Prints step times, their share of generation
(prefill included), and how often each distinct image was processed and encoded.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import tyro
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback, TrainerCallback
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from vlmrl import Config, Data, Env, Model, Optim, Rollout, Task, Train, WarmStart, obs
from vlmrl.data import TaskStream
from vlmrl.report.progress import RunProgress
from vlmrl.run.build import Run, build_run
from vlmrl.run.loop import train_on
from vlmrl.run.warm_start import warm_start
from vlmrl.train.trainer import TrainerSpec

CALL = '<tool_call>\n{"name": "look", "arguments": {"page": PAGE}}\n</tool_call>'
QUESTION = "Look at all the images, one by one."
TOP_P = 0.9
TINY_LR = 1e-12  # the optimizer works as ever, and the taught replies stay as they are


@dataclass(frozen=True)
class Settings:
    turns: int = 4
    """Replies per trajectory, each after a new image."""
    groups: int = 2
    """Groups of 8 trajectories per step."""
    side: int = 128
    """Of the images, in pixels; 32 x 32 make a visual token."""
    steps: int = 5
    """Measured steps of each side per round, after one that is not counted."""
    rounds: int = 2
    teach: int = 200
    """Supervised steps before."""
    share_prefixes: bool = True
    """vlmrl's setting of that name; without it the trainer runs every row whole, as TRL does."""


@dataclass
class Cost:
    """What one side's steps took; times in seconds, images summed over the steps."""

    step: list[float] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)
    processed: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    sampled_tokens: list[float] = field(default_factory=list)  # mean of a trajectory

    def add(self, before: Marks, after: Marks, sampled_tokens: float) -> None:
        self.step.append(after.clock - before.clock)
        self.generating.append(after.generating - before.generating)
        self.processed.append(after.processed - before.processed)
        self.encoded.append(after.encoded - before.encoded)
        self.sampled_tokens.append(sampled_tokens)


@dataclass(frozen=True)
class Marks:
    """What had been used up at a moment."""

    clock: float
    generating: float
    processed: int
    encoded: int

    @classmethod
    def now(cls, generating: float) -> Marks:
        return cls(time.perf_counter(), generating, IMAGES.processed, IMAGES.encoded)


class Images:
    """Counts, wherever they come from, the images that reach the image processor and the vision tower."""

    processed = 0
    encoded = 0

    def watch_processor(self) -> None:
        original = Qwen2VLImageProcessor._preprocess

        def counting(processor: Any, images: list[Any], *args: Any, **kwargs: Any) -> Any:
            self.processed += len(images)
            return original(processor, images, *args, **kwargs)

        Qwen2VLImageProcessor._preprocess = counting

    def watch_tower(self, model: Any) -> None:
        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.encoded += len(kwargs["grid_thw"])

        model.model.visual.register_forward_pre_hook(count, with_kwargs=True)


IMAGES = Images()


def image(seed: int, number: int, side: int) -> Image.Image:
    """The same image for all members of a group, drawn again for each of them, as a crop would be."""
    return Image.fromarray(np.random.default_rng([seed, number]).integers(0, 256, (side, side, 3), dtype=np.uint8))


def look(page: int) -> list:
    """Look at the next image.

    Args:
        page: Any number.
    """


def make_task(index: int, seed: int, turns: int, side: int) -> dict[str, Any]:
    return {"prompt": f"<image>{QUESTION}", "images": [image(index, 0, side)], "turns": turns}


class LookEnv(Env):
    """vlmrl's side: a tool message with an image after each call."""

    tools = [get_json_schema(look)]  # noqa: RUF012

    def __init__(self, task: Task, turns: int, side: int) -> None:
        super().__init__(task)
        self.turns, self.side = turns, side

    def step(self, response_text):
        if "<tool_call>" not in response_text:
            return obs(), True, {"reward": float(np.random.random())}
        number = self.turn + 1
        return obs(caption(number, self.turns), images=[image(self.seed, number, self.side)]), False, {}

    def format_observation(self, observation):
        return {**super().format_observation(observation), "role": "tool"}


def caption(number: int, turns: int) -> str:
    return "The last one." if number == turns - 1 else "There is one more."


def demonstrate(task: Task, turn: int) -> str:
    digit = str(random.Random(f"{task.id}/{turn}").randint(1, 8))
    return CALL.replace("PAGE", digit) if turn < task.data["turns"] - 1 else "Done."


def teach(settings: Settings, folder: Path) -> Run:
    """A run whose tiny model, saved in its folder, gives the scripted replies and no others."""
    template = folder / "template.jinja"
    template.write_text(qwen3_vl_chat_template)
    options = {"turns": settings.turns, "side": settings.side}
    run = build_run(
        Config(
            name="vs_trl",
            output_dir=str(folder),
            model=Model(device="cpu", dtype="float32", chat_template=str(template)),
            data=Data(generator=make_task, size=10_000, options=options),
            env=LookEnv,
            env_options=options,
            rollout=Rollout(max_turns=settings.turns, max_tokens=16_384, max_reply_tokens=64, top_p=TOP_P),
            warm_start=WarmStart(demonstrate=demonstrate, steps=settings.teach, trajectories_per_step=4),
            optim=Optim(lr=TINY_LR),
            train=Train(groups_per_batch=settings.groups),
            save_model=False,
        )
    )
    asyncio.run(warm_start(run, RunProgress()))
    run.model.save(run.folder / "model")
    IMAGES.watch_tower(run.model.policy.model)
    return run


async def step_vlmrl(run: Run, settings: Settings, cost: Cost, label: str) -> None:
    """The stages of `vlmrl.run.loop.train`, timed."""
    config = run.config
    budget = config.train.tokens_per_micro_batch
    sizes = {"total_steps": 100, "tokens_per_micro_batch": budget, "share_prefixes": settings.share_prefixes}
    trainer = run.trainers.start(TrainerSpec(config.algo, config.optim, **sizes))
    runner, tasks = run.runner(), TaskStream(run.tasks)
    for step in range(settings.steps + 1):
        before = Marks.now(run.engine.seconds_busy)
        rollouts = await runner.play(tasks, settings.groups, f"{label}/{step}")
        train_on(run, trainer, rollouts.trajectories)
        run.engine.weights_changed(trainer.steps_done)
        if step:
            sampled = statistics.mean(trajectory.num_sampled for trajectory in rollouts.trajectories)
            cost.add(before, Marks.now(run.engine.seconds_busy), sampled)


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
    members = settings.groups * 8
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
            per_device_train_batch_size=members,
            num_generations=8,
            max_completion_length=16_000,
            max_tool_calling_iterations=settings.turns,
            generation_kwargs={"max_new_tokens": 64},
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


class LookTRL:
    """TRL's side: the public methods are the tools."""

    def __init__(self, turns: int, side: int) -> None:
        self._turns, self._side = turns, side

    def reset(self, seed: int, **columns: Any) -> None:
        self._seed, self._number = seed, 0

    def look(self, page: int) -> list:
        """Look at the next image.

        Args:
            page: Any number.
        """
        self._number += 1
        shown = image(self._seed, self._number, self._side)
        return [{"type": "image", "image": shown}, {"type": "text", "text": caption(self._number, self._turns)}]

    def get_reward(self) -> float:
        return float(np.random.random())


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


def report(settings: Settings, ours: Cost, theirs: Cost) -> None:
    lengths = [statistics.mean(cost.sampled_tokens) for cost in (ours, theirs)]
    if abs(lengths[0] / lengths[1] - 1) > 0.01:  # a digit may take one token more than another
        raise SystemExit(f"the two sides sampled {lengths} tokens a trajectory: raise --teach.")
    distinct = settings.groups * settings.turns
    print(f"\n{settings.turns} turns, {settings.groups} groups of 8, {lengths[0]:.0f} sampled tokens a trajectory")
    print(f"{'medians of a step':<34}{'TRL':>10}{'vlmrl':>10}{'ratio':>10}")
    for title, name in [("step, seconds", "step"), ("of it generating, seconds", "generating")]:
        line(title, statistics.median(getattr(theirs, name)), statistics.median(getattr(ours, name)))
    rest = [statistics.median(a - b for a, b in zip(c.step, c.generating, strict=True)) for c in (theirs, ours)]
    line("the rest, seconds", *rest)
    line("images processed / distinct", *(statistics.median(c.processed) / distinct for c in (theirs, ours)))
    line("images encoded / distinct", *(statistics.median(c.encoded) / distinct for c in (theirs, ours)))


def line(title: str, theirs: float, ours: float) -> None:
    print(f"{title:<34}{theirs:>10.2f}{ours:>10.2f}{theirs / ours:>10.2f}")


def main(settings: Settings) -> None:
    IMAGES.watch_processor()
    with tempfile.TemporaryDirectory() as scratch:
        run = teach(settings, Path(scratch))
        ours, theirs = Cost(), Cost()
        for number in range(settings.rounds):
            asyncio.run(step_vlmrl(run, settings, ours, f"round{number}"))
            step_trl(run.folder / "model", settings, theirs)
        run.engine.close()
    report(settings, ours, theirs)


if __name__ == "__main__":
    main(tyro.cli(Settings))
