"""Everything that a machine with a GPU can show, in one command and without a network. It stops after ``--minutes``.

    make gpu-acceptance                                                  # or: python benchmarks/gpu_acceptance.py
    python benchmarks/gpu_acceptance.py --only kernels,mismatch --minutes 9
    python benchmarks/gpu_acceptance.py --tiny                           # tiny models, on the CPU if there is no GPU

Each check runs in a process of its own with a time limit, so that a crash or a hang costs only that check. The table
`gpu-acceptance.md` is rewritten after each result: pass, FAIL or not tried, with the numbers. The exit status is 1 if a check failed.
docs/gpu.md explains the checks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Check:
    """A module in `benchmarks/acceptance/` with a function ``run(report)``."""

    name: str
    title: str
    minutes: float
    """Time limit."""


CHECKS = (  # those that tell most for their time first
    Check("versions", "versions and device", 1),
    Check("mismatch", "logprob mismatch of rollout and trainer in bfloat16", 2),
    Check("geometry", "20 steps of a random 2B on geometry problems", 5),
    Check("kernels", "kernels against float64 on the CPU", 5),
    Check("trace", "profiler traces of a step, eager and compiled", 3),
    Check("colocated", "offload and weights by CUDA IPC", 2),
    Check("memory", "peak memory of a step against the plan", 2),
    Check("collectives", "NCCL between two GPUs", 2),
    Check("sglang", "SGLang: parity, weights by IPC with sleep and wake, LoRA, an asynchronous run", 15),
    Check("vllm", "vLLM: parity, weights by IPC with sleep and wake, LoRA, an asynchronous run", 12),
    Check("update", "benchmarks/gpu_update.py", 5),
    Check("families", "tiny models of each family against the CPU", 4),
    Check("quickstart", "recipes/quickstart.py", 7),
)
NAMES = [check.name for check in CHECKS]
TERMINATED = threading.Event()  # by SIGTERM


@dataclass
class Rows:
    """The results so far, and the table that shows them."""

    path: Path
    heading: str
    rows: list[dict[str, str | float]] = field(default_factory=list)

    def add(self, check: Check, title: str, result: str, numbers: str, seconds: float) -> None:
        """``result`` is pass, FAIL or not tried."""
        row = {"check": check.name, "title": title, "result": result, "numbers": numbers, "seconds": seconds}
        self.rows.append(row)
        self.write()
        print(f"{result:<10} {check.name}: {title}: {numbers}", flush=True)

    def count(self, result: str) -> int:
        return sum(row["result"] == result for row in self.rows)

    def write(self) -> None:
        counts = ", ".join(f"{self.count(result)} {result}" for result in ("pass", "FAIL", "not tried"))
        lines = ["# GPU acceptance", "", self.heading, "", counts, ""]
        lines += ["| check | what | result | numbers | seconds |", "| --- | --- | --- | --- | --- |"]
        for row in self.rows:
            cells = (row["check"], row["title"], row["result"], row["numbers"], f"{row['seconds']:.1f}")
            lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text("\n".join(lines) + "\n")
        os.replace(unfinished, self.path)


def run_check(check: Check, options: argparse.Namespace, rows: Rows, seconds: float, scratch: str) -> None:
    """Run one check in a process of its own, and add its results to the table as they come."""
    folder = options.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    results, log = folder / f"{check.name}.jsonl", folder / f"{check.name}.log"
    results.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--run", check.name, "--results", str(results)]
    began, seen = time.monotonic(), 0
    with log.open("w") as output:
        process = subprocess.Popen(
            command + ["--tiny"] * options.tiny,
            cwd=ROOT,
            env=environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (left := seconds - (time.monotonic() - began)) > 0:
                if TERMINATED.is_set():
                    sys.exit(143)
                try:
                    process.wait(timeout=min(1.0, left))
                    break
                except subprocess.TimeoutExpired:
                    seen = copy_results(check, results, rows, seen)
        finally:
            end_group(process)
    seen = copy_results(check, results, rows, seen)
    spent = time.monotonic() - began
    if process.returncode == -signal.SIGKILL and spent >= seconds:
        rows.add(check, "the rest", "FAIL", f"stopped at its time limit of {seconds:.0f} s; see {log}", spent)
    elif process.returncode:
        numbers = f"exit status {process.returncode}: {last_line(log)}; see {log}"
        rows.add(check, "the rest", "FAIL", numbers, spent)
    elif not seen:
        rows.add(check, check.title, "FAIL", f"it wrote no result; see {log}", spent)


def run_here(options: argparse.Namespace) -> None:
    """Run one check in this process. Without vlmrl's dependencies it is not tried."""
    from acceptance.report import Report, need_dependencies

    report = Report(options.results, options.tiny)
    try:
        module = importlib.import_module(f"acceptance.{options.run}")
    except ModuleNotFoundError:
        report.check("all of it", need_dependencies)
        if not report.not_tried:
            raise
    else:
        module.run(report)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the check's processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy_results(check: Check, results: Path, rows: Rows, seen: int) -> int:
    """Add the results that are new since ``seen`` lines. Returns the number of lines that are complete."""
    lines = results.read_text().rpartition("\n")[0].splitlines() if results.exists() else []
    for line in lines[seen:]:
        row = json.loads(line)
        rows.add(check, row["title"], row["result"], row["numbers"], row["seconds"])
    return len(lines)


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def environment(scratch: str) -> dict[str, str]:
    """The environment of the checks: offline, with this checkout's vlmrl; temporary files and compiled kernels go to ``scratch``."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
    return os.environ | offline | caches | {"TMPDIR": scratch, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def heading(options: argparse.Namespace) -> str:
    words = " ".join(sys.argv[1:])
    models = "tiny models" if options.tiny else "random weights of the true 2B shape, and tiny models"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"`python benchmarks/gpu_acceptance.py{' ' * bool(words)}{words}`, {at}, Python {platform.python_version()}; {models}."


def names(text: str) -> list[str]:
    given = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in given if name not in NAMES]
    if unknown or not given:
        raise argparse.ArgumentTypeError(f"must be some of {','.join(NAMES)}, but it is {text!r}.")
    return given


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=NAMES, metavar="A,B", help=f"checks to run, of {','.join(NAMES)}")
    parser.add_argument("--minutes", type=float, default=65.0, help="time limit of all checks together (default 65)")
    parser.add_argument("--out", type=Path, default=Path("gpu-acceptance.md"), help="the table; logs go to its folder")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps; without a GPU on the CPU")
    parser.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)  # one check, in this process
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.run:
        run_here(options)
        return 0
    # A flag: an exception of the handler may leave the lock of Popen.wait() held, and the next wait hangs (seen once).
    signal.signal(signal.SIGTERM, lambda *_: TERMINATED.set())
    options.out = options.out.absolute()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows, began = Rows(options.out, heading(options)), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-", ignore_cleanup_errors=True) as scratch:
        for check in CHECKS:
            left = 60 * options.minutes - (time.monotonic() - began)
            if check.name not in options.only:
                rows.add(check, check.title, "not tried", "left out by --only", 0.0)
            elif left < 10:
                rows.add(check, check.title, "not tried", f"--minutes {options.minutes:g} were used up", 0.0)
            else:
                run_check(check, options, rows, min(left, 60 * check.minutes), scratch)
    print(
        f"\n{rows.count('pass')} passed, {rows.count('FAIL')} failed, {rows.count('not tried')} not tried: {options.out}"
    )
    return 1 if rows.count("FAIL") else 0


if __name__ == "__main__":
    raise SystemExit(main())
