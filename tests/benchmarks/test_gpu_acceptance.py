"""`benchmarks/gpu_acceptance.py`: all checks on a tiny model, and what it does about a check that crashes, hangs or is interrupted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmrl.config import ServerSettings

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu_acceptance.py"

# Stands for the checks: what each does is in its name.
CHECKS = """
import json, os, pathlib, sys, time
name, results = sys.argv[2], pathlib.Path(sys.argv[4])
def write(**row):
    with results.open("a") as file:
        file.write(json.dumps({"title": "first", "result": "pass", "numbers": "1 | 2", "seconds": 0.5} | row) + chr(10))
if name != "silent":
    write()
if name == "fails":
    write(title="second", result="FAIL", numbers="0.2 (limit 0.1)")
if name == "crashes":
    print("Segmentation fault"); sys.stdout.flush(); os.abort()
if name == "hangs":
    time.sleep(600)
"""


@pytest.fixture
def acceptance(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_acceptance", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_acceptance", module)
    spec.loader.exec_module(module)
    return module


def rows_of(table: Path) -> list[list[str]]:
    """The cells of the table's rows: check, what, result, numbers, seconds."""
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.fixture
def standing_in(acceptance, monkeypatch, tmp_path):
    """Runs the script with stand-ins for its checks, and returns the exit status and the table's rows."""
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)
    monkeypatch.setattr(acceptance, "__file__", str(script))

    def run(*checks: tuple[str, float], minutes: float = 10) -> tuple[int, list[list[str]]]:
        monkeypatch.setattr(acceptance, "CHECKS", tuple(acceptance.Check(name, name, limit) for name, limit in checks))
        monkeypatch.setattr(acceptance, "NAMES", [name for name, _ in checks])
        table = tmp_path / "table.md"
        return acceptance.main(["--out", str(table), "--minutes", str(minutes)]), rows_of(table)

    return run


@pytest.mark.slow
def test_a_crash_costs_only_its_own_check(standing_in):
    status, rows = standing_in(("fine", 1), ("crashes", 1), ("silent", 1), ("fails", 1), ("last", 1))
    assert status == 1
    assert [(check, title, result) for check, title, result, *_ in rows] == [
        ("fine", "first", "pass"),
        ("crashes", "first", "pass"),
        ("crashes", "the rest", "FAIL"),
        ("silent", "silent", "FAIL"),
        ("fails", "first", "pass"),
        ("fails", "second", "FAIL"),
        ("last", "first", "pass"),
    ]
    assert rows[0][3] == "1 / 2"  # a bar would end the cell
    assert "exit status -6: Segmentation fault" in rows[2][3] and rows[5][3] == "0.2 (limit 0.1)"


@pytest.mark.slow
def test_a_hanging_check_is_stopped_at_its_limit_and_keeps_its_results(standing_in, acceptance, monkeypatch, tmp_path):
    def monotonic() -> float:
        """Two minutes pass when the check has its result."""
        results = tmp_path / "table/hangs.jsonl"
        return time.monotonic() + 120 * (results.exists() and results.read_text().endswith("\n"))

    monkeypatch.setattr(acceptance, "time", SimpleNamespace(**vars(time) | {"monotonic": monotonic}))
    status, rows = standing_in(("hangs", 1), ("last", 5))
    assert status == 1
    assert [(check, result) for check, _, result, *_ in rows] == [
        ("hangs", "pass"),
        ("hangs", "FAIL"),
        ("last", "pass"),
    ]
    assert "stopped at its time limit of 60 s" in rows[1][3]


@pytest.mark.slow
def test_all_checks_that_pass_exit_with_0(standing_in):
    assert standing_in(("fine", 1))[0] == 0


@pytest.mark.slow
def test_checks_for_which_no_time_is_left_are_not_tried(standing_in):
    status, rows = standing_in(("fine", 1), minutes=0.1)
    assert status == 0
    assert rows == [["fine", "fine", "not tried", "--minutes 0.1 were used up", "0.0"]]


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_table_and_no_process(tmp_path):
    """Ended while a check runs: what it had written is in the table, and the check's process ends with the run."""
    table, marker = tmp_path / "table.md", tmp_path / "marker"
    fake = tmp_path / "checks.py"
    fake.write_text(
        CHECKS.replace("time.sleep(600)", f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    )
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_acceptance as module\n"
        f"module.__file__ = {str(fake)!r}; module.CHECKS = (module.Check('hangs', 'hangs', 5),); module.NAMES = ['hangs']\n"
        f"module.main(['--out', {str(table)!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "pass" in process.stdout.readline()  # printed once the table has the row
    deadline = time.monotonic() + 600
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=600)
    assert process.returncode == 143
    assert [row[:3] for row in rows_of(table)] == [["hangs", "first", "pass"]]
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_check_that_does_not_exist_is_refused(acceptance, capsys):
    with pytest.raises(SystemExit):
        acceptance.main(["--only", "kernels,quick"])
    assert "must be some of versions," in capsys.readouterr().err


ALL_HERE = """
import sys
import gpu_acceptance
for name in gpu_acceptance.NAMES:
    gpu_acceptance.main(["--run", name, "--tiny", "--results", f"{sys.argv[1]}/{name}.jsonl"])
"""


@pytest.mark.slow
@pytest.mark.long
def test_all_checks_run_on_a_tiny_model(acceptance, tmp_path):
    """On the CPU, or on the GPU where there is one; in one process, where a run of the script starts one for each check."""
    environment = acceptance.environment(str(tmp_path))
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), environment["PYTHONPATH"]])
    command = [sys.executable, "-c", ALL_HERE, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=acceptance.ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for name in acceptance.NAMES:
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert rows and all(row["numbers"] and row["result"] != "FAIL" for row in rows), rows
        found[name] = {row["result"] for row in rows}
    # They need a GPU.
    assert {name for name, results in found.items() if "pass" not in results} <= {
        "memory",
        "sglang",
        "vllm",
    }


WITHOUT = """
import importlib.metadata, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "jsonschema":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
def version(name, real=importlib.metadata.version):
    if name == "jsonschema":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
sys.meta_path.insert(0, Missing())
importlib.metadata.version = version
"""


@pytest.mark.slow
def test_checks_are_not_tried_without_a_dependency(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    table = tmp_path / "table.md"
    command = [sys.executable, str(SCRIPT), "--tiny", "--only", "versions,mismatch", "--out", str(table)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=600)
    assert done.returncode == 0
    rows = {(check, title): (result, numbers) for check, title, result, numbers, _ in rows_of(table)}
    assert rows["versions", "software"][0] == "pass"
    assert rows["mismatch", "all of it"] == ("not tried", "not installed: jsonschema")


def test_the_limits_of_all_checks_fit_the_default_and_a_server_may_take_its_time_to_start(acceptance):
    limits = {check.name: check.minutes for check in acceptance.CHECKS}
    assert sum(limits.values()) <= acceptance.parse([]).minutes
    assert 60 * limits["sglang"] > ServerSettings().start_timeout
    first = list(limits)[: len(limits) // 2]
    assert {"mismatch", "geometry", "trace"} <= set(first)
