"""Host memory of a batch's images: episodes with a new image each turn are played, made into samples, audited and packed once.

    python benchmarks/image_memory.py                       # 32 x 20 x 640x480: without a bound, and within half of the pixels
    python benchmarks/image_memory.py --episodes 1024 --width 1280 --height 960 --memory-gib 1 --no-unbounded
    python benchmarks/image_memory.py --episodes 64 --width 1280 --height 960 --repeats 3     # what spilling costs

Responses are scripted, so that no weights and no KV cache take memory. The images are page-like screenshots, or ``--images noise``,
which does not compress. Each variant runs in a process of its own, in turns. Prints the rise of its resident memory from before the
first episode to the peak, as a multiple of the distinct images' pixels (3 bytes each, at the model's size), and the ratios of the
times. The processor is the real Qwen3-VL's where `$VLMRL_SHARED` or `../shared` has it.
"""

import asyncio
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor

from vlmrl import Env, Model, Rollout, Task, obs
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import resolve_env
from vlmrl.model import tiny
from vlmrl.model.loading import Reader, load_reader
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import audit, concat
from vlmrl.train.packing import pack, split
from vlmrl.types import Sample, Trajectory

SHARED = Path(os.environ.get("VLMRL_SHARED") or Path(__file__).resolve().parents[2] / "shared")
RESPONSE = "I look at the page and click on the next link. " * 4
TOKENS_PER_MICRO_BATCH = 16_384
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Settings:
    episodes: int = 32
    turns: int = 20
    width: int = 640
    height: int = 480
    images: Literal["pages", "noise"] = "pages"
    memory_gib: float | None = None
    """The bound. Unset: half of the distinct pixels."""
    unbounded: bool = True
    """Run without a bound, too."""
    repeats: int = 1
    """Runs of each variant. The medians of their times are compared."""

    @property
    def pixel_gib(self) -> float:
        return self.episodes * self.turns * self.width * self.height * 3 / 2**30


@dataclass(frozen=True)
class Result:
    rise_gib: float
    seconds: float
    cpu: float
    peak_gib: float
    spilled_gib: float


class Browser(Env):
    """A new screenshot after each response: a part of a long page, under a line of text that no other has."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__(task)
        self.settings = settings

    @classmethod
    def setup(cls, settings: Settings) -> Image.Image:
        return long_page(settings.width, 4 * settings.height)

    def step(self, response_text: str) -> Any:
        width, height = self.settings.width, self.settings.height
        number = next(NUMBERS)
        if self.settings.images == "noise":
            image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))
        else:
            top = 37 * number % (3 * height)
            image = self.shared.crop((0, top, width, top + height))
            ImageDraw.Draw(image).text((5, 5), f"Page {number}", fill="red")
        return obs("Here is the next page.", images=[image]), self.turn == self.settings.turns, {"reward": 1.0}


def long_page(width: int, height: int) -> Image.Image:
    """Lines of coloured text, with a picture of noise here and there."""
    dice, page = np.random.default_rng(0), Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    for top in range(0, height - 12, 16):
        words = ("".join(map(chr, dice.integers(97, 123, dice.integers(2, 10)))) for _ in range(width // 40))
        draw.text((40, top), " ".join(words), fill=tuple(map(int, dice.integers(0, 100, 3))))
    for top in range(200, height - 160, 400):
        colors = np.kron(dice.integers(0, 256, (20, 30, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        page.paste(Image.fromarray(colors), (int(dice.integers(0, width - 240)), top))
    return page


class Parts:
    """What a run has of a model without its weights."""

    def __init__(self, settings: Settings, scratch: str, memory_gib: float | None) -> None:
        self.settings = settings
        folder = tiny.build(Path(scratch) / "tiny", max_pixels=2**22)
        self.reader: Reader = load_reader(Model(path=str(folder)), Path(scratch))
        real = SHARED / "data/qwen/qwen3-vl"
        self.processor = AutoImageProcessor.from_pretrained(real if real.is_dir() else folder)
        memory = PixelMemory(2**50 if memory_gib is None else int(memory_gib * 2**30))
        self.store = MediaStore(self.reader.family, self.processor, memory=memory)

    def play(self, episodes: int) -> list[Trajectory]:
        limit = self.settings.turns * (self.settings.width * self.settings.height // 1000 + 200)
        config = Rollout(group_size=1, max_turns=self.settings.turns + 1, max_tokens=limit)
        engine = ScriptedEngine(lambda request, turn: RESPONSE, self.reader.renderer)
        env = resolve_env(Browser, options={"settings": self.settings})
        loop = TurnLoop(env, engine, self.reader.renderer, self.store, config)
        tasks = (Task(str(n), [{"role": "user", "content": "Read on."}], seed=n) for n in range(episodes))

        async def go() -> list[Trajectory]:
            rollouts = await Runner(loop).play(tasks, episodes, "step")
            assert len(rollouts.groups) == episodes, rollouts.failed[0].error
            return rollouts.trajectories

        with asyncio.Runner() as runner:  # asyncio.run would print what a long result holds
            return runner.run(go())

    def train(self, trajectories: list[Trajectory]) -> None:
        """Samples, audit, and for each micro-batch its layout and its images' tensors."""
        samples: list[Sample] = [sample for trajectory in trajectories for sample in concat(trajectory)]
        family = self.reader.family
        audit(samples, trajectories, image_token_id=family.image_token_id, banned_ids=family.banned_ids)
        for plan in split(samples, TOKENS_PER_MICRO_BATCH, "tree", family.image_token_id):
            batch = pack(samples, plan, family).batch
            merge_mm_inputs(batch.images, family, self.processor, torch.device("cpu"))


