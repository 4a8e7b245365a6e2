"""Code that is for GPUs only is executed on simulated ones, line by line, as docs/gpu.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs.test_gpu import ROOT, functions_of, listed, marked_lines

SCRIPT = Path(__file__).with_name("cuda_paths.py")


@pytest.mark.slow
def test_the_lines_that_the_page_claims_are_executed(simulated_gpu, tmp_path):
    done = simulated_gpu.run(SCRIPT, tmp_path, devices=2, contents=True)
    executed = {tuple(each) for each in json.loads(done.stdout.partition("\nEXECUTED ")[2])}
    claimed = {key for key, run_by in listed().items() if f"`tests/gpu_sim/{Path(__file__).name}`" in run_by}
    assert len(claimed) > 15
    missed = []
    for file in {file for file, _ in claimed}:
        source = (ROOT / "vlmrl" / file).read_text()
        for line, name in zip(sorted(marked_lines(source)), functions_of(source), strict=True):
            if (file, name) in claimed and (file, line) not in executed:
                missed.append(f"{file}:{line}, in {name}: {source.splitlines()[line - 1].strip()}")
    assert not missed
