"""RMS norms of Hugging Face models as one kernel on a GPU, where transformers launches eight.

A token of a small batch costs a GPU's host more time, for launches, than the GPU: half of the launches of a decode step are norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import rms_norm

from vlmrl.model.own_forward import Forward, use_forward


def use_fused_norms(model: nn.Module) -> None:
    """Compute the model's norms by torch's kernel on a GPU: RMSNorm, arXiv 1910.07467, with one rounding instead of two."""
    use_forward(fusible_norms(model), _fused)


def fusible_norms(model: nn.Module) -> list[nn.Module]:
    """The norms that compute this formula. Qwen3.5's, for one, adds 1 to its weight."""
    named = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and hasattr(m, "variance_epsilon")]
    named = [norm for norm in named if getattr(norm, "weight", None) is not None]
    same = {kind: _is_rms_norm(norm) for kind, norm in {type(norm): norm for norm in named}.items()}
    return [norm for norm in named if same[type(norm)]]


def _is_rms_norm(norm: Any) -> bool:
    """Compares ``norm`` with the formula on two rows, on the CPU, also where its weight is on the meta device."""
    hidden = torch.linspace(-2, 3, 2 * len(norm.weight), device="cpu").view(2, -1)
    weight = hidden[1].cos()
    own = functional_call(norm, {"weight": weight}, hidden)
    return torch.allclose(own, by_kernel(norm, weight, hidden), rtol=1e-4, atol=1e-5)


def by_kernel(norm: Any, weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``norm`` with this weight of ``hidden`` ``[..., width]``."""
    return rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)


def _fused(forward: Forward) -> Forward:
    def run(norm: Any, hidden_states: torch.Tensor) -> Any:
        weight = norm.weight
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype:
            return by_kernel(norm, weight, hidden_states)
        return forward(norm, hidden_states)

    return run
