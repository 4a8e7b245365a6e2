"""Float32 master weights for a model that computes in bfloat16. The optimizer updates only the masters."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vlmrl.config import Optim


class MasterWeights:
    """Float32 copies of a model's trainable parameters, with their gradients accumulated over micro-batches.

    Backward adds each gradient to its master's in float32. A float32 parameter is its own master. ``named`` holds the masters by
    parameter name. :meth:`publish` writes them into the model after an optimizer step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.named: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dtype == torch.float32:
                self.named[name] = parameter
                continue
            master = nn.Parameter(parameter.detach().float())
            self._pairs.append((parameter, master))
            self.named[name] = master
            hook = parameter.register_post_accumulate_grad_hook(lambda p, master=master: _move_gradient(p, master))
            self._hooks.append(hook)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    def close(self) -> None:
        """Remove the gradient hooks, so that another trainer can train the model."""
        for hook in self._hooks:
            hook.remove()

    def to(self, device: torch.device) -> None:
        """Move the masters that are not parameters of the model to ``device``."""
        for _, master in self._pairs:
            master.data = master.data.to(device)

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._pairs:
            parameter.copy_(master)


def make_optimizer(parameters: list[nn.Parameter], settings: Optim, device: torch.device) -> torch.optim.AdamW:
    """AdamW for parameters on ``device``. On a GPU it is the fused kernel: torch's default there allocates copies of the weights."""
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(
        parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=fused
    )


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer state to ``device``. Step counts move only with a fused optimizer, whose kernel reads them."""
    fused = bool(optimizer.defaults.get("fused"))
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (fused or value.dim()):
                state[name] = value.to(device)


def _move_gradient(parameter: torch.Tensor, master: nn.Parameter) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None
