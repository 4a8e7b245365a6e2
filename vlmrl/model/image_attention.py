"""Attention of vision towers that read all images as one sequence of patches: a patch attends to its own image or window.

transformers calls sdpa once for each image or window. Here, on a GPU, one kernel computes all of them; on a CPU, one call those of
equal length.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vlmrl.types import to_device

# The kernel behind sdpa, called directly since `varlen_attn` takes cuDNN's on an H100, which is prepared again for each shape.
_flash = torch.ops.aten._flash_attention_forward
NAME = "vlmrl_flash_images"  # transformers hands the whole sequence to functions with "flash" in their names


def install_image_attention(model: Any) -> None:
    """Make the model's vision tower use this attention."""
    model.config.vision_config._attn_implementation = NAME


def attend_images(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int | torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: ``[1, heads, patches, width]`` in, ``[1, patches, heads, width]`` out.

    ``cu_seq_lens_q`` ``[pieces + 1]``, int32, in host memory: where each piece begins. ``max_length_q``: patches of the longest;
    some versions of transformers pass a tensor.
    """
    if query.device.type != "cpu" and query.dtype != torch.float32:  # the kernel takes no float32
        starts = to_device(cu_seq_lens_q, query.device)
        packed, longest = (each[0].transpose(0, 1) for each in (query, key, value)), int(max_length_q)
        out = _flash(*packed, starts, starts, longest, longest, 0.0, False, False, scale=scaling)[0]
        return out[None], None
    return _by_length(query, key, value, cu_seq_lens_q, scaling), None


AttentionInterface.register(NAME, attend_images)


def _by_length(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """:func:`attend_images` with a call of sdpa for each distinct length."""
    found: dict[int, list[int]] = defaultdict(list)
    for start, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        found[end - start].append(start)
    outputs, places = [], []
    for length, firsts in found.items():
        tokens = torch.tensor(firsts)[:, None] + torch.arange(length)
        places.append(tokens.flatten())
        indices = to_device(places[-1], query.device)
        # ``[heads, pieces * length, width]`` to ``[pieces, heads, length, width]``
        queries, keys, values = (
            each[0].index_select(1, indices).unflatten(1, tokens.shape).transpose(0, 1) for each in (query, key, value)
        )
        attended = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    inverse = torch.cat(places).argsort()
    return torch.cat(outputs).index_select(0, to_device(inverse, query.device))[None]
