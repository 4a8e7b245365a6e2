"""Settings of LoRA and of frozen parts as users may combine them, right and wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vlmrl.config import Lora, Model
from vlmrl.families import FAMILIES
from vlmrl.model.loading import shapes_of

TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv",
    "proj",
    "fc1",
    "fc2",
    "linear_fc1",
    "0",
    "lm_head",
    "embed_tokens",
    "gate",
    "experts",
    "gate_up_proj",
    "in_proj_qkv",
    "conv1d",
    "norm",
    "q_porj",
    "",
    ".*",
    "q_proj|",
)
PATTERNS = (
    "vision_tower",
    "projector",
    "language_model",
    "model.visual.*",
    "*.layers.0.*",
    "*.q_proj.*",
    "*.bias",
    "*.weight",
    "*",
    "*.mlp.*",
    "*.experts.*",
    "lm_head.*",
    "visoin_tower",
    "",
    "[",
    "*.lora_A.*",
)


def cases(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: a ``family``, the parts to ``freeze``, and the settings ``lora``."""
    while True:
        known = TARGETS[:7] if rng.random() < 0.7 else TARGETS
        lora = {
            "rank": rng.choice([1, 2, 2, 8, 8, 300]) if rng.random() < 0.9 else rng.choice([0, -1]),
            "alpha": 32 if rng.random() < 0.95 else rng.choice([1, 0]),
            "targets": tuple(rng.sample(known, rng.choice([0, 0, 1, 2, 3]))),
            "vision": rng.random() < 0.3,
        }
        freeze = tuple(rng.sample(PATTERNS, rng.choice([0, 0, 0, 1, 1, 2])))
        yield {"family": rng.choice([*FAMILIES]), "freeze": freeze, "lora": lora}


def outcome(case: dict[str, Any], folder: Path) -> str:
    """``adapted`` if the adapters are exactly in the layers that the settings name, ``refused`` after an error that names a setting.

    Anything else raises AssertionError.
    """
    family, freeze = FAMILIES[case["family"]], case["freeze"]
    try:
        lora = Lora(**case["lora"])
        model = shapes_of(Model(path=f"tiny:{case['family']}", freeze=freeze, lora=lora), folder)
    except ValueError as error:
        if not re.search(r"model\.(lora|freeze)", str(error)):
            raise AssertionError(f"an error that names no setting: {error}") from error
        return "refused"
    names = [name.replace(".base_layer.", ".") for name, _ in model.named_parameters() if ".lora_" not in name]
    weights = {name.partition(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}
    assert lora.rank == 0 or weights, "nothing is trained"
    for name in names if lora.rank == 0 else weights:
        if lora.rank:
            assert not lora.targets or name.rpartition(".")[2] in lora.targets, name
            assert lora.vision or re.search(family.parts["language_model"], name + "."), name
            frozen = [each for each in freeze if _names(each, f"{name}.weight", family.parts)]
            assert not frozen, (name, frozen)
    for target in lora.targets:
        assert any(name.endswith(f".{target}") for name in weights), target
    if lora.vision:
        assert any(not re.search(family.parts["language_model"], name + ".") for name in weights), "no vision layer"
    return "adapted"


def _names(pattern: str, weight: str, parts: dict[str, str]) -> bool:
    return re.search(parts[pattern], weight) is not None if pattern in parts else fnmatch(weight, pattern)
