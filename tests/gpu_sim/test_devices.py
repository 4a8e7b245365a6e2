"""A run on another GPU than the first one leaves the first one alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "devices_script.py"


def test_a_model_on_the_second_gpu_leaves_nothing_on_the_first(triton_gpu, tmp_path):
    """In a new thread the current GPU is the first one: a context there takes about 500 MiB."""
    triton_gpu.run(SCRIPT, tmp_path, devices=2, forbidden=0)
