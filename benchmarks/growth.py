"""How the work between rollout and model grows: emit, audit, credit, split, pack, columns and record, on one thread.

    python benchmarks/growth.py                    # every series at full size: up to 16,384 rows and 256 turns
    python benchmarks/growth.py --scale 0.25       # a quarter of each size

Each series makes one size four times as large: rows, turns, tokens a turn, members of a group, images. An exponent of 1 means that a
stage takes CPU time in proportion to that size; step-wise rows hold whole prompts, so that their tokens count. The benchmark fails if
an exponent is above 1.15: at ten times the work, each unit of it takes 1.4 times as long. Stages of less than 0.05 s are not judged.
No model runs: the trajectories are made here.
"""

from __future__ import annotations

import gc
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tyro
from transformers import AutoConfig

from vlmrl import Algo, Config, Model
from vlmrl.checks.logprob_mismatch import record_trained
from vlmrl.families import family_of
from vlmrl.families.base import Family
from vlmrl.model import tiny
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.report.records import trajectory_record
from vlmrl.samples import audit, emit, from_columns, to_columns
from vlmrl.train.credit import assign_advantages
from vlmrl.train.packing import pack, split
from vlmrl.types import MediaItem, Task, Trajectory, Turn

IMAGE_TOKENS = 4  # of an image of 64x64 pixels
OBSERVATION = 16  # tokens of text before a response
LIMIT = 1.15
SHORTEST = 0.05  # seconds


@dataclass(frozen=True)
class Sizes:
    """Of a batch: groups of ``members`` trajectories. Each turn has a reward; the first ``images`` turns show an image each."""

    groups: int = 32
    members: int = 8
    turns: int = 4
    tokens: int = 64
    images: int = 1
    prompt: int = 64
    samples: str = "concat"
    budget: int = 16_384
    """Tokens per micro-batch."""


FULL = {
    "rows": (Sizes(512, turns=2, tokens=16, prompt=16, images=0, budget=2048), "groups"),
    "rows that fill a micro-batch": (Sizes(128, tokens=128, images=0, budget=600), "groups"),
    "turns": (Sizes(4, turns=64, tokens=16), "turns"),
    "turns, step-wise": (Sizes(1, turns=16, tokens=16, samples="step_wise"), "turns"),
    "tokens a turn": (Sizes(16, tokens=256), "tokens"),
    "members of a group": (Sizes(4, members=64), "members"),
    "images": (Sizes(16, turns=64, tokens=16, images=16), "images"),
}


def make_trajectories(sizes: Sizes, family: Family) -> list[Trajectory]:
    """Linear episodes; the members of a group have the prompt and its image in common."""
    dice = random.Random(0)
    pad = family.image_token_id or 0
    words = [token for token in range(10, 200) if token != pad]
    pixels, sides = ArrayPixels(np.zeros((64, 64, 3), dtype=np.uint8)), {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    found = []
    for group in range(sizes.groups):
        name, prompt = f"step/{group:05d}", dice.choices(words, k=sizes.prompt)
        for member in range(sizes.members):
            turns: list[Turn] = []
            for number in range(sizes.turns):
                shown = [MediaItem(f"{name}/{number and (member, number)}", (64, 64), sides, IMAGE_TOKENS, {}, pixels)]
                media = shown if number < sizes.images else []
                ids = [*(dice.choices(words, k=OBSERVATION) if number else prompt), *[pad] * IMAGE_TOKENS * len(media)]
                own, logprobs = dice.choices(words, k=sizes.tokens), [-dice.random() for _ in range(sizes.tokens)]
                turn = Turn(ids, media, own, logprobs, [0] * sizes.tokens, "stop", "text", reward=dice.random())
                if turns:
                    turn.parent, turn.kept, turn.kept_media = number - 1, turns[-1].length, turns[-1].num_images
                turns.append(turn)
            found.append(Trajectory(f"{name}/{member:04d}", name, Task(name, []), turns, "env_done"))
    return found


Measure = Callable[[str, Callable[[], Any]], Any]
"""Calls a function, notes what the stage of that name took, and returns the function's result."""


def run_stages(sizes: Sizes, family: Family, measure: Measure) -> int:
    """All stages over one batch. Returns the tokens of its rows."""
    trajectories = make_trajectories(sizes, family)
    config = Config(name="growth", model=Model(path="tiny:qwen3_vl"), algo=Algo(credit="turn"))
    samples = measure("emit", lambda: [row for each in trajectories for row in emit(each, sizes.samples)])
    measure("audit", lambda: audit(samples, trajectories, image_token_id=family.image_token_id))
    measure("credit", lambda: assign_advantages(samples, trajectories, config))
    measure("split, packed", lambda: split(samples, sizes.budget, "packed"))
    measure("split, 8 ranks", lambda: split(samples, sizes.budget, "tree", family.image_token_id, ranks=8))
    plans = measure("split", lambda: split(samples, sizes.budget, "tree", family.image_token_id))
    measure("pack", lambda: [pack(samples, plan, family).indices.numel() for plan in plans])
    measure("columns", lambda: from_columns(to_columns(samples)))
    logprobs = [np.zeros(len(sample.response_ids)) for sample in samples]
    measure("record", lambda: record_trained(trajectories, samples, logprobs))
    measure("lines", lambda: [trajectory_record(trajectory) for trajectory in trajectories])
    return sum(map(len, samples))


def exponents(small: dict[str, float], large: dict[str, float], work: float) -> dict[str, float]:
    """Of each stage, from what it takes for a batch and for one of ``work`` times its size."""
    return {name: math.log(max(large[name], 1e-9) / max(small[name], 1e-9)) / math.log(work) for name in large}


def seconds(sizes: Sizes, family: Family, repeats: int) -> tuple[dict[str, float], int]:
    """The least CPU seconds of each stage over ``repeats`` batches, and the tokens of one."""
    least: dict[str, float] = {}

    def measure(name: str, stage: Callable[[], Any]) -> Any:
        gc.collect()
        gc.disable()  # its time depends on everything that the process holds
        began = time.process_time()
        result = stage()
        least[name] = min(least.get(name, math.inf), time.process_time() - began)
        gc.enable()
        return result

    tokens = [run_stages(sizes, family, measure) for _ in range(repeats)]
    return least, tokens[0]


def main(scale: float = 1.0, only: str | None = None, repeats: int = 2) -> None:
    """``only``: one series by name. ``repeats``: the least of so many measurements counts."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        family = family_of(AutoConfig.from_pretrained(tiny.build(folder)))
    above = []
    for name, (base, field) in FULL.items():
        if only not in (None, name):
            continue
        count = max(1, round(getattr(base, field) * scale))
        small, tokens = seconds(replace(base, **{field: count}), family, repeats)
        large, more = seconds(replace(base, **{field: 4 * count}), family, repeats)
        print(f"\n{name}: {field} {count} and {4 * count}, {tokens:,} and {more:,} tokens", flush=True)
        work = more / tokens if base.samples == "step_wise" else 4
        for stage, exponent in exponents(small, large, work).items():
            is_above = exponent > LIMIT and large[stage] >= SHORTEST
            above += [f"{name}, {stage}: {exponent:.2f}"] * is_above
            print(
                f"  {stage:<16}{small[stage]:>9.3f} s{large[stage]:>9.3f} s   exponent {exponent:5.2f}{' ABOVE' * is_above}"
            )
    if above:
        raise SystemExit(f"grows faster than its tokens (limit {LIMIT}): {'; '.join(above)}")


if __name__ == "__main__":
    tyro.cli(main)
