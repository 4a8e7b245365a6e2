"""Vision towers attend to all images in few calls: the same features and gradients as transformers' loop over images."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vlmrl.config import Model
from vlmrl.families import FAMILIES, qwen_vl
from vlmrl.model import image_attention
from vlmrl.model.loading import LoadedModel, load_model

GRIDS = [name for name, family in FAMILIES.items() if issubclass(family, qwen_vl.QwenVL)]
MIXED = ((4, 6), (2, 2), (12, 18), (6, 4), (2, 2), (2, 12))
"""Rows and columns of patches: three of 24 patches, two of 4. Qwen2.5-VL's windows are 8 x 8 patches and smaller at the edges."""


def load(name: str, folder) -> LoadedModel:
    return load_model(Model(path=f"tiny:{name}", device="cpu", dtype="float32"), folder, seed=0)


def encoded(model: LoadedModel, sides, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The features of images of noise, and the gradients of the sum of their squares."""
    policy = model.policy
    policy.config.vision_config._attn_implementation = implementation
    grids = torch.tensor([[1, *side] for side in sides])
    width = policy.family.blank_inputs(policy.device)["pixel_values"].shape[1]
    pixels = torch.randn(int(grids.prod(1).sum()), width, generator=torch.Generator().manual_seed(0))
    images = policy.family.encode_images(policy.model, {"pixel_values": pixels, "image_grid_thw": grids})
    features = torch.cat([part for image in images for part in (image.embeds, *image.deepstack)])
    features.square().sum().backward()
    gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    policy.zero_grad()
    return features.detach(), gradients


@pytest.mark.parametrize("name", GRIDS)
def test_images_of_mixed_sizes_have_the_features_and_gradients_of_the_loop(name, tmp_path):
    model = load(name, tmp_path)
    assert model.policy.model.model.visual.config._attn_implementation == image_attention.NAME
    features, gradients = encoded(model, MIXED, image_attention.NAME)
    theirs, wanted = encoded(model, MIXED, "sdpa")
    assert float((features - theirs).abs().max()) < 1e-6
    assert gradients.keys() == wanted.keys() and len(wanted) > 20
    for each, gradient in gradients.items():
        assert float((gradient - wanted[each]).norm()) < 1e-6 * float(wanted[each].norm()) + 1e-9, each


def test_many_images_of_few_sizes_take_few_calls(tmp_path, monkeypatch):
    model, calls = load("qwen3_vl", tmp_path), []

    def counted(*operands, **options):
        calls.append(operands[0].shape[0])
        return sdpa(*operands, **options)

    sdpa = functional.scaled_dot_product_attention
    monkeypatch.setattr(image_attention, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    depth = model.policy.config.vision_config.depth
    encoded(model, [(2, 2), (2, 4)] * 64, image_attention.NAME)
    assert calls == [64, 64] * depth
    calls.clear()
    encoded(model, [(2, 2), (2, 4)] * 64, "sdpa")
    assert len(calls) == 128 * depth


def test_the_kernel_of_gpus_gets_every_image_at_once(monkeypatch):
    """On the device `meta`, which runs none: patches first, then heads, and where each image begins."""
    seen = []

    def flash(query, key, value, *others, scale):
        seen.append((query.shape, [each.tolist() if torch.is_tensor(each) else each for each in others], scale))
        return query, None

    monkeypatch.setattr(image_attention, "_flash", flash)
    monkeypatch.setattr(image_attention, "to_device", lambda tensor, device: tensor)
    operand = torch.empty(1, 2, 30, 16, device="meta", dtype=torch.bfloat16)
    starts = torch.tensor([0, 6, 30], dtype=torch.int32)
    out, _ = image_attention.attend_images(
        torch.nn.Identity(), *[operand] * 3, None, scaling=0.25, cu_seq_lens_q=starts, max_length_q=24
    )
    assert seen == [(torch.Size([30, 2, 16]), [[0, 6, 30], [0, 6, 30], 24, 24, 0.0, False, False], 0.25)]
    assert out.shape == (1, 30, 2, 16)
