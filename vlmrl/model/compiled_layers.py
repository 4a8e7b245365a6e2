"""Decoder layers compiled by torch.compile: their elementwise operations become a few kernels, which read and write far less memory.

A layer's attention, its router of experts, and recurrent layers over trees run between its graphs, uncompiled or with graphs of
their own. All layers share the graphs, for all lengths.
"""

from __future__ import annotations

import re
from functools import wraps
from typing import Any

import torch
from torch import nn

from vlmrl.families.base import Family
from vlmrl.model.cached_attention import CACHE_NAMES
from vlmrl.model.own_forward import Forward, use_forward
from vlmrl.model.tree_attention import prepare_compiler


def compile_layers(model: Any, family: Family) -> None:
    """Compile the decoder layers of a Hugging Face model, each at its first call. FSDP must shard them afterwards."""
    kinds, decoder = set(model._no_split_modules), family.parts["language_model"]
    layers = [m for name, m in model.named_modules() if type(m).__name__ in kinds and re.search(decoder, name + ".")]
    prepare_compiler()
    use_forward(layers, _compiled)


def _compiled(forward: Forward) -> Forward:
    """A layer's forward, compiled. With a KV cache, whose objects and sizes differ at each call, it is ``forward``."""
    # Within transformers' own wrapper, which would checkpoint activations; the subclass gets one, around this function.
    own = getattr(forward, "__wrapped__", forward)
    compiled = torch.compile(own, dynamic=True)

    @wraps(own)
    def run(layer: nn.Module, *args: Any, **options: Any) -> Any:
        has_cache = any(options.get(name) is not None for name in CACHE_NAMES)
        return (own if has_cache else compiled)(layer, *args, **options)

    return run
