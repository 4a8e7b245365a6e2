"""The vision tower's patch embedding and patch merging as linear layers.

Qwen-VL's processors cut images into patches, and the model embeds each patch by a 3-D convolution whose kernel covers it. Several
versions of torch and cuDNN run that convolution 10 to 20 times slower than the equal matrix product (pytorch issue 174051).
GLM-V merges patches by a 2-D convolution of that kind: on a CPU, 10 times slower with its gradient. transformers can fuse
the patch embedding, too, but renames the weight, which weight updates, freezing and checkpoints would see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


class _Product(nn.Module):
    """The forward of a convolution without overlap or padding: a matrix product where its input is one patch a row."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    kernel_size: tuple[int, ...]

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """``[patches, channels, *kernel]`` to ``[patches, width of the model, *ones]``."""
        if patches.shape[2:] != self.kernel_size:
            result: torch.Tensor = super().forward(patches)
            return result
        product = linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product.view(*product.shape, *(1 for _ in self.kernel_size))


class PatchProjection(_Product, nn.Conv3d):
    """A patch embedding."""


class PatchMerger(_Product, nn.Conv2d):
    """A layer that merges patches."""


PROJECTIONS: dict[type[nn.Module], Any] = {nn.Conv3d: PatchProjection, nn.Conv2d: PatchMerger}


def use_linear_patches(model: nn.Module) -> None:
    """Replace the forward of the model's patch embeddings and mergers. Their parameters and names stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and type(module) in PROJECTIONS and _covers_patches(module):
            module.__class__ = PROJECTIONS[type(module)]


def _covers_patches(conv: nn.Conv2d | nn.Conv3d) -> bool:
    plain = set(conv.padding) == {0} and set(conv.dilation) == {1} and conv.groups == 1
    return plain and conv.stride == conv.kernel_size
