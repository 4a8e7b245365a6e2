"""Reductions: how much each token of a mini-batch counts, fixed before the mini-batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def token_mean(loss_mask: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Every trained token of the mini-batch counts the same; ``[rows, length]`` in and out.

    Masks [[1, 0], [1, 1]] give [[1/3, 0], [1/3, 1/3]]. Source: DAPO, arXiv 2503.14476, equation 8.
    """
    return loss_mask / loss_mask.sum().clamp(min=1)


def prompt_mean(loss_mask: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Every prompt counts the same, and within it every trained token of its group; ``[rows, length]`` in and out.

    Masks [[1, 0], [1, 1]] of groups a and b give [[1/2, 0], [1/4, 1/4]]. A group without trained tokens counts for nothing.
    Source: the prompt average of ScaleRL, arXiv 2510.13786.
    """
    names = {name: index for index, name in enumerate(dict.fromkeys(group_ids))}
    group_of = torch.tensor([names[name] for name in group_ids], device=loss_mask.device)
    tokens = loss_mask.new_zeros(len(names)).index_add(0, group_of, loss_mask.sum(1))
    alive = (tokens > 0).sum().clamp(min=1)
    return loss_mask / (tokens.clamp(min=1) * alive)[group_of, None]


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"token_mean": token_mean, "prompt_mean": prompt_mean}
