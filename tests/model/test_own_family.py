"""A family from outside the package: a registered subclass, which passes the conformance suite's checks of its classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from family_conformance import check_forward, check_parts, check_saved, load
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from vlmrl.families import FAMILIES
from vlmrl.families.qwen3_vl import Qwen3VL
from vlmrl.model.loading import LoadedModel


class OwnQwenConfig(Qwen3VLConfig):
    model_type = "own_qwen"


class OwnQwenModel(Qwen3VLForConditionalGeneration):
    config_class = OwnQwenConfig


class OwnQwen(Qwen3VL):
    tiny_config_class = OwnQwenConfig
    tiny_model_class = OwnQwenModel


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[LoadedModel]:
    AutoConfig.register("own_qwen", OwnQwenConfig)
    AutoModelForImageTextToText.register(OwnQwenConfig, OwnQwenModel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "own_qwen", OwnQwen)
        yield load("own_qwen", tmp_path_factory.mktemp("models"))


def test_a_variant_of_a_family_names_its_own_classes(model):
    assert isinstance(model.policy.model, OwnQwenModel) and isinstance(model.policy.family, OwnQwen)


# `checks_of` has more, for what it inherits
@pytest.mark.parametrize("check", [check_forward, check_parts, check_saved], ids=lambda check: check.__name__)
def test_it_conforms(model, check, tmp_path):
    check(model, tmp_path)
