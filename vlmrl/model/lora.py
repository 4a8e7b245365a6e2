"""What of a model is trained: parts frozen by name, and low-rank adapters (LoRA, by peft) in place of the weights.

Adapters are injected into the model itself, so that its modules keep their places and :class:`~vlmrl.model.policy.Policy` runs it
as ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vlmrl.config import Lora

PARTS = {
    "vision_tower": r"visual\.(?!.*merger)",
    "projector": r"visual\..*merger",
    "language_model": r"^(?!.*visual\.)",
}
"""The parts of a model that can be frozen by a plain name, as patterns of parameter names."""


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    """Take the gradient from the parameters of each of :data:`PARTS`, or of a pattern such as ``model.visual.blocks.0.*``.

    Raises:
        ValueError: a name that fits no parameter, or nothing is left to train.
    """
    for name in names:
        found = [p for key, p in model.named_parameters() if _fits(key, name)]
        if not found:
            raise ValueError(
                f"model.freeze must name {', '.join(PARTS)} or a pattern of parameter names such as 'model.visual.*', but "
                f"{name!r} fits none of this model's."
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model.freeze {list(names)} leaves nothing to train: name fewer parts.")


def _fits(key: str, name: str) -> bool:
    return re.search(PARTS[name], key) is not None if name in PARTS else fnmatch(key, name)


def add_lora(model: nn.Module, config: Lora) -> None:
    """Freeze the model and put trainable adapters beside its linear layers."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = "|".join(config.targets)
    pattern = rf"^(?!.*visual\.).*\.({targets})$" if not config.vision else rf".*\.({targets})$"
    settings = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=pattern, bias="none"
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ValueError(f"model.lora.targets {list(config.targets)} fit no layer of this model.") from error


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The adapted layers by name; none where the model has no adapters, and then peft is not needed."""
    if any("lora_" in name for name, _ in model.named_parameters()):
        from peft.tuners.tuners_utils import BaseTunerLayer

        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapters: the reference of a KL penalty that costs no second copy."""
    layers = [layer for _, layer in lora_layers(model)]
    with ExitStack() as stack:
        for layer in layers:
            layer._disable_adapters, before = True, layer._disable_adapters
            stack.callback(setattr, layer, "_disable_adapters", before)
        yield


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, whole and with the adapters merged in, one after the other.

    On sharded models each rank walks through all of them, since each weight is gathered from all ranks.
    """
    adapted = dict(lora_layers(model))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = _whole(parameter)
        owner = name.removesuffix(".base_layer.weight")
        if owner in adapted:
            weight = weight + _delta(adapted[owner]).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


@torch.no_grad()
def named_adapters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapters' own weights, whole, under the names of peft's files."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield "base_model.model." + name.replace(".default.", "."), _whole(parameter)


def save_adapters(weights: dict[str, torch.Tensor], config: Lora, base_model: str, folder: Path) -> None:
    """Write adapters as peft does: ``PeftModel.from_pretrained(base, folder)`` reads them."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    targets = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in weights})
    folder.mkdir(parents=True, exist_ok=True)
    settings = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, base_model_name_or_path=base_model
    )
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(
        {name: weight.contiguous().cpu() for name, weight in weights.items()}, folder / "adapter_model.safetensors"
    )


def _delta(layer: Any) -> torch.Tensor:
    """What the adapter adds to its layer's weight: scaling * B A. Source: LoRA, arXiv 2106.09685, section 4.1."""
    name = "default"
    down, up = _whole(layer.lora_A[name].weight), _whole(layer.lora_B[name].weight)
    return layer.scaling[name] * (up.float() @ down.float())


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
