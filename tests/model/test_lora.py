"""Frozen parts and LoRA: what is trained, what is written, what the adapters change."""

from dataclasses import replace

import pytest
import torch
from testing.fsdp_script import samples_of
from transformers import AutoModelForImageTextToText

from vlmrl.config import Algo, Lora, Model, Optim
from vlmrl.model.loading import load_model
from vlmrl.model.lora import adapters_off, named_weights
from vlmrl.train.trainer import Trainer, TrainerSpec

ROW = torch.tensor([[5, 6, 7, 300, 20]])


def load(folder, **settings):
    return load_model(Model(path=str(folder), device="cpu", **settings), folder.parent, seed=0)


def trained(loaded):
    return {name for name, parameter in loaded.policy.model.named_parameters() if parameter.requires_grad}


def logits(model):
    with torch.no_grad():
        return model(input_ids=ROW).logits


@pytest.fixture
def adapted(tiny_folder):
    """A model whose adapters have moved from their zero start."""
    loaded = load(tiny_folder, lora=Lora(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in loaded.policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return loaded


def test_parts_are_frozen_by_name(tiny_folder):
    everything = trained(load(tiny_folder))
    vision = {name for name in everything if "visual." in name}
    projector = {name for name in vision if "merger" in name}
    assert projector and vision - projector
    assert trained(load(tiny_folder, freeze=("vision_tower",))) == everything - vision | projector
    assert trained(load(tiny_folder, freeze=("projector",))) == everything - projector
    assert trained(load(tiny_folder, freeze=("vision_tower", "projector"))) == everything - vision
    assert trained(load(tiny_folder, freeze=("language_model",))) == vision
    first = {name for name in vision if name.startswith("model.visual.blocks.0.")}
    assert first and trained(load(tiny_folder, freeze=("model.visual.blocks.0.*",))) == everything - first


def test_freezing_names_what_it_cannot_find(tiny_folder):
    with pytest.raises(ValueError, match=r"model.freeze must name vision_tower, .* but 'vison' fits none"):
        load(tiny_folder, freeze=("vison",))
    with pytest.raises(ValueError, match="leaves nothing to train"):
        load(tiny_folder, freeze=("vision_tower", "projector", "language_model"))


def test_adapters_start_at_nothing_and_can_be_left_out(tiny_folder, adapted):
    plain = logits(load(tiny_folder).policy.model)
    assert torch.equal(logits(load(tiny_folder, lora=Lora(rank=4)).policy.model), plain)
    model = adapted.policy.model
    moved = logits(model)
    assert (moved - plain).abs().max() > 1e-3
    before = trained(adapted)
    with adapters_off(model):
        assert torch.equal(logits(model), plain)
        assert trained(adapted) == before
    assert torch.equal(logits(model), moved)


def test_merged_weights_have_the_models_own_names_and_give_its_numbers(tiny_folder, adapted, tmp_path):
    expected = logits(adapted.policy.model)
    plain = load(tiny_folder).policy.model
    weights = dict(named_weights(adapted.policy.model))
    assert weights.keys() == dict(plain.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    assert torch.allclose(logits(plain), expected, atol=1e-5)
    adapted.save(tmp_path / "merged")
    reloaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(reloaded), expected, atol=1e-5)


def test_an_unchanged_policy_has_the_ratio_1(adapted):
    """The old logprobs are scored in evaluation mode, the new ones in training mode, and a rollout's are the scores themselves."""
    rows = samples_of(adapted, [True, False, False, True])
    spec = TrainerSpec(Algo(corrections=("token_truncation",)), Optim(lr=1e-12), 9, 10**6, groups_per_step=1)
    trainer = Trainer(adapted.policy, spec)
    scores = trainer.score(rows)
    output = trainer.step([replace(row, rollout_logprobs=s.tolist()) for row, s in zip(rows, scores, strict=True)])
    trainer.close()
    assert output.metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert output.metrics["mismatch/ratio_max"] == pytest.approx(1, abs=1e-4)
    for mine, before in zip(output.logprobs, scores, strict=True):
        assert mine == pytest.approx(before, abs=1e-4)


def test_merged_weights_have_the_models_dtype(qwen3_vl):
    loaded = load(qwen3_vl, lora=Lora(rank=2), dtype="bfloat16")
    assert {weight.dtype for _, weight in named_weights(loaded.policy.model)} == {torch.bfloat16}
