"""One of two ranks: rank 0 calls a trainer on samples with images, and writes what it pickled for each call.

Argument: the file for the result, a JSON list with the bytes of each pickled object by call, and what rank 1 had in the end.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.train.controller import Commands, RunTrainer, join_process_group, run_commands
from vlmrl.train.trainer import StepOutput
from vlmrl.types import MediaItem, Sample

SIDE = 128
ROWS = 8
CALLS = ("token_kl", "score", "step")


def make_samples() -> list[Sample]:
    """Rows of 2,000 prompt tokens; row i shows image i of noise, which no compression shrinks."""
    made, memory = [], PixelMemory()
    for number in range(ROWS):
        noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        lists = (list(range(2000)), [1, 2], [1, 1], [-1.0, -2.0], [0, 0])
        item = MediaItem(f"image{number}", (SIDE, SIDE), {}, 16, {}, memory.hold(noise))
        made.append(Sample(*lists, "g", f"t{number}", True, "stop", media=[item]))
    return made


class HalfTrainer:
    """Each rank computes half of the samples. It records the sums of the pixels that it has."""

    def __init__(self) -> None:
        self.sums: list[dict[str, int]] = []

    def rows_by_rank(self, samples: list[Sample], in_steps: bool) -> list[set[int]]:
        return [set(range(ROWS // 2)), set(range(ROWS // 2, ROWS))]

    def __getattr__(self, method: str):
        def call(samples: list[Sample]) -> StepOutput:
            mine = [samples[number] for number in self.rows_by_rank(samples, False)[dist.get_rank()]]
            items = [item for row in mine for item in row.media]
            self.sums.append({item.id: int(item.pixels.read().sum(dtype=np.int64)) for item in items})
            return StepOutput({}, [], 1)

        return call


class HalfRank:
    def __init__(self) -> None:
        self.trainer = HalfTrainer()

    def call(self, method: str, samples: list[Sample]) -> StepOutput:
        return getattr(self.trainer, method)(samples)


sizes: list[int] = []
to_tensor = distributed_c10d._object_to_tensor


def counted(*arguments, **options):
    tensor, size = to_tensor(*arguments, **options)
    sizes.append(int(size))
    return tensor, size


def main(out: str) -> None:
    ranks, commands, half = join_process_group("gloo"), Commands(), HalfRank()
    if ranks.rank == 0:
        distributed_c10d._object_to_tensor = counted
        trainer, samples, by_call = RunTrainer(half, commands), make_samples(), {}
        for call in CALLS:
            sizes.clear()
            getattr(trainer, call)(samples)
            by_call[call] = list(sizes)
        commands.stop()
    else:
        run_commands(half, commands)
    received = [None, None]
    dist.all_gather_object(received, half.trainer.sums)
    commands.close()
    if ranks.rank == 0:
        whole = {item.id: int(item.pixels.read().sum(dtype=np.int64)) for row in samples for item in row.media}
        Path(out).write_text(json.dumps({"bytes": by_call, "sums": received, "whole": whole}))
