"""Reductions: the weight of each token of a mini-batch, computed before the mini-batch is split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def token_mean(loss_mask: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Every trained token of the mini-batch has the same weight; ``[rows, length]`` in and out.

    Masks [[1, 0], [1, 1]] give [[1/3, 0], [1/3, 1/3]]. Source: DAPO, arXiv 2503.14476, as in its released code.
    """
    return loss_mask / loss_mask.sum().clamp(min=1)


def prompt_mean(loss_mask: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Every prompt has the same weight, shared equally by the trained tokens of its group; ``[rows, length]`` in and out.

    Masks [[1, 0], [1, 1]] of groups a and b give [[1/2, 0], [1/4, 1/4]]. A group without trained tokens has weight 0.
    Source: the prompt average of ScaleRL, arXiv 2510.13786.
    """
    names = {name: index for index, name in enumerate(dict.fromkeys(group_ids))}
    group_of = torch.tensor([names[name] for name in group_ids], device=loss_mask.device)
    tokens = loss_mask.new_zeros(len(names)).index_add(0, group_of, loss_mask.sum(1))
    trained = (tokens > 0).sum().clamp(min=1)
    return loss_mask / (tokens.clamp(min=1) * trained)[group_of, None]


def sequence_mean(loss_mask: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Every row has the same weight, shared equally by its trained tokens; ``[rows, length]`` in and out.

    Masks [[1, 0], [1, 1]] give [[1/2, 0], [1/4, 1/4]]. A row is an episode with concat samples and a turn with step-wise samples.
    Source: GRPO, arXiv 2402.03300, equation 3.
    """
    tokens = loss_mask.sum(1, keepdim=True)
    return loss_mask / (tokens.clamp(min=1) * (tokens > 0).sum().clamp(min=1))


def seq_mean_token_sum_norm(loss_mask: torch.Tensor, group_ids: Sequence[str], norm: float = 1024.0) -> torch.Tensor:
    """Each row's sum divided by a constant ``norm`` (in tokens), averaged over rows: a token's weight is independent of length.

    Masks [[1, 0], [1, 1]] and norm 10 give [[1/20, 0], [1/20, 1/20]]. Source: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    if norm <= 0:
        raise ValueError(f"seq_mean_token_sum_norm: norm must be greater than 0, but it is {norm}.")
    return loss_mask / (norm * (loss_mask.sum(1) > 0).sum().clamp(min=1))


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "prompt_mean": prompt_mean,
}