def measure(settings: Settings, memory_gib: float | None) -> Result:
    """One variant, in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        parts = Parts(settings, scratch, memory_gib)
        parts.train(parts.play(1))  # imports, caches, tables
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before, cpu, began = resident("VmRSS"), time.process_time(), time.perf_counter()
        trajectories = parts.play(settings.episodes)
        usage = parts.store.memory.usage()
        parts.train(trajectories)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    rise = (resident("VmHWM") - before) / 2**20
    return Result(rise, seconds, cpu, usage.peak / 2**30, usage.spilled / 2**30)


def resident(name: str) -> int:
    """Resident memory of this process in KiB: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main(settings: Settings) -> None:
    bound = settings.memory_gib if settings.memory_gib is not None else settings.pixel_gib / 2
    bounds = {f"within {bound:.3g} GiB": bound} | ({"unbounded": None} if settings.unbounded else {})
    results: dict[str, list[Result]] = {name: [] for name in bounds}
    for _, (name, limit) in itertools.product(range(settings.repeats), bounds.items()):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            results[name].append(process.submit(measure, settings, limit).result())
    shape = f"{settings.episodes} x {settings.turns} x {settings.width}x{settings.height} {settings.images}"
    print(f"{shape}: {settings.pixel_gib:.2f} GiB of pixels\n")
    print(
        "| | peak rise GiB | rise / pixels | held at most GiB | in files GiB | seconds | CPU seconds |\n"
        + "| --- " * 7
        + "|"
    )
    for name, runs in results.items():
        rise = max(run.rise_gib for run in runs)
        times = " | ".join(f"{statistics.median(getattr(run, key) for run in runs):.1f}" for key in ("seconds", "cpu"))
        held = f"{runs[0].peak_gib:.2f} | {runs[0].spilled_gib:.2f}"
        print(f"| {name} | {rise:.2f} | {rise / settings.pixel_gib:.2f} | {held} | {times} |")
    if settings.unbounded:
        one, other = results.values()
        for key in ("seconds", "cpu"):
            ratio = statistics.median(getattr(a, key) for a in one) / statistics.median(getattr(b, key) for b in other)
            print(f"\n{key}, bounded / unbounded: {ratio:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
