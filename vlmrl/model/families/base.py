"""What differs between model families, in one table, and the rotary positions they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

WHY_ALONE = "some of its layers hand a state from token to token, which no attention mask can branch or end"


@dataclass(frozen=True)
class Family:
    """Facts about one ``model_type``.

    ``vision``: it reads images, and its positions are M-RoPE triples. ``recurrent``: :data:`WHY_ALONE`.
    ``router``: the class of the modules that send tokens to experts, in a mixture of experts. ``turned``: the ends of the names of
    weights whose last two dimensions are the other way round in checkpoints; transformers turns them when it loads, not when it saves.
    """

    vision: bool
    recurrent: bool = False
    router: str | None = None
    turned: tuple[str, ...] = ()

    @property
    def may_share(self) -> bool:
        """Rows that begin alike may be computed as one tree."""
        return not self.recurrent

    @property
    def may_pack(self) -> bool:
        """Rows that have nothing in common may stand in one row, kept apart by the attention mask."""
        return not self.recurrent

    def published(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight as checkpoints have it: ``mlp.experts.down_proj`` as ``[experts, in, out]``, for one."""
        return weight.transpose(-1, -2).contiguous() if name.endswith(self.turned) else weight


FAMILIES = {
    "qwen2_vl": Family(vision=True),
    "qwen2_5_vl": Family(vision=True),
    "qwen3_vl": Family(vision=True),
    "qwen3_vl_moe": Family(
        vision=True, router="Qwen3VLMoeTextTopKRouter", turned=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ),
    "qwen3_5": Family(vision=True, recurrent=True),
    "qwen2": Family(vision=False),  # Qwen2.5, too
    "qwen3": Family(vision=False),
}


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config. Raises ValueError for one that was never checked."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model type {config.model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[config.model_type]


def rope_positions(
    token_ids: Sequence[int], grids: Sequence[tuple[int, int]], image_token_id: int | None, start: int = 0
) -> tuple[torch.Tensor, int]:
    """M-RoPE positions ``[3, tokens]`` (temporal, height, width) of a row or of its continuation, and the next free position.

    A text token takes the next position in all three. An image of ``grids`` (height, width in visual tokens, after merging)
    takes one temporal position, spreads its rows and columns from there, and the text goes on after the larger side::

        rope_positions([7, 9, 9, 8], [(1, 2)], image_token_id=9) == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]], 4

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1; the tests compare it with each model's own rule.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long)
    parts: list[torch.Tensor] = []
    done = 0
    visual = (ids == image_token_id).nonzero().flatten().tolist() if image_token_id is not None and grids else []
    cursor = 0
    for height, width in grids:
        first = visual[cursor]
        parts.append((torch.arange(first - done) + start).expand(3, -1))
        start += first - done
        rows = torch.arange(height).repeat_interleave(width)
        columns = torch.arange(width).repeat(height)
        parts.append(torch.stack([torch.zeros_like(rows), rows, columns]) + start)
        start += max(height, width)
        done = first + height * width
        cursor += height * width
    rest = len(ids) - done
    parts.append((torch.arange(rest) + start).expand(3, -1))
    return torch.cat(parts, dim=1), start + rest


def merged_grid(image_grid_thw: torch.Tensor, merge_size: int) -> tuple[int, int]:
    """An image's height and width in visual tokens, from its grid of patches ``[1, 3]``."""
    _, height, width = image_grid_thw[0].tolist()
    return height // merge_size, width // merge_size
