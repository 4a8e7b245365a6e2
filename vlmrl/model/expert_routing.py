"""Which experts a mixture-of-experts model sends each token to: recorded while sampling, replayed while training.

A router takes the k highest of its scores, so that a rounding difference (another batch, another precision) can send a token to
other experts, and its logprob jumps. Replayed, a token goes where it went when it was sampled; how much each of those experts counts
is still the trainer's own router to say, and its gradient's. Source: R3, arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from vlmrl.types import ExpertRouting


class Routing:
    """The routers of ``model``, the modules of the class named ``kind``, in the order of their layers.

    Each scores ``num_experts`` for a token and sends it to ``top_k``. Their ``forward`` is replaced on the instances.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        routers: list[Any] = [module for module in model.modules() if type(module).__name__ == kind]
        assert routers, f"no module is a {kind}"
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, router)
        self.layers = len(routers)
        self.top_k: int = routers[0].top_k
        self.num_experts: int = routers[0].num_experts
        self._chosen: list[torch.Tensor] | None = None
        self._wanted: torch.Tensor | None = None

    @contextmanager
    def recorded(self) -> Iterator[list[torch.Tensor]]:
        """What is chosen meanwhile: for each layer, by and by, ``[tokens, top_k]``."""
        self._chosen = []
        try:
            yield self._chosen
        finally:
            self._chosen = None

    @contextmanager
    def replayed(self, wanted: torch.Tensor | None) -> Iterator[None]:
        """Meanwhile, token by token of the forward, what ``wanted`` ``[tokens, layers, top_k]`` says; -1: the router's own choice."""
        before, self._wanted = self._wanted, wanted
        try:
            yield
        finally:
            self._wanted = before

    def checkpointed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The ``context_fn`` of torch's checkpoint: what is computed again for the gradient is sent where it was sent before."""
        return nullcontext(), self.replayed(self._wanted)

    def _route(self, layer: int, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The router's logits, and for each token the weights and the indices of the experts it goes to, ``[tokens, top_k]``."""
        logits, weights, chosen = type(router).forward(router, hidden)
        if self._chosen is not None:
            self._chosen.append(chosen)
        if self._wanted is not None:
            wanted = self._wanted[:, layer].to(chosen.dtype)
            chosen = torch.where(wanted >= 0, wanted, chosen)
            scores = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
            weights = (scores / scores.sum(-1, keepdim=True)).to(weights.dtype)
        return logits, weights, chosen


def routes_of(indices: np.ndarray) -> list[ExpertRouting]:
    """Token by token what ``indices`` ``[tokens, layers, top_k]`` say."""
    rows = indices.astype("<u2")
    return [ExpertRouting(row.tobytes(), rows.shape[2]) for row in rows]


def indices_of(routes: Sequence[ExpertRouting | None]) -> np.ndarray:
    """``[tokens, layers, top_k]``, -1 where nothing is known; ``[tokens, 0, 0]`` where nothing is known of any token.

    All that are known are of one shape: the audit has seen to it.
    """
    known = np.array([route is not None for route in routes], dtype=bool)
    first = next((route for route in routes if route is not None), None)
    if first is None:
        return np.zeros((len(routes), 0, 0), dtype=np.int32)
    experts = np.frombuffer(b"".join(route.experts for route in routes if route is not None), dtype="<u2")
    indices = np.full((len(routes), first.layers, first.top_k), -1, dtype=np.int32)
    indices[known] = experts.reshape(-1, first.layers, first.top_k)
    return indices
