"""`benchmarks/lora_2b_cpu.py` on a tiny model, and the numbers of the 2B's shape."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from vlmrl.config import Model
from vlmrl.model.loading import load_reader, shapes_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ELSEWHERE = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"}  # not the shape


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("shapes", "lora_2b_cpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("lora_2b_cpu")


def test_a_step_in_float32_moves_logprobs_as_the_gradient_predicts(script):
    found = script.main(script.Settings(tiny=True, dtype="float32"))
    assert set(found) == {"up", "down"}
    for parts, sign in ((found["up"], 1), (found["down"], -1)):
        assert [each.share for each in parts] == [1.0, 0.1]
        for each in parts:
            assert each.measured * sign > 1e-3
            assert each.measured == pytest.approx(each.predicted, rel=0.1)


def test_a_step_in_bfloat16_moves_logprobs_in_the_direction_of_their_advantages(script):
    found = script.main(script.Settings(tiny=True))
    assert found["up"][0].measured > 0.01 and found["down"][0].measured < -0.01


def test_the_2b_has_the_published_shape(script, tmp_path, shared):
    folder = script.write_2b(tmp_path / "2b")
    shapes = shapes_of(Model(path=str(folder)), tmp_path)
    assert sum(weight.numel() for weight in shapes.parameters()) == 2_127_532_032
    published = AutoConfig.from_pretrained(shared / "data/qwen/configs/Qwen3-VL-2B-Instruct.config.json").to_dict()
    ours = AutoConfig.from_pretrained(folder).to_dict()
    for section in ("text_config", "vision_config"):
        names = (ours[section].keys() | published[section].keys()) - ELSEWHERE
        differ = {name for name in names if ours[section].get(name) != published[section].get(name)}
        assert not {name for name in differ if not name.endswith("_token_id")}  # the tiny tokenizer's
    reader = load_reader(Model(path=str(folder)), tmp_path)
    assert reader.renderer.decode([150_000, *reader.tokenizer.encode("answer")]) == "answer"
