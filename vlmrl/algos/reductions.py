"""Reductions: how much each token of a mini-batch counts, fixed before the mini-batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def token_mean(loss_mask: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Every trained token of the mini-batch counts the same; ``[rows, length]`` in and out.

    Masks [[1, 0], [1, 1]] give [[1/3, 0], [1/3, 1/3]]. Source: DAPO, arXiv 2503.14476, equation 8.
    """
    return loss_mask / loss_mask.sum().clamp(min=1)


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"token_mean": token_mean}
