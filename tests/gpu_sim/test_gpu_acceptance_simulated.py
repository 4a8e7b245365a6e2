"""Checks of `benchmarks/gpu_acceptance.py` on a simulated GPU, which computes nothing: they run to their comparisons, and fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import torch
from acceptance import colocated, kernels, versions
from acceptance.report import Report
report = Report(Path(sys.argv[1]), tiny=True)
report.check("GPU", lambda: versions.gpu(report))
report.check("head", lambda: kernels.head(report, torch.bfloat16))
report.check("patches", lambda: kernels.patches(report))
report.check("optimizer", lambda: kernels.optimizer(report))
report.check("transfer", lambda: colocated.transfer(report))
"""


@pytest.mark.slow
def test_a_gpu_that_computes_nothing_fails_every_comparison(simulated_gpu, tmp_path):
    results = tmp_path / "results.jsonl"
    simulated_gpu.run(SCRIPT, results, contents=True, env={"TMPDIR": str(tmp_path)})
    rows = {row["title"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert rows["GPU"]["result"] == "pass" and "H100" in rows["GPU"]["numbers"]
    for title in ("head", "patches", "optimizer"):
        assert rows[title]["result"] == "FAIL" and rows[title]["numbers"].startswith("AssertionError"), rows[title]
        assert "(limit " in rows[title]["numbers"]
    assert rows["transfer"]["result"] == "pass" and "on cuda:0" in rows["transfer"]["numbers"], rows["transfer"]
