"""The experts that a mixture-of-experts model sends each token to: recorded while sampling, replayed while training.

A router takes the k experts with the highest scores, so a rounding difference (another batch, another precision) can change a token's
experts, and its logprob jumps. In a replay a token gets the experts it was sampled with; the trainer's own router still computes
their weights, and receives the gradient. Source: R3, arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from vlmrl.model.own_forward import Forward, use_forward
from vlmrl.types import ExpertRouting

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A router's logits, and the weights and indices of each token's experts, ``[tokens, top_k]``."""


class ExpertRouters:
    """The routers of ``model``, which are its modules of class ``class_name``, in layer order.

    Each scores ``num_experts`` experts for a token and sends it to ``top_k`` of them. Their ``forward`` is replaced.
    """

    def __init__(self, model: nn.Module, class_name: str) -> None:
        routers: list[Any] = [module for module in model.modules() if type(module).__name__ == class_name]
        assert routers, f"no module is a {class_name}"
        for layer, router in enumerate(routers):
            router.routing, router.layer_number = self, layer
        use_forward(routers, _routed)
        self.layers = len(routers)
        self.top_k: int = routers[0].top_k
        self.num_experts: int = routers[0].num_experts
        self._recorded: list[torch.Tensor] | None = None
        self._replayed: torch.Tensor | None = None

    @contextmanager
    def recorded(self) -> Iterator[list[torch.Tensor]]:
        """Within the context, each layer's forward appends the experts it chose, ``[tokens, top_k]``, to the yielded list."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replayed(self, indices: torch.Tensor | None) -> Iterator[None]:
        """Within the context, ``indices`` ``[tokens, layers, top_k]`` choose the experts; -1 leaves the choice to the router."""
        before, self._replayed = self._replayed, indices
        try:
            yield
        finally:
            self._replayed = before

    def checkpointed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The ``context_fn`` of torch's activation checkpointing: the recomputation replays the same experts as the forward."""
        return nullcontext(), self.replayed(self._replayed)

    def route(self, layer: int, logits: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> Routed:
        """A router's output, with replayed experts and their weights where there are any."""
        if self._recorded is not None:
            self._recorded.append(chosen)
        if self._replayed is not None:
            indices = self._replayed[:, layer].to(chosen.dtype)
            chosen = torch.where(indices >= 0, indices, chosen)
            scores = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
            weights = (scores / scores.sum(-1, keepdim=True)).to(weights.dtype)
        return logits, weights, chosen


def _routed(forward: Forward) -> Forward:
    # A compiled layer would be compiled for each number of a layer.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(router: Any, hidden: torch.Tensor) -> Routed:
        routed: Routed = router.routing.route(router.layer_number, *forward(router, hidden))
        return routed

    return run


def routing_from_indices(indices: np.ndarray) -> list[ExpertRouting]:
    """Each token's experts from ``indices`` ``[tokens, layers, top_k]``."""
    rows = indices.astype("<u2")
    return [ExpertRouting(row.tobytes(), rows.shape[2]) for row in rows]


def indices_from_routing(routing: Sequence[ExpertRouting | None]) -> np.ndarray:
    """``[tokens, layers, top_k]``, -1 for tokens without known experts; ``[tokens, 0, 0]`` if no token has any.

    All known entries must have one shape, which the audit checks.
    """
    known = np.array([each is not None for each in routing], dtype=bool)
    first = next((each for each in routing if each is not None), None)
    if first is None:
        return np.zeros((len(routing), 0, 0), dtype=np.int32)
    experts = np.frombuffer(b"".join(each.experts for each in routing if each is not None), dtype="<u2")
    indices = np.full((len(routing), first.layers, first.top_k), -1, dtype=np.int32)
    indices[known] = experts.reshape(-1, first.layers, first.top_k)
    return indices
