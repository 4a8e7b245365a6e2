"""The table of GPUs in docs/scale.md is what `benchmarks/memory_table.py` computes."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_computed():
    path = ROOT / "benchmarks/memory_table.py"
    spec = importlib.util.spec_from_file_location("memory_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (ROOT / "docs/scale.md").read_text(), "run benchmarks/memory_table.py and copy its table"
