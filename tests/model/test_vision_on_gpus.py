"""What the vision families do otherwise on a GPU, where reading a number back is slow: the same numbers as Hugging Face's own code."""

from __future__ import annotations

import pytest
import torch
from testing.trees import largest_difference, random_rows, train, worst_gradient

from vlmrl.config import Lora, Model
from vlmrl.families import FAMILIES, qwen_vl
from vlmrl.model.loading import LoadedModel, load_model

GRIDS = [name for name, family in FAMILIES.items() if issubclass(family, qwen_vl.QwenVL)]


@pytest.fixture(params=GRIDS)
def model(request, tmp_path) -> LoadedModel:
    return load_model(Model(path=f"tiny:{request.param}", device="cpu", dtype="float32"), tmp_path, seed=0)


def test_sizes_computed_beforehand_give_the_same_features(model):
    policy = model.policy
    generator = torch.Generator().manual_seed(0)
    width = policy.family.blank_inputs(policy.device)["pixel_values"].shape[1]
    grids = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 12, 18]])
    inputs = {
        "pixel_values": torch.randn(int(grids.prod(1).sum()), width, generator=generator),
        "image_grid_thw": grids,
    }
    with torch.no_grad():
        ours = policy.family.encode_images(policy.model, inputs)
        theirs = policy.model.model.get_image_features(**inputs, return_dict=True)
    assert [len(image.embeds) for image in ours] == [6, 1, 54]
    assert all(torch.equal(one.embeds, other) for one, other in zip(ours, theirs.pooler_output, strict=True))
    for level, features in enumerate(getattr(theirs, "deepstack_features", None) or []):
        joined = features if isinstance(features, torch.Tensor) else torch.cat(features)  # joined before 5.23
        assert torch.equal(torch.cat([image.deepstack[level] for image in ours]), joined)


def test_features_are_inserted_as_by_the_model_itself(model, monkeypatch):
    rows = random_rows(model, 0)
    assert any(row.media for row in rows)
    theirs = train(model, rows, 10**6, share=True)
    monkeypatch.setattr(qwen_vl, "waits_to_be_read", lambda device: True)
    ours = train(model, rows, 10**6, share=True)
    assert largest_difference(ours, theirs) == 0
    assert worst_gradient(ours, theirs) < (1e-6, "")


@pytest.mark.parametrize("vision", [True, False])
def test_they_are_inserted_into_frozen_embeddings_whose_layers_are_checkpointed(tmp_path, monkeypatch, vision):
    lora = Lora(rank=4, vision=vision)
    loaded = load_model(Model(path="tiny:qwen3_vl", device="cpu", dtype="float32", lora=lora), tmp_path, seed=0)
    loaded.policy.enable_gradient_checkpointing()
    rows = random_rows(loaded, 0)
    theirs = train(loaded, rows, 10**6, share=True)
    monkeypatch.setattr(qwen_vl, "waits_to_be_read", lambda device: True)
    ours = train(loaded, rows, 10**6, share=True)
    assert largest_difference(ours, theirs) == 0
    assert worst_gradient(ours, theirs) < (1e-6, "")
