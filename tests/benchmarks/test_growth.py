"""`benchmarks/growth.py` with small batches: the operations of each stage grow as its work, whatever else the machine does."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from testing.fakes import qwen_vl

ROOT = Path(__file__).parents[2]


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "growth", raising=False)
    return importlib.import_module("growth")


def operations(growth: ModuleType, sizes: Any) -> tuple[Counter[str], int]:
    """How many lines of vlmrl's code the interpreter runs, each round of a loop again, in each stage, and the tokens of the rows."""
    found = Counter[str]()

    def measure(name: str, stage: Callable[[], Any]) -> Any:
        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if not frame.f_code.co_filename.startswith(str(ROOT / "vlmrl")):
                return None
            found[name] += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return stage()
        finally:
            sys.settrace(before)

    return found, growth.run_stages(sizes, qwen_vl(), measure)


SMALL = {
    "rows": ({"groups": 4, "members": 4, "turns": 2, "tokens": 2, "prompt": 4, "budget": 64}, "groups"),
    "rows that fill a micro-batch": (
        {"groups": 4, "members": 4, "turns": 2, "tokens": 12, "prompt": 4, "images": 0, "budget": 60},
        "groups",
    ),
    "turns": ({"groups": 1, "members": 3, "turns": 6, "tokens": 2}, "turns"),
    "turns, step-wise": ({"groups": 1, "members": 2, "turns": 4, "tokens": 2, "samples": "step_wise"}, "turns"),
    "tokens a turn": ({"groups": 2, "members": 2, "turns": 2, "tokens": 20}, "tokens"),
    "members of a group": ({"groups": 1, "members": 8, "turns": 2, "tokens": 2, "prompt": 8}, "members"),
    "images": ({"groups": 1, "members": 2, "turns": 24, "tokens": 2, "images": 6}, "images"),
}


@pytest.mark.parametrize("series", SMALL)
def test_no_stage_grows_faster_than_its_work(growth, series):
    options, field = SMALL[series]
    sizes = growth.Sizes(**options)
    small, tokens = operations(growth, sizes)
    large, more = operations(growth, replace(sizes, **{field: 4 * getattr(sizes, field)}))
    work = more / tokens if sizes.samples == "step_wise" else 4
    found = growth.exponents(small, large, work)
    assert len(found) == 10 and max(found.values()) <= growth.LIMIT, found
