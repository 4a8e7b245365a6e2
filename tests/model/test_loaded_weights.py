"""The weights of a model folder: none is missing, none is left over, and the config says what is tied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmrl.config import Model
from vlmrl.model import tiny
from vlmrl.model.loading import load_model, pick_device

EMBEDDINGS = "model.language_model.embed_tokens.weight"
QUERY = "model.language_model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Weights], Any], tied: bool = True) -> Model:
    """A tiny model, which has no output layer of its own, with other weights or another config."""
    shutil.copytree(tiny.resolve("tiny:qwen3_vl", folder), folder / "changed")
    weights = load_file(folder / "changed/model.safetensors")
    change(weights)
    save_file(weights, folder / "changed/model.safetensors", metadata={"format": "pt"})
    path = folder / "changed/config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    path.write_text(json.dumps(config))
    return Model(path=str(folder / "changed"), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("change", "tied", "message"),
    [
        (lambda weights: weights.pop(QUERY), True, r"lacks weights .* would be random: .*layers\.0\.self_attn\.q_proj"),
        (lambda weights: None, False, r"lacks weights .* lm_head\.weight.*tie_word_embeddings: true"),
        (lambda weights: weights.update({"extra.weight": torch.ones(2)}), True, r"would be lost: extra\.weight"),
        (
            lambda weights: weights.update({"lm_head.weight": weights[EMBEDDINGS] + 0.05}),
            True,
            "an output layer that differs from its embeddings, but its config.json says",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(change, tied, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_model(changed(tmp_path, change, tied), tmp_path, 0)


def test_an_output_layer_that_equals_the_embeddings_is_tied(tmp_path):
    config = changed(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[EMBEDDINGS].clone()}))
    model = load_model(config, tmp_path, 0).policy.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "cuda",
            r"must be a device of this machine, but it is 'cuda', and torch .* finds 0 GPUs: set --model\.device auto",
        ),
        ("cuda:3", "it is 'cuda:3'"),
        ("gpu", "must be auto, cpu, cuda or cuda:NUMBER, but it is 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_one_error_that_names_the_setting(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=f"model.device {message}" if message[0] == "m" else message):
        pick_device(device)
