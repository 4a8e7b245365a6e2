"""Compiled decoder layers: the graphs and kernels that inductor and Triton make for an H100; they are not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "layers_script.py"
TEXT_2B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LENGTHS = range(129, 4930, 200)


@pytest.mark.long
def test_a_layer_of_the_2b_has_few_kernels_and_few_graphs_for_all_lengths(triton_gpu):
    done = triton_gpu.run(SCRIPT, "qwen3", json.dumps(TEXT_2B), *LENGTHS, timeout=1800)
    found = json.loads(done.stdout.splitlines()[-1])
    kernels = {how: found[how]["forward"] + found[how]["backward"] for how in ("eager", "compiled")}
    assert kernels["compiled"] <= 30 < 50 < kernels["eager"] <= 60  # 135 without fused norms
    assert found["compiled"]["peak"] <= found["eager"]["peak"]
    assert len(LENGTHS) == 25 and found["graphs"][-1] <= 16  # with and without gradient, flex attention's included
