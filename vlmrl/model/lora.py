"""Low-rank adapters (LoRA, by peft), and a model's weights by name: with its adapters merged, or the adapters alone.

Adapters are injected into the model itself, so modules keep their names and :class:`~vlmrl.model.policy.Policy` runs it unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vlmrl.config import Lora
from vlmrl.families import family_of


def add_lora(model: Any, config: Lora) -> None:
    """Freeze the model and add trainable adapters to its linear layers. A layer whose weight is frozen already gets none.

    Raises:
        ValueError: a setting adapts no layer, or the targets are unset for a model whose fused experts cannot have adapters.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = _layers_to_adapt(model, config)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="|".join(map(re.escape, names)),
        bias="none",
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(settings, model)


def _layers_to_adapt(model: Any, config: Lora) -> list[str]:
    """The names of the linear layers that get adapters, in the model's order."""
    kind, parts = model.config.model_type, family_of(model.config).parts
    head = model.get_output_embeddings()  # the policy reads its weight, so an adapter there would have no effect
    linear = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    vision = [name for name in linear if not re.search(parts["language_model"], name + ".")]
    reachable = [name for name in linear if config.vision or name not in vision]
    fused = _fused_weights(model, [*parts.values()] if config.vision else [parts["language_model"]])
    if config.vision and not vision:
        raise ValueError(f"model.lora.vision must be False for {kind}, which has no vision tower.")
    if fused and not config.targets:
        raise ValueError(
            f"model.lora.targets must be set for {kind}: its experts ({', '.join(fused)}) are fused weights, which cannot have "
            f"adapters. Choose from {', '.join(_last_parts(reachable))}, or freeze the experts by model.freeze."
        )
    for target in config.targets:
        _check_target(target, reachable, linear, kind, fused)
    wanted = config.targets or _last_parts(reachable)
    names = [name for name in reachable if _last_part(name) in wanted and linear[name].weight.requires_grad]
    if config.vision and not set(names) & set(vision):
        raise ValueError(
            f"model.lora.vision adapts no layer: model.lora.targets {list(config.targets)} and model.freeze leave none of the vision "
            f"tower's {', '.join(_last_parts(vision))}. Name one of them, unfreeze them, or unset model.lora.vision."
        )
    if not names:
        raise ValueError("model.freeze leaves no layer for adapters: name fewer parts, or set model.lora.vision.")
    return names


def _check_target(target: str, reachable: list[str], linear: dict[str, nn.Linear], kind: str, fused: list[str]) -> None:
    """Raises ValueError if no layer called ``target`` would get an adapter."""
    fitting = [name for name in reachable if _last_part(name) == target]
    if any(linear[name].weight.requires_grad for name in fitting):
        return
    if fitting:
        raise ValueError(f"model.lora.targets: model.freeze freezes every {target!r}: unfreeze them, or leave it out.")
    if target in _last_parts(linear):
        raise ValueError(
            f"model.lora.targets: {target!r} is only in the vision tower: set model.lora.vision, or leave it out."
        )
    experts = f" Its experts ({', '.join(fused)}) are fused weights, which cannot have adapters." if fused else ""
    raise ValueError(
        f"model.lora.targets must be names of linear layers of {kind} ({', '.join(_last_parts(reachable))}), but {target!r} fits none."
        f"{experts}"
    )


def _fused_weights(model: nn.Module, parts: list[str]) -> list[str]:
    """The last parts of the names of trainable weights that hold a matrix for each expert, ``[experts, out, in]``, in ``parts``."""
    return _last_parts(
        f"{name}.{own}"
        for name, module in model.named_modules()
        for own, weight in module.named_parameters(recurse=False)
        if weight.dim() == 3 and weight.requires_grad and not type(module).__module__.startswith("torch.nn.")
        if any(re.search(part, f"{name}.{own}") for part in parts)
    )


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _last_parts(names: Iterable[str]) -> list[str]:
    """The distinct last parts of module names, in order: ``["a.q_proj", "b.q_proj"]`` gives ``["q_proj"]``."""
    return list(dict.fromkeys(map(_last_part, names)))


def adapted_targets(model: nn.Module) -> tuple[str, ...]:
    """The last parts of the names of the layers that have adapters."""
    return tuple(_last_parts(name for name, _ in lora_layers(model)))


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
def named_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, unsharded and with the adapters merged in, one at a time.

    On sharded models every rank must iterate over all of them: each weight is gathered from all ranks. ``dtype``: what the caller
    rounds wider weights to; shards are rounded before they are gathered, where no adapter is added.
    """
    adapted = dict(lora_layers(model))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        if owner in adapted:
            weight = _whole(parameter)
            weight = weight + _delta(adapted[owner]).to(weight.dtype)
        else:
            weight = _whole(rounded(parameter, dtype))
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


def rounded(weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A floating point weight that is wider than ``dtype`` in it; others as they are."""
    wider = dtype is not None and weight.is_floating_point() and weight.dtype.itemsize > dtype.itemsize
    return weight.to(dtype) if wider else weight


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
