"""Samples to micro-batches: rows of like length together, each distinct picture once, positions as the row alone has them.

The trainer calls :func:`split` once per mini-batch and :func:`collate` for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlmrl.media import merge_mm_inputs
from vlmrl.model.families import merged_grid, rope_positions
from vlmrl.types import Batch, Sample


def split(samples: Sequence[Sample], tokens_per_micro_batch: int) -> list[list[int]]:
    """Indices of the rows of each micro-batch, longest rows first, so that padded they stay within the budget.

    A row that is longer than the budget gets a micro-batch of its own. Lengths 5, 2, 4 and a budget of 10 give [[0, 2], [1]].
    """
    parts: list[list[int]] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i])):
        if not parts or (len(parts[-1]) + 1) * len(samples[parts[-1][0]]) > tokens_per_micro_batch:
            parts.append([])
        parts[-1].append(index)
    return parts


def collate(samples: Sequence[Sample], image_token_id: int | None, merge_size: int) -> Batch:
    """Rows padded on the right, with M-RoPE positions of their own, and the distinct pictures' tensors merged once."""
    length = max(map(len, samples))
    token_ids = torch.zeros(len(samples), length, dtype=torch.long)
    position_ids = torch.zeros(3, len(samples), length, dtype=torch.long)
    distinct = {item.id: item for sample in samples for item in sample.media}
    index_of = {name: index for index, name in enumerate(distinct)}
    for row, sample in enumerate(samples):
        ids = sample.token_ids
        grids = [merged_grid(item.mm_inputs["image_grid_thw"], merge_size) for item in sample.media]
        token_ids[row, : len(ids)] = torch.tensor(ids)
        position_ids[:, row, : len(ids)], _ = rope_positions(ids, grids, image_token_id)
    return Batch(
        token_ids=token_ids,
        position_ids=position_ids,
        targets=per_token(samples, lambda sample: sample.loss_mask).bool(),
        mm_inputs=merge_mm_inputs(list(distinct.values())),
        image_order=[index_of[name] for sample in samples for name in sample.image_ids],
    )


def per_token(samples: Sequence[Sample], values: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
    """A list beside each row's response as a float tensor ``[rows, length]`` beside its tokens, zero on prompt and padding."""
    tensor = torch.zeros(len(samples), max(map(len, samples)))
    for row, sample in enumerate(samples):
        start = len(sample.prompt_token_ids)
        tensor[row, start : len(sample)] = torch.tensor(values(sample), dtype=torch.float32)
    return tensor
