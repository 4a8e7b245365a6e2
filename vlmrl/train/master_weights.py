"""Float32 master weights for a model that computes in bfloat16. The optimizer updates only the masters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from vlmrl.config import Optim
from vlmrl.utils.host_memory import HostMemory

HOST = torch.device("cpu")
STATE_BYTES = 2**30
"""Optimizer state that a step with `optim.offload` has on the GPU at once. A larger parameter's is there alone."""


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

    def to(self, device: torch.device, memory: HostMemory) -> None:
        """Move the masters that are not parameters of the model to ``device``; on the host they are in ``memory``."""
        for _, master in self._pairs:
            master.data = memory.moved(id(master), master.data, device)
        memory.wait()

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


def clip_gradient(parameters: Sequence[nn.Parameter], most: float) -> float:
    """Scale the gradients of all ``parameters`` down to the norm ``most``. Returns their norm before, over all ranks."""
    total: torch.Tensor = nn.utils.clip_grad_norm_(parameters, most)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def move_module(module: nn.Module, device: torch.device, memory: HostMemory) -> None:
    """Move a module to ``device``. On the host its parameters are in ``memory``; buffers are small, and move as usual."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return memory.moved(id(tensor), tensor.detach(), device)
        return tensor.to(device)

    module._apply(moved)
    memory.wait()


def move_state(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    memory: HostMemory,
    parameters: Iterable[torch.Tensor] | None = None,
) -> None:
    """Move the optimizer state to ``device``, or that of some ``parameters``; on the host it is in ``memory``.

    Step counts move only with a fused optimizer, whose kernel reads them.
    """
    fused = bool(optimizer.defaults.get("fused"))
    for parameter in list(optimizer.state) if parameters is None else parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (fused or value.dim()):
                state[name] = memory.moved((id(parameter), name), value, device)
    memory.wait()


def step_in_parts(optimizer: torch.optim.Optimizer, device: torch.device, memory: HostMemory) -> None:
    """An optimizer step with the state in ``memory``: that of about STATE_BYTES is on ``device`` at a time."""
    [group] = optimizer.param_groups
    everything = group["params"]
    try:
        for part in _parts([parameter for parameter in everything if parameter.grad is not None]):
            group["params"] = part
            move_state(optimizer, device, memory, part)
            optimizer.step()
            move_state(optimizer, HOST, memory, part)
    finally:
        group["params"] = everything


def _parts(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters in their order, cut where the state of a part would exceed STATE_BYTES."""
    part: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if part and size + 8 * local.numel() > STATE_BYTES:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += 8 * local.numel()
    if part:
        yield part


def _move_gradient(parameter: torch.Tensor, master: nn.Parameter) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None
