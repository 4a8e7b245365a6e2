"""The resume drill: a deterministic run is ended at random moments by SIGTERM and SIGKILL, and continued each time. It must log the
numbers of a run that was never ended. `make drill` runs all of it, `tests/run/test_drill.py` a small part.

    python tests/testing/drill.py --terms 5 --kills 20
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from testing.runs import RECIPES, repeatable
from vlmrl.report.run_log import read_rows

STAGES = ("rollouts", "checkpoint", "evaluation", "anything")
SMALL = {
    "train.groups-per-batch": "2",
    "rollout.group-size": "2",
    "data.size": "64",
    "warm-start.steps": "3",
    "warm-start.trajectories-per-step": "8",
    "eval.data.size": "4",
    "eval.every": "1",
    "checkpoint.every": "1",
    "checkpoint.keep": "1",
    "algo.kl-coef": "0.01",
}
# As on a processor without AVX-512, and without what conftest.py sets: a deterministic run sets it for itself.
AVX2 = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETTINGS: dict[str, dict[str, str]] = {
    "concat": {"rollout.samples": "concat"},
    "step-wise": {"rollout.samples": "step_wise"},
    "LoRA": {"model.lora.rank": "4", "optim.lr": "1e-3"},
    "two ranks": {},
}


@dataclass
class DrilledRun:
    """A run of the quickstart in ``folder`` with the settings of one of :data:`SETTINGS`, for ``steps`` steps."""

    folder: Path
    name: str
    steps: int

    @property
    def home(self) -> Path:
        return self.folder / "quickstart"

    @property
    def ranks(self) -> int:
        return 2 if self.name == "two ranks" else 1

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        settings = SMALL | SETTINGS[self.name] | {"train.steps": str(self.steps), "output-dir": str(self.folder)}
        options = [f"--{key}={value}" for key, value in settings.items()]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if self.ranks == 2 else []
        words = [sys.executable, *torchrun, str(RECIPES / "quickstart.py"), "--deterministic", "--eval.no-blank-images"]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [*words, *options, *more], stdout=output, stderr=output, start_new_session=True, env=AVX2
            )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(1800) == 0, f"{self.name}: status {process.returncode}\n{self.output()}"

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        return [repeatable(row) for row in read_rows(self.home / "metrics.jsonl")]

    def results(self) -> dict[str, Any]:
        """Everything that must be equal: metrics, the summary, what was played, and the weights."""
        played = read_rows(self.home / "trajectories.jsonl")
        return {
            "metrics": self.rows(),
            "summary": json.loads((self.home / "summary.json").read_text()),
            "played": [
                (row["step"], row["id"], row["reward"], [turn["text"] for turn in row["turns"]]) for row in played
            ],
            "weights": hashlib.sha256((self.home / "model/model.safetensors").read_bytes()).hexdigest(),
        }

    def pace(self) -> float:
        """The seconds of the last step that it logged: 0 before the first."""
        steps = [row for row in read_rows(self.home / "metrics.jsonl") if "groups/trained" in row]
        return sum(steps[-1][f"time/{part}"] for part in ("rollout", "train")) if steps else 0.0

    def stage(self) -> tuple[int, str]:
        """The last step in the log and what the run does after it, by the files in its folder."""
        rows = self.rows()
        step = max((row["step"] for row in rows if "groups/trained" in row), default=0)
        if any((self.home / "checkpoints").glob(".step*")):
            return step, "checkpoint"
        evaluated = any(row["step"] == step and "eval/reward/mean" in row for row in rows)
        return step, "rollouts" if evaluated else "evaluation"


def interrupt(run: DrilledRun, resumed: bool, number: int, stage: str, luck: random.Random) -> str:
    """Start or continue a run, and send it the signal ``number`` in ``stage`` at a random moment. Returns what it hit.

    A run that is over before that is not hit: this process may have stood still.

    The rollouts' stage ends with the update, which leaves no trace in the files: both are hit.
    """
    if not resumed:
        shutil.rmtree(run.home, ignore_errors=True)  # else the stage of the run before it is seen
    first, _ = run.stage() if resumed else (0, "")
    process = run.start(*["--resume"] * resumed)
    while process.poll() is None:
        step, seen = run.stage()
        if stage == "anything" and ("resumed " in run.output() or step > first):
            break
        if step > first and seen == stage:
            break
        time.sleep(0.005)
    time.sleep({"checkpoint": 0.01, "anything": 3.0}.get(stage, min(0.5, run.pace())) * luck.random())
    step, seen = run.stage()
    if process.poll() is None:
        send(process, number)
    status = process.wait(600)
    if number == signal.SIGTERM and status:
        saved = max((run.home / "checkpoints").glob("step*"), default=None)
        assert saved is not None, f"{run.name}: no checkpoint after SIGTERM\n{run.output()}"
        assert int(saved.name[4:]) == run.stage()[0], f"{run.name}: {saved} is not the last step\n{run.output()}"
        assert run.ranks > 1 or status == 143, f"{run.name}: status {status}\n{run.output()}"
        assert "To continue:" in run.output(), run.output()
    return f"{seen} after step {step}" if status else "nothing: the run was over"


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """SIGTERM goes to the process that was started, which passes it on; SIGKILL to all that it started, at once."""
    family = [process.pid]
    if number == signal.SIGKILL:
        for pid in family:
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            with suppress(OSError):
                family += [int(child) for file in tasks for child in file.read_text().split()]
    for pid in reversed(family):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def drill(name: str, folder: Path, interruptions: Sequence[tuple[int, str]], luck: random.Random) -> None:
    """Interrupt a run again and again, and compare it with one that was not. Raises AssertionError for any difference."""
    steps = len(interruptions) + 2
    whole, ended = DrilledRun(folder / "whole", name, steps), DrilledRun(folder / "ended", name, steps)
    reference = whole.start()
    for index, (number, stage) in enumerate(interruptions):
        resumed = any((ended.home / "checkpoints").glob("step*"))
        hit = interrupt(ended, resumed, number, stage, luck)
        print(f"{name}: {index + 1}. {signal.Signals(number).name} in {hit}", flush=True)
    ended.finish(ended.start("--resume"))
    whole.finish(reference)
    continued = "resumed   from" in ended.output() or "nothing is left to train" in ended.output()
    assert continued and len([*(ended.home / "checkpoints").iterdir()]) == 1, ended.output()
    expected, found = whole.results(), ended.results()
    for part, value in expected.items():
        assert found[part] == value, f"{name}: {part} differ, see {folder}"
    print(f"{name}: {len(interruptions)} interruptions, {steps} steps: all numbers are equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", type=int, default=5, help="SIGTERMs for each setting")
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs for each setting")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.settings:
        luck = random.Random(f"{options.seed} {name}")
        numbers = [signal.SIGTERM] * options.terms + [signal.SIGKILL] * options.kills
        interruptions = [(int(number), STAGES[place % len(STAGES)]) for place, number in enumerate(numbers)]
        luck.shuffle(interruptions)
        with tempfile.TemporaryDirectory(prefix="vlmrl-drill-") as folder:
            drill(name, Path(folder), interruptions, luck)


if __name__ == "__main__":
    main()
