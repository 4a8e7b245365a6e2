"""RMS norms of Hugging Face models as one kernel on a GPU, where transformers launches eight.

A token of a small batch costs a GPU's host more time, for launches, than the GPU: half of the launches of a decode step are norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from vlmrl.model.own_forward import Forward, use_forward


def use_fused_norms(model: nn.Module) -> None:
    """Compute the model's norms by torch's kernel on a GPU: RMSNorm, arXiv 1910.07467, with one rounding instead of two.

    Norms of another formula, such as Qwen3.5's, which adds 1 to its weight, stay as they are: they have no ``variance_epsilon``.
    """
    use_forward(fusible_norms(model), _fused)


def fusible_norms(model: nn.Module) -> list[nn.Module]:
    """The modules that are replaced."""
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and hasattr(m, "variance_epsilon")]


def _fused(forward: Forward) -> Forward:
    def run(norm: Any, hidden_states: torch.Tensor) -> Any:
        weight = norm.weight
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype:
            return rms_norm(hidden_states, weight.shape, weight, norm.variance_epsilon)
        return forward(norm, hidden_states)

    return run
