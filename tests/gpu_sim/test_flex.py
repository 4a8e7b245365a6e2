"""Tree attention compiled for an H100: inductor and Triton make the kernels that a GPU would run; they are not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "flex_script.py"
LENGTHS = (40, 100, 127, 1000, 1111, 2049)
SHARED_MEMORY = 227 * 1024  # bytes that a block of threads can have on an H100

# Query heads, key heads, head width; the kernels depend on the queries a key: 8, 7, 4, and 2 in `test_layers.py`.
SHAPES = {
    "Qwen3-VL 30B-A3B, 32B": (32, 4, 128),
    "Qwen2.5-VL 7B": (28, 4, 128),  # not a power of two: the keys are repeated
    "a head width of 64": (16, 4, 64),
}


@pytest.mark.long
@pytest.mark.parametrize("model", SHAPES)
def test_kernels_compile_at_all_lengths_and_fit(triton_gpu, model, tmp_path):
    lengths = [*LENGTHS, *range(500, 2400, 100)] if model == "a head width of 64" else LENGTHS
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    done = triton_gpu.run(SCRIPT, *SHAPES[model], *lengths, env=caches)
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["architectures"] == [90] and made["backward"]
    assert 0 < max(made["shared"]) <= SHARED_MEMORY
    assert made["graphs"] <= 4  # with and without gradient, for one block and for more
