"""How much memory the embedded engine of a run may use for keys and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlmrl.config import Config, Model, Rollout, Train
from vlmrl.model import tiny
from vlmrl.plan import memory_plan
from vlmrl.plan.gpus import KNOWN
from vlmrl.run.build import _kv_cache_bytes
from vlmrl.train.ranks import Ranks

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_the_setting_must_be_positive():
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_gib must be greater than 0, but it is 0"):
        Rollout(kv_cache_gib=0)
    assert Rollout(kv_cache_gib=0.5).kv_cache_bytes == 2**29


def test_an_engine_that_samples_during_training_leaves_the_trainer_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    card = replace(KNOWN["l4-24gb"], memory=6.5 * 2**30)
    monkeypatch.setattr(memory_plan, "pick_device", lambda name: GPU)
    monkeypatch.setattr(memory_plan, "gpu_at_hand", lambda: card)
    model = Model(path=str(tiny.build(tmp_path / "model", "qwen3")), device="cuda")
    config = Config(model=model, rollout=Rollout(max_tokens=8192, group_size=64), train=Train(max_staleness=1))
    limit = _kv_cache_bytes(config, Ranks(), GPU)
    plan = memory_plan.plan_memory(config, Ranks())
    assert plan.fits and limit is not None and plan.cache <= limit
    for name in ("forward and backward", "optimizer step"):  # with the limit in place of the planned cache
        assert sum(plan.phases[name].values()) - plan.cache + limit <= card.memory
    single = replace(config, rollout=Rollout(max_tokens=256, max_response_tokens=64, group_size=1))
    room = _kv_cache_bytes(single, Ranks(), GPU)
    assert room is not None and room > 4 * memory_plan.plan_memory(single, Ranks()).cache  # copies when rows join
    card = replace(card, memory=2.0**30)
    assert _kv_cache_bytes(config, Ranks(), GPU) is None  # nothing that the plan knows would fit
    card = KNOWN["h100-80gb"]
    own = replace(config, rollout=replace(config.rollout, kv_cache_gib=2.0))
    assert _kv_cache_bytes(own, Ranks(), GPU) == 2 * 2**30
    assert _kv_cache_bytes(config, Ranks(), CPU) is None
    assert _kv_cache_bytes(replace(config, train=Train()), Ranks(), GPU) is None
