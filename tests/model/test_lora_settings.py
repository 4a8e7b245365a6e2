"""LoRA's settings in every family: each adapts what it names, or is refused by name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from peft import PeftModel
from testing.fsdp_script import samples_of
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from vlmrl.config import Algo, Config, Lora, Model, Optim
from vlmrl.families import FAMILIES
from vlmrl.model.loading import LoadedModel, load_model, shapes_of
from vlmrl.model.lora import adapted_targets, named_adapters, save_adapters
from vlmrl.model.policy import Policy
from vlmrl.plan.memory_plan import Sizes, plan_memory
from vlmrl.train.packing import response_logprobs
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Trainer, TrainerSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
VISION = [name for name, family in FAMILIES.items() if family.vision]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("families")


def load(family: str, folder: Path, freeze: tuple[str, ...] = (), **lora) -> LoadedModel:
    settings = Lora(**{"rank": 2} | lora)
    return load_model(Model(path=f"tiny:{family}", device="cpu", freeze=freeze, lora=settings), folder, seed=0)


def adapted(family: str, folder: Path, freeze: tuple[str, ...] = (), **lora) -> set[str]:
    """The names of the adapted layers, from shapes alone."""
    model = shapes_of(Model(path=f"tiny:{family}", freeze=freeze, lora=Lora(**{"rank": 2} | lora)), folder)
    return {name.partition(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}


@cache
def linear_layers(family: str, folder: Path) -> tuple[list[str], list[str]]:
    """The names of the linear layers of the decoder without its head, and those of the vision tower and the projector."""
    layers = shapes_of(Model(path=f"tiny:{family}"), folder).named_modules()
    names = [name for name, layer in layers if isinstance(layer, nn.Linear) and name != "lm_head"]
    decoder = [name for name in names if re.search(FAMILIES[family].parts["language_model"], name + ".")]
    return decoder, [name for name in names if name not in decoder]


def explicit(family: str, folder: Path, vision: bool = False) -> tuple[str, ...]:
    """Targets to name for all that can be adapted: the fused experts of the mixture cannot."""
    decoder, others = linear_layers(family, folder)
    wanted = decoder + (others if vision else [])
    return tuple({name.rpartition(".")[2]: name for name in wanted}) if "moe" in family else ()


@pytest.mark.parametrize("family", VISION)
def test_vision_adapts_the_vision_tower_and_the_projector_and_an_image_trains_them(family, folder):
    loaded = load(family, folder, vision=True, targets=explicit(family, folder, vision=True))
    decoder, others = linear_layers(family, folder)
    assert set(adapted_targets(loaded.policy.model)) == {name.rpartition(".")[2] for name in decoder + others}
    before = {name: weight.clone() for name, weight in loaded.policy.named_parameters()}
    trainer = Trainer(loaded.policy, TrainerSpec(Algo(loss="sft"), Optim(lr=1e-3), 9, 10**6))
    trainer.step(samples_of(loaded, [True, True]))
    trainer.close()
    moved = {name for name, weight in loaded.policy.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".lora_B." in name}  # A gets its first gradient with the second step
    parts = loaded.policy.family.parts
    for part in ("vision_tower", "projector", "language_model"):
        assert any(re.search(parts[part], name.removeprefix("model.")) for name in moved), part


@pytest.mark.parametrize("family", VISION)
def test_a_frozen_part_gets_no_adapters(family, folder):
    settings = {"vision": True, "targets": explicit(family, folder, vision=True)}
    everything, parts = adapted(family, folder, **settings), FAMILIES[family].parts
    for part, pattern in parts.items():
        frozen = {name for name in everything if re.search(pattern, name + ".")}
        kinds = {name.rpartition(".")[2] for name in everything - frozen}
        left = [target for target in settings["targets"] if target in kinds]
        assert frozen and adapted(family, folder, (part,), vision=True, targets=tuple(left)) == everything - frozen
    first = linear_layers(family, folder)[0][0].partition("layers.0.")[0] + "layers.0."
    without = adapted(family, folder, (f"{first}*",), **settings)
    assert without == {name for name in everything if not name.startswith(first)} != everything


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_frozen_anyway_may_be_named(family, folder):
    """LoRA without `vision` leaves the vision tower alone, so freezing it as well changes nothing."""
    parts = tuple(part for part in FAMILIES[family].parts if part != "language_model")
    settings = {"targets": explicit(family, folder)}
    assert adapted(family, folder, parts, **settings) == adapted(family, folder, **settings)


def test_frozen_experts_need_no_targets(folder):
    layers = adapted("qwen3_vl_moe", folder, ("*.mlp.experts.*",))
    assert {name.rpartition(".")[2] for name in layers} == set(ATTENTION)


@pytest.mark.parametrize(
    ("family", "freeze", "lora", "message"),
    [
        ("qwen3_vl", ("language_model",), {}, "model.freeze leaves no layer for adapters"),
        ("qwen3_vl", ("*_proj.weight",), {}, "model.freeze leaves no layer for adapters"),
        (
            "qwen3_vl",
            (),
            {"vision": True, "targets": ("q_proj",)},
            "model.lora.vision adapts no layer: model.lora.targets",
        ),
        ("qwen3_vl", ("model.visual.*",), {"vision": True}, "model.lora.vision adapts no layer"),
        ("qwen3_vl", (), {"targets": ("q_proj", "qkv")}, "'qkv' is only in the vision tower: set model.lora.vision"),
        ("qwen3_vl", (), {"targets": ("q_proj", "lm_head")}, "'lm_head' fits none"),
        ("qwen2_vl", (), {"targets": ("q_proj", "q_porj")}, "of qwen2_vl (q_proj, k_proj, v_proj, o_proj, "),
        ("qwen2_5_vl", (), {"targets": ("proj",)}, "'proj' is only in the vision tower"),  # not the convolution, either
        (
            "qwen3_vl",
            ("vision_tower",),
            {"vision": True, "targets": ("q_proj", "qkv")},
            "model.freeze freezes every 'qkv': unfreeze them, or leave it out.",
        ),
        (
            "qwen3_vl_moe",
            (),
            {},
            "model.lora.targets must be set for qwen3_vl_moe: its experts (gate_up_proj, down_proj)",
        ),
        ("qwen3_vl_moe", (), {"vision": True}, "Choose from qkv, proj, linear_fc1, linear_fc2, q_proj"),
        (
            "qwen3_vl_moe",
            (),
            {"targets": ("q_proj", "gate_proj")},
            "'gate_proj' fits none. Its experts (gate_up_proj, down_proj) are fused",
        ),
        ("qwen3", (), {"vision": True}, "model.lora.vision must be False for qwen3, which has no vision tower."),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(family, freeze, lora, message, folder):
    with pytest.raises(ValueError, match=re.escape(message)):
        adapted(family, folder, freeze, **lora)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision": True}, "model.lora.vision must be unset with model.lora.rank 0"),
        ({"targets": ("q_proj",)}, "model.lora.targets must be unset with model.lora.rank 0"),
    ],
)
def test_settings_without_an_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Lora(**settings)


def test_dropout_of_a_models_own_is_refused(qwen3_vl):
    model = load_model(Model(path=str(qwen3_vl), device="cpu"), qwen3_vl.parent, seed=0).policy.model
    model.model.language_model.dropout = nn.Dropout(0.0)
    Policy(model)
    model.model.language_model.dropout = nn.Dropout(0.25)
    with pytest.raises(ValueError, match=r"dropout must be 0 .* but it is 0.25 in model.language_model.dropout"):
        Policy(model)


def test_dropout_in_attention_is_refused(qwen3_vl):
    model = load_model(Model(path=str(qwen3_vl), device="cpu"), qwen3_vl.parent, seed=0).policy.model
    layer = model.model.language_model.layers[1].self_attn
    layer.attention_dropout = 0.1  # as `attention_dropout` in the model's config
    with pytest.raises(ValueError, match=r"dropout must be 0 .* is 0.1 in model.language_model.layers.1.self_attn"):
        Policy(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_saved_adapters_of_every_part(family, folder, tmp_path):
    """Also where `model.freeze` leaves out a layer, and the base model is a text model."""
    vision = family in VISION
    frozen = next(name for name in linear_layers(family, folder)[vision] if ".1." in name).partition(".1.")[0] + ".1."
    loaded = load(family, folder, (f"{frozen}*",), alpha=6, vision=vision, targets=explicit(family, folder, vision))
    generator = torch.Generator().manual_seed(0)
    plain = response_logprobs(loaded.policy, rows := samples_of(loaded, [vision, vision]), 1.0)
    with torch.no_grad():
        for name, weight in loaded.policy.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    expected = response_logprobs(loaded.policy, rows, 1.0)
    assert abs(expected[0] - plain[0]).max() > 1e-2
    weights = dict(named_adapters(loaded.policy.model))
    assert not any(name.startswith(f"base_model.model.{frozen}") for name in weights)
    save_adapters(weights, Lora(rank=2, alpha=6), loaded.path, tmp_path)
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    base = auto.from_pretrained(loaded.path, dtype=torch.float32, attn_implementation="sdpa")
    again = PeftModel.from_pretrained(base, tmp_path).get_base_model()
    for mine, theirs in zip(
        expected, response_logprobs(Policy(again, loaded.image_processor).eval(), rows, 1.0), strict=True
    ):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_the_plan_counts_what_is_trained_by_part(folder):
    def sizes(**settings) -> dict[str, int]:
        return Sizes.of(shapes_of(Model(path="tiny:qwen3_vl", **settings), folder)).trained_by_part

    whole = sizes()
    assert list(whole) == ["vision_tower", "projector", "language_model"]
    assert sizes(freeze=("vision_tower",)) == {part: whole[part] for part in ("projector", "language_model")}
    # 4 layers, rank 2: q and o, k and v, the MLP.
    decoder = 4 * 2 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    tower = 3 * 2 * ((64 + 192) + (64 + 64) + 2 * (64 + 256))  # 3 blocks: qkv, proj, the MLP
    projector = 2 * 2 * ((256 + 256) + (256 + 128))  # the merger and one deepstack merger
    assert (decoder, tower, projector) == (19456, 6144, 3584)
    assert sizes(lora=Lora(rank=2)) == {"language_model": decoder}
    adapters = sizes(lora=Lora(rank=2, vision=True))
    assert adapters == {"vision_tower": tower, "projector": projector, "language_model": decoder}
    config = Config(model=Model(path="tiny:qwen3_vl", lora=Lora(rank=2, vision=True)), output_dir=str(folder))
    line = "1.3 M parameters, of which 29.2 k are trained (vision_tower 6.1 k, projector 3.6 k, language_model 19.5 k)"
    assert line in str(plan_memory(config, Ranks()))


def test_parts_that_a_family_does_not_name_are_counted(folder, monkeypatch):
    class Nameless(FAMILIES["qwen3_vl"]):
        parts: ClassVar[dict[str, str]] = {"language_model": r"language_model\.|lm_head"}

    whole = Sizes.of(shapes_of(Model(path="tiny:qwen3_vl"), folder))
    monkeypatch.setitem(FAMILIES, "qwen3_vl", Nameless)
    sizes = Sizes.of(shapes_of(Model(path=str(next(folder.glob("tiny-qwen3_vl-*")))), folder))
    assert list(sizes.trained_by_part) == ["other", "language_model"] and sizes.trained == whole.trained
