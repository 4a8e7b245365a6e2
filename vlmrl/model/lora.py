"""Low-rank adapters (LoRA, by peft), and a model's weights by name: with its adapters merged, or the adapters alone.

Adapters are injected into the model itself, so modules keep their names and :class:`~vlmrl.model.policy.Policy` runs it unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vlmrl.config import Lora
from vlmrl.model.families import family_of


def add_lora(model: Any, config: Lora) -> None:
    """Freeze the model and add trainable adapters to its linear layers."""
    from peft import LoraConfig, inject_adapter_in_model

    part = "" if config.vision else family_of(model.config).parts["language_model"]
    suffix = re.compile(rf".*\.({'|'.join(config.targets)})")
    names = [name for name, _ in model.named_modules() if suffix.fullmatch(name) and re.search(part, name + ".")]
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules="|".join(map(re.escape, names)),
        bias="none",
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ValueError(f"model.lora.targets {list(config.targets)} fit no linear layer of this model.") from error


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The adapted layers by name. peft is imported only if the model has adapters."""
    if any("lora_" in name for name, _ in model.named_parameters()):
        from peft.tuners.tuners_utils import BaseTunerLayer

        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the context the adapters are disabled: a KL reference without a second copy of the model."""
    layers = [layer for _, layer in lora_layers(model)]
    with ExitStack() as stack:
        for layer in layers:
            layer._disable_adapters, before = True, layer._disable_adapters
            stack.callback(setattr, layer, "_disable_adapters", before)
        yield


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, unsharded and with the adapters merged in, one at a time.

    On sharded models every rank must iterate over all of them: each weight is gathered from all ranks.
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
    """The adapters' own weights, unsharded, under their names in peft's files."""
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
