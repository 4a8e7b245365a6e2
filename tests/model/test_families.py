"""Every family conforms, trains in a short run, and is found by its model type; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
from family_conformance import checks_of, load
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from vlmrl.families import FAMILIES, family_of
from vlmrl.model.loading import LoadedModel
from vlmrl.model.policy import Policy

CHECKS = [(name, check) for name, family in FAMILIES.items() for check in checks_of(family)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[str], LoadedModel]:
    """The tiny model of a family, loaded once."""
    return cache(lambda name: load(name, tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize(("name", "check"), CHECKS, ids=lambda value: getattr(value, "__name__", value))
def test_a_family_conforms(name, check, model, tmp_path):
    check(model(name), tmp_path)


def test_the_tiny_families_are_known_and_others_are_refused(tiny_folder):
    assert family_of(AutoConfig.from_pretrained(tiny_folder)).vision
    assert not family_of(SimpleNamespace(model_type="qwen3")).vision
    with pytest.raises(ValueError, match="model type 'gpt2' is not supported; supported are "):
        family_of(SimpleNamespace(model_type="gpt2"))


def test_all_rows_may_be_shared_and_packed_also_those_of_recurrent_layers():
    bound = {name: family(None) for name, family in FAMILIES.items()}
    assert all(family.may_share for family in bound.values())
    assert [name for name, family in bound.items() if family.recurrent] == ["qwen3_5"]


def test_sliding_window_layers_are_refused():
    config = Qwen2Config(
        num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=16
    )
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"attend to the whole row, but .* hold \['sliding_attention'\]"):
        Policy(Qwen2ForCausalLM(config))
