"""The vision tower's patch embedding as the linear layer that it is.

Qwen-VL's processors cut images into patches, and the model embeds each patch by a 3-D convolution whose kernel covers it. Several
versions of torch and cuDNN run that convolution 10 to 20 times slower than the equal matrix product (pytorch issue 174051).
transformers can fuse it, too, but renames the weight, which weight updates, freezing and checkpoints would see.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear


class PatchProjection(nn.Conv3d):
    """A convolution without overlap or padding, computed as a matrix product where its input is one patch a row."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """``[patches, channels, time, height, width]`` to ``[patches, width of the model, 1, 1, 1]``."""
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def use_linear_patches(model: nn.Module) -> None:
    """Replace the forward of the model's patch embeddings. Their parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Conv3d and _covers_patches(module):
            module.__class__ = PatchProjection


def _covers_patches(conv: nn.Conv3d) -> bool:
    plain = conv.padding == (0, 0, 0) and conv.dilation == (1, 1, 1) and conv.groups == 1
    return plain and conv.stride == conv.kernel_size
