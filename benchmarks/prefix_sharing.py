"""Training with shared prefixes: the same samples with common prefixes computed once, and row by row.

    python benchmarks/prefix_sharing.py group          # 8 responses to one prompt with an image
    python benchmarks/prefix_sharing.py turns          # 16 turns of one trajectory, a row each
    python benchmarks/prefix_sharing.py growth         # how the cost of step-wise rows grows with the number of turns
    python benchmarks/prefix_sharing.py table          # turns x group size
    python benchmarks/prefix_sharing.py layouts --family qwen3_5     # trees, packed rows and padded rows: CPU time and tokens

A Qwen3-VL of 27 M parameters (hidden 512), or another family at this width, takes whole optimizer steps on the CPU. Unshared rows are
padded together with rows of similar length, at several micro-batch sizes, of which the fastest counts. The variants alternate; medians
are compared. Memory is the peak resident memory above the model, its gradients and the optimizer state.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from PIL import Image

from vlmrl.config import Algo, Model, Optim
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.samples import concat, step_wise
from vlmrl.train.packing import Layout
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import MediaItem, Sample, Task, Trajectory, Turn

SIDE = 512  # of the image in pixels: 256 visual tokens
BUDGET = 16_384  # tokens in a micro-batch of shared rows
VOCABULARY = 200
UNSHARED_TURNS = 16  # that take less than a minute


@dataclass(frozen=True)
class Settings:
    part: tyro.conf.Positional[Literal["group", "turns", "growth", "table", "layouts"]]
    family: str = "qwen3_vl"
    prompt: int = 400
    """Tokens, those of the image included."""
    response: int = 100
    observation: int = 20
    repetitions: int = 3


@dataclass(frozen=True)
class Variant:
    """One way to train on ``rows``, in micro-batches of ``budget`` tokens; their prefixes are shared in a tree."""

    rows: list[Sample]
    layout: Layout
    budget: int


@dataclass
class Cost:
    """Of one variant: seconds, of which of the CPU, and MiB at each repetition, and what one step computes."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    tokens: int = 0
    images: int = 0

    @property
    def time(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """The model, and counters of what goes through it."""

    def __init__(self, folder: Path, family: str) -> None:
        sizes = {"hidden_size": 512, "num_layers": 8, "vision_hidden_size": 128, "max_pixels": SIDE**2}
        path = tiny.build(folder / "model", family, **sizes)
        self.model: LoadedModel = load_model(Model(path=str(path), device="cpu"), folder, seed=0)
        self.store = self.model.new_store()
        self.tokens = self.images = 0
        inner = self.model.policy.model.model
        inner.language_model.register_forward_pre_hook(self._count_tokens, with_kwargs=True)
        inner.visual.register_forward_pre_hook(self._count_images, with_kwargs=True)
        warm_up = Variant(rows_of(self, Settings("group"), 1, 2, concat), True, BUDGET)
        self.trainer(warm_up).step(warm_up.rows)
        self.resident = resident()

    def _count_tokens(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tokens += kwargs["inputs_embeds"].shape[0] * kwargs["inputs_embeds"].shape[1]

    def _count_images(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.images += len(kwargs["grid_thw"])

    def trainer(self, variant: Variant) -> Trainer:
        spec = TrainerSpec(Algo(), Optim(lr=1e-9), total_steps=1, tokens_per_micro_batch=variant.budget)
        trainer = Trainer(self.model.policy, spec)
        trainer._layout = variant.layout  # packed rows are a GPU's: no setting chooses them on a CPU
        return trainer

    def run(self, variants: dict[str, Variant], repetitions: int) -> dict[str, Cost]:
        costs = {name: Cost() for name in variants}
        for _ in range(repetitions):
            for name, variant in variants.items():
                trainer, cost = self.trainer(variant), costs[name]
                self.tokens = self.images = 0
                reset_peak()
                began, worked = time.perf_counter(), time.process_time()
                trainer.step(variant.rows)
                cost.seconds.append(time.perf_counter() - began)
                cost.cpu.append(time.process_time() - worked)
                cost.memory.append(resident("VmHWM") - self.resident)
                cost.tokens, cost.images = self.tokens, self.images
        return costs


def resident(what: str = "VmRSS") -> float:
    """MiB, from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def reset_peak() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def rows_of(
    bench: Bench, settings: Settings, turns: int, members: int, form: Callable[[Trajectory], list[Sample]]
) -> list[Sample]:
    """The samples of one group's trajectories, whose prompt shows an image; every token but the prompt's is its own."""
    dice = random.Random(turns)
    item = bench.store.load(Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)))
    text = ids(dice, settings.prompt - item.num_tokens)
    prompt = text[:70] + [bench.model.policy.image_token_id] * item.num_tokens + text[70:]
    samples: list[Sample] = []
    for member in range(members):
        trajectory = Trajectory(f"g/{member}", "g", Task("g", []), ending="env_done", final_reward=1.0)
        for number in range(turns):
            shown, media = (ids(dice, settings.observation), []) if number else (prompt, [item])
            response = ids(dice, settings.response)
            lists = (shown, media, response, [-5.0] * len(response), [0] * len(response))
            above = {}
            if number:
                last = trajectory.turns[-1]
                above = {"parent": number - 1, "kept": last.length, "kept_media": last.num_images}
            trajectory.turns.append(Turn(*lists, "stop", "", **above))
        advantage = dice.uniform(-1, 1)
        samples += [replace(sample, advantage=advantage) for sample in form(trajectory)]
    return samples


def ids(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(size)]


def unshared(rows: list[Sample], sizes: tuple[int, ...]) -> dict[str, Variant]:
    """Padded, with as many of the longest row in a micro-batch as ``sizes`` say."""
    longest = max(map(len, rows))
    return {f"unshared, {size} rows at once": Variant(rows, "padded", size * longest) for size in sizes}


def images_apart(rows: list[Sample]) -> list[Sample]:
    """Rows that do not know that their image is the same: it is encoded for each."""
    numbers: Iterator[int] = iter(range(10**6))

    def another(item: MediaItem) -> MediaItem:
        return replace(item, id=f"{item.id}/{next(numbers)}")

    return [replace(row, media=[another(item) for item in row.media]) for row in rows]


def fastest(costs: dict[str, Cost], beginning: str) -> Cost:
    return min((cost for name, cost in costs.items() if name.startswith(beginning)), key=lambda cost: cost.time)


def show(costs: dict[str, Cost]) -> None:
    print("| | seconds | peak MiB | tokens computed | images encoded |\n| --- | --- | --- | --- | --- |")
    for name, cost in costs.items():
        memory = statistics.median(cost.memory)
        print(f"| {name} | {cost.time:.2f} | {memory:.0f} | {cost.tokens} | {cost.images} |")


def show_gain(shared: Cost, other: Cost) -> None:
    gain, ratio = other.time / shared.time, other.tokens / shared.tokens
    print(f"\ngain {gain:.2f}; ratio of tokens {ratio:.2f}; gain / ratio {gain / ratio:.2f}")
    print(f"images encoded for the one that there is, shared: {shared.images}")


def group(bench: Bench, settings: Settings) -> None:
    rows = rows_of(bench, settings, 1, 8, concat)
    variants = {"shared": Variant(rows, "tree", BUDGET)} | unshared(rows, (1, 2, 4, 8))
    variants["each row with its image encoded, 2 at once"] = unshared(images_apart(rows), (2,)).popitem()[1]
    costs = bench.run(variants, settings.repetitions)
    show(costs)
    show_gain(costs["shared"], fastest(costs, "unshared"))


def turns(bench: Bench, settings: Settings, number: int = 16) -> None:
    rows, whole = (rows_of(bench, settings, number, 1, form) for form in (step_wise, concat))
    variants = {"concat": Variant(whole, "tree", BUDGET), "step-wise, shared": Variant(rows, "tree", BUDGET)}
    variants |= unshared(rows, (1, 2))
    variants["each row with its image encoded, 2 at once"] = unshared(images_apart(rows), (2,)).popitem()[1]
    costs = bench.run(variants, settings.repetitions)
    show(costs)
    show_gain(costs["step-wise, shared"], fastest(costs, "unshared"))
    print(f"step-wise / concat: {costs['step-wise, shared'].time / costs['concat'].time:.2f}")


def growth(bench: Bench, settings: Settings) -> None:
    numbers = (2, 4, 8, 16, 32)
    rows, whole = ([rows_of(bench, settings, number, 1, form) for number in numbers] for form in (step_wise, concat))
    shared = {str(number): Variant(each, "tree", BUDGET) for number, each in zip(numbers, rows, strict=True)}
    joined = {str(number): Variant(each, "tree", BUDGET) for number, each in zip(numbers, whole, strict=True)}
    short = {str(len(each)): unshared(each, (2,)).popitem()[1] for each in rows if len(each) <= UNSHARED_TURNS}
    costs = {
        "step-wise, shared": bench.run(shared, settings.repetitions),
        "concat": bench.run(joined, settings.repetitions),
        "step-wise, unshared": bench.run(short, 1),
    }
    print("| turns | " + " | ".join(map(str, numbers)) + " |\n| --- |" + " --- |" * len(numbers))
    for name, each in costs.items():
        cells = [f"{each[str(number)].time:.2f}" if str(number) in each else "" for number in numbers]
        print(f"| {name}, seconds | " + " | ".join(cells) + " |")
    for name, each in costs.items():
        show_fit(name, np.array([int(number) for number in each]), np.array([cost.time for cost in each.values()]))


def show_fit(name: str, numbers: np.ndarray, seconds: np.ndarray) -> None:
    """A line and a parabola through the medians, each point weighted by 1 / seconds, so that the errors are relative ones."""
    line, parabola = (np.polyfit(numbers, seconds, degree, w=1 / seconds) for degree in (1, 2))
    error = np.abs(np.polyval(line, numbers) / seconds - 1).max()
    bend = parabola[0] * numbers[-1] ** 2 / np.polyval(parabola, numbers[-1])
    print(
        f"\n{name}: {line[1]:.3f} + {line[0]:.4f} T, off by at most {error:.0%}; "
        f"with a term in T^2, that is {bend:.0%} of the time at T = {numbers[-1]}"
    )


def table(bench: Bench, settings: Settings) -> None:
    print("| turns | group | unshared, s | shared, s | gain | tokens | unshared, MiB | shared, MiB | shared / concat |")
    print("| --- " * 9 + "|")
    for number in (1, 4, 8):
        for members in (1, 4, 8):
            rows, whole = (rows_of(bench, settings, number, members, form) for form in (step_wise, concat))
            variants = {"shared": Variant(rows, "tree", BUDGET), "concat": Variant(whole, "tree", BUDGET)}
            costs = bench.run(variants, settings.repetitions)
            shared, [other] = costs["shared"], bench.run(unshared(rows, (2,)), 1).values()
            memory = [statistics.median(cost.memory) for cost in (other, shared)]
            print(
                f"| {number} | {members} | {other.time:.2f} | {shared.time:.2f} | {other.time / shared.time:.2f} | "
                f"{other.tokens / shared.tokens:.2f} | {memory[0]:.0f} | {memory[1]:.0f} | "
                f"{shared.time / costs['concat'].time:.2f} |"
            )


def layouts(bench: Bench, settings: Settings) -> None:
    """Of a group, of a trajectory's turns, of short rows, and of rows that share nothing."""
    dice = random.Random(0)
    short = [
        row for number in range(4) for row in text_rows(dice, f"g{number}", 20, [dice.randint(5, 15) for _ in range(4)])
    ]
    apart = [row for number in range(8) for row in text_rows(dice, f"g{number}", 30, [dice.randint(20, 400)])]
    cases = {
        "8 responses to one prompt": rows_of(bench, settings, 1, 8, concat),
        "8 turns, a row each": rows_of(bench, settings, 8, 1, step_wise),
        "4 groups of 4 short rows": short,
        "8 rows that share nothing": apart,
    }
    print("| | CPU seconds: tree | packed | padded | tokens: tree | packed | padded |\n" + "| --- " * 7 + "|")
    for title, rows in cases.items():
        variants = {"tree": Variant(rows, "tree", BUDGET), "packed": Variant(rows, "packed", BUDGET)}
        costs = bench.run(variants | unshared(rows, (2, 4, 8)), settings.repetitions)
        padded = min(
            (costs[name] for name in costs.keys() - variants.keys()), key=lambda cost: statistics.median(cost.cpu)
        )
        compared = [costs["tree"], costs["packed"], padded]
        seconds = " | ".join(f"{statistics.median(cost.cpu):.2f}" for cost in compared)
        print(f"| {title} | {seconds} | " + " | ".join(str(cost.tokens) for cost in compared) + " |", flush=True)


def text_rows(dice: random.Random, group: str, prompt: int, responses: list[int]) -> list[Sample]:
    shown = ids(dice, prompt)
    rows = []
    for number, size in enumerate(responses):
        lists = (shown, ids(dice, size), [1] * size, [-5.0] * size, [0] * size)
        rows.append(Sample(*lists, group, f"{group}/{number}", True, "stop", [], dice.uniform(-1, 1)))
    return rows


def main(settings: Settings) -> None:
    parts: dict[str, Callable[[Bench, Settings], None]] = {
        "group": group,
        "turns": turns,
        "growth": growth,
        "table": table,
        "layouts": layouts,
    }
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), settings.family)
        size = sum(parameter.numel() for parameter in bench.model.policy.parameters()) / 1e6
        print(
            f"\n{settings.part}: {size:.1f} M parameters, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
        )
        parts[settings.part](bench, settings)


if __name__ == "__main__":
    main(tyro.cli(Settings))
