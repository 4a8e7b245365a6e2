"""The tables of GPUs in docs/scale.md are what `benchmarks/memory_table.py` computes."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_computed():
    path = ROOT / "benchmarks/memory_table.py"
    spec = importlib.util.spec_from_file_location("memory_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs/scale.md").read_text()
    assert module.table() in page and module.peaks() in page, "run benchmarks/memory_table.py and copy its tables"
