"""Random rows that branch anywhere, and a trainer that exposes its gradient, for the tests of shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmrl.config import Algo, Optim
from vlmrl.model.loading import LoadedModel
from vlmrl.multimodal.placeholders import image_ids
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import MediaItem, Sample


def random_rows(model: LoadedModel, seed: int, groups: int = 2, trained: float = 1.0) -> list[Sample]:
    """Groups of 2 to 8 rows that branch anywhere. A vision model's rows have images at their start and middle, some of them twice.

    A row's response is everything but its first token. ``trained`` is the share of response tokens with mask 1; the last has it.
    """
    print(f"random rows of the seed {seed}")  # shown for a test that fails
    dice, store = random.Random(seed), model.new_store()
    pad: Any = model.policy.image_token_id
    sizes = [(32, 64), (64, 64), (96, 32)]
    gallery = [store.load(noise(size, seed + number)) for number, size in enumerate(sizes)] if store is not None else []

    def piece() -> tuple[list[int], list[MediaItem]]:
        if gallery and dice.random() < 0.3:
            item = dice.choice(gallery)
            return [7, *image_ids(item, pad), 8], [item]
        return [dice.randrange(200) for _ in range(dice.randint(1, 6))], []

    rows = []
    for group in "abcdefgh"[:groups]:
        branches = [[piece(), piece()]]
        for _ in range(dice.randint(1, 7)):
            grown = dice.choice(branches)
            branches.append(grown[: dice.randint(1, len(grown))] + [piece() for _ in range(dice.randint(1, 3))])
        for number, branch in enumerate(branches):
            ids = [id for part, _ in branch for id in part]
            media = [item for _, shown in branch for item in shown]
            mask = [int(id != pad and dice.random() < trained) for id in ids] + [1]
            rows.append(_row([*ids, dice.randrange(200)], mask, media, group, number, dice.uniform(-1, 1)))
    return rows


def noise(size: tuple[int, int], seed: int) -> Image.Image:
    """An image of random colors; ``size``: (width, height). PIL's `effect_noise` cannot be seeded."""
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _row(ids: list[int], mask: list[int], media: list[MediaItem], group: str, number: int, advantage: float) -> Sample:
    size = len(ids)
    lists = ([1], ids, mask, [-1.0] * size, [0] * size)
    return Sample(*lists, group, f"{group}/{number}", True, "stop", media, advantage)


class Watched(Trainer):
    """Keeps each step's gradient instead of applying it."""

    gradient: dict[str, torch.Tensor]
    logprobs: list[np.ndarray]

    def _apply_gradient(self) -> dict[str, float]:
        self.gradient = {n: p.grad.clone() for n, p in self.policy.named_parameters() if p.grad is not None}
        self.policy.zero_grad()
        return {}


def train(model: LoadedModel, rows: Sequence[Sample], budget: int, share: bool) -> Watched:
    """A step's logprobs and gradient, in micro-batches of at most ``budget`` tokens; 1 means row by row."""
    algo = Algo(loss="reinforce")
    spec = TrainerSpec(algo, Optim(), total_steps=1, tokens_per_micro_batch=budget, share_prefixes=share)
    trainer = Watched(model.policy, spec)
    trainer.logprobs = trainer.step(rows).logprobs
    return trainer


def largest_difference(one: Watched, other: Watched) -> float:
    """Between the two's logprobs, in nats."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def worst_gradient(one: Watched, other: Watched, slack: float = 1e-9) -> tuple[float, str]:
    """The largest difference of a parameter's gradient beyond ``slack``, relative to its norm, and whose it is."""
    assert one.gradient.keys() == other.gradient.keys()
    offs = []
    for name, gradient in one.gradient.items():
        off = float((gradient - other.gradient[name]).norm()) - slack
        offs.append((off / (float(gradient.norm()) + 1e-12), name))
    return max(offs)
