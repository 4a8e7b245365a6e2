"""The recorded experts of samples as a batch replays them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmrl.model.expert_routing import indices_from_routing
from vlmrl.types import Sample


def expert_indices(
    samples: Sequence[Sample], paths: Sequence[np.ndarray], shape: tuple[int, int]
) -> torch.Tensor | None:
    """``[rows, length, layers, top_k]`` for a batch of ``shape`` (rows, length), whose flattened tokens hold sample i at ``paths[i]``.

    A token that several samples share has the experts of the first that knows them; -1: nobody does. ``None``: of no token.
    """
    laid_out: torch.Tensor | None = None
    for sample, path in zip(samples, paths, strict=True):
        if not any(sample.expert_routing):
            continue
        own = torch.from_numpy(indices_from_routing(sample.expert_routing))
        if laid_out is None:
            laid_out = torch.full((shape[0] * shape[1], *own.shape[1:]), -1, dtype=own.dtype)
        places = torch.from_numpy(path)
        new = laid_out[places, 0, 0] < 0
        laid_out[places[new]] = own[new]
    return None if laid_out is None else laid_out.unflatten(0, shape)


def routed_freely(samples: Sequence[Sample]) -> int:
    """How many tokens are sent where the trainer's own routers say, since no engine ran them or none told.

    A row's last token does not count: no logprob depends on it.
    """
    return sum(
        len(sample) - 1 - sum(route is not None for route in sample.expert_routing[: len(sample) - 1])
        for sample in samples
    )
