"""The patch embedding as a matrix product: the convolution's numbers and gradients, under the convolution's names."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlmrl.config import Model
from vlmrl.families import FAMILIES
from vlmrl.families.qwen_vl import QwenVL
from vlmrl.model import patch_embedding, tiny
from vlmrl.model.loading import load_model
from vlmrl.model.patch_embedding import PROJECTIONS, PatchProjection

GRIDS = [name for name, family in FAMILIES.items() if issubclass(family, QwenVL)]


class Operators(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", GRIDS)
def test_every_family_with_grids_of_patches_encodes_images_without_a_convolution(family, tmp_path):
    folder = tiny.build(tmp_path / family, family)
    policy = load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0).policy
    inputs = policy.family.blank_inputs(policy.device)
    inputs["pixel_values"] = torch.rand(inputs["pixel_values"].shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Operators() as ran:
        image = policy.family.encode_images(policy.model, inputs)[0]
    assert "convolution" not in ran.names
    plain = copy.deepcopy(policy)
    originals = {linear: conv for conv, linear in PROJECTIONS.items()}
    replaced = [module for module in plain.modules() if type(module) in originals]
    assert [type(module) for module in replaced].count(PatchProjection) == 1
    for module in replaced:
        module.__class__ = originals[type(module)]
    with torch.no_grad(), Operators() as ran:
        expected = plain.family.encode_images(plain.model, inputs)[0]
    assert "convolution" in ran.names
    assert torch.allclose(image.embeds, expected.embeds, atol=1e-5)
    for mine, theirs in zip(image.deepstack, expected.deepstack, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert any(name.endswith("patch_embed.proj.weight") for name, _ in policy.model.named_parameters())


@pytest.mark.parametrize("kind", [nn.Conv3d, nn.Conv2d])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_convolution(bias, kind):
    torch.manual_seed(0)
    kernel = (2, 4, 4) if kind is nn.Conv3d else (4, 2)
    conv = kind(3, 8, kernel_size=kernel, stride=kernel, bias=bias)
    model = nn.Sequential(copy.deepcopy(conv))
    patch_embedding.use_linear_patches(model)
    patches = torch.randn(5, 3, *kernel)
    factors = torch.randn(conv(patches).shape)
    for module in (conv, model):
        (module(patches) * factors).sum().backward()
    assert type(model[0]) is PROJECTIONS[kind]
    for mine, theirs in zip(model.parameters(), conv.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


def test_other_convolutions_stay_and_larger_inputs_are_convolved():
    overlapping, patches = nn.Conv3d(3, 8, 2, stride=1), nn.Conv3d(3, 8, 2, stride=2)
    model = nn.ModuleList([overlapping, patches])
    before = patches(torch.ones(1, 3, 4, 4, 4))
    patch_embedding.use_linear_patches(model)
    assert type(overlapping) is nn.Conv3d and type(patches) is PatchProjection
    assert torch.equal(patches(torch.ones(1, 3, 4, 4, 4)), before)
