"""docs/security.md names a test for each line of its tables, and each of them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")]
BEGINNINGS = ("| --- |", "| server |", "| input |")
OWN_CODE = "is code, and runs"  # a line about what nothing holds back


@cache
def functions_of(path: Path) -> set[str]:
    parts = ast.parse(path.read_text()).body
    return {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(BEGINNINGS)], ids=lambda row: row[2:40])
def test_each_line_names_tests_that_exist(row):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    assert named or OWN_CODE in row
    assert [name for path, name in named if not (ROOT / path).is_file() or name not in functions_of(ROOT / path)] == []
