"""Runs the seeds and controls of a recipe one after another, each in its own process. Finished ones are not run again."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vlmrl.config import Config
from vlmrl.config.code import code_files
from vlmrl.report.records import plain
from vlmrl.report.results import RunResult
from vlmrl.report.run_log import read_rows
from vlmrl.run.checkpointing import is_newer
from vlmrl.train.checkpoint import newest_checkpoint
from vlmrl.utils.json_files import read_object
from vlmrl.utils.terminal import signals_handled

Launch = Callable[[Sequence[str]], int]
"""Runs ``vlmrl`` with these arguments to its end and returns its exit status."""


class ExperimentError(RuntimeError):
    """A training run or an evaluation ended with an error, which it has printed."""


@dataclass(frozen=True)
class Experiment:
    """One training run and the evaluation of its model: the arguments of two ``vlmrl`` commands."""

    title: str
    control: bool
    """A run with ``train.shuffle_rewards``."""
    blanked: bool
    """Whether its model is evaluated with blanked images, too."""
    run: Path
    """The run's folder."""
    evaluation: Path
    """The JSON file with the results of ``evaluate``."""
    train: list[str]
    """Continues from the newest checkpoint, if there is one."""
    evaluate: list[str]

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done. A stopped run has a model and a summary, too, but no reward after training. The model is written
        last: one from before the newest checkpoint is of an earlier stop."""
        summary = read_object(self.run / "summary.json") or {}
        return "reward_after" in summary and is_newer(self.run, "model", newest_checkpoint(self.run / "checkpoints"))

    @property
    def is_evaluated(self) -> bool:
        """Whether there are results of each pass over the held-out tasks. An error, or an earlier command, may have left one out."""
        rows = (read_object(self.evaluation) or {}).get("results", [])
        return {False, self.blanked} <= {row["blanked"] for row in rows}

    def result(self) -> RunResult:
        evaluation = json.loads(self.evaluation.read_text(encoding="utf-8"))
        return RunResult(self.title, self.control, read_rows(self.run / "metrics.jsonl"), evaluation)


def plan_experiments(
    recipe: str, options: Sequence[str], config: Config, folder: Path, seeds: Sequence[int], controls: Sequence[str]
) -> list[Experiment]:
    """The seeds in order, then the control ``shuffled`` with the first of them. ``config``: the recipe with ``options``.

    With the control ``blanked``, the models of the seeds are evaluated with blanked images, too.
    """
    experiments = []
    runs = [(seed, False) for seed in seeds] + ([(seeds[0], True)] if "shuffled" in controls else [])
    for seed, control in runs:
        run = folder / f"{config.name}-{'shuffled' if control else 'seed'}{seed}"
        evaluation = run.with_name(f"{run.name}-evaluation.json")
        shared = [recipe, *options, "--output-dir", str(folder)]
        shuffle = ["--train.shuffle-rewards"] if control else []
        blanked = "blanked" in controls and not control
        blank = "--eval.blank-images" if blanked else "--eval.no-blank-images"
        experiments.append(
            Experiment(
                title=f"shuffled rewards, seed {seed}" if control else f"seed {seed}",
                control=control,
                blanked=blanked,
                run=run,
                evaluation=evaluation,
                train=["train", *shared, *shuffle, "--name", run.name, "--seed", str(seed), "--resume"],
                evaluate=["eval", *shared, blank, "--models", str(run), "--out", str(evaluation)],
            )
        )
    return experiments


def settings_digest(config: Config) -> str:
    """Eight letters that change with any setting but the run's name, folder and seed."""
    settings = plain(replace(config, name="run", output_dir="runs", seed=0))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def reproduce(experiments: Sequence[Experiment], launch: Launch, say: Callable[[str], None]) -> list[RunResult]:
    """Run what is not finished. Returns the results of all.

    Raises:
        ExperimentError: a command ended with an error, or code that is loaded has changed since the start: the commands, which load it
            again, would not be those of one recipe. Calling this again continues with it.
    """
    code = code_files()
    for number, experiment in enumerate(experiments, start=1):
        name = experiment.run.name
        for arguments in _unfinished(experiment):
            _check_unchanged(code, name)
            say(f"{name} ({number} of {len(experiments)}): vlmrl {' '.join(arguments)}")
            status = launch(arguments)
            if status in (130, 143):
                raise SystemExit(status)
            if status:
                raise ExperimentError(
                    f"{name}: its command ended with status {status}; see its message above. Finished runs are kept: repeat "
                    "the command to continue."
                )
    return [experiment.result() for experiment in experiments]


def _check_unchanged(code: Mapping[Path, bytes], name: str) -> None:
    now = code_files()
    if (edited := next((path for path in code if now.get(path) != code[path]), None)) is not None:
        raise ExperimentError(
            f"{name} is not continued: {edited} has changed since the start, so that this run and those before it would not be of "
            "the same code. Undo the change, or keep it and delete the finished runs that it concerns, and repeat the command."
        )


def _unfinished(experiment: Experiment) -> Iterator[list[str]]:
    if not experiment.is_trained:
        experiment.evaluation.unlink(missing_ok=True)  # of a run whose folder was deleted
        yield experiment.train
    if not experiment.is_evaluated:
        yield experiment.evaluate


def launch_process(arguments: Sequence[str]) -> int:
    """Run ``vlmrl`` in its own process. Ctrl-C and SIGTERM are passed on to it, so that it can save its state."""
    process = subprocess.Popen([sys.executable, "-m", "vlmrl", *arguments])
    # A terminal sends Ctrl-C to both processes, so that this one only waits.
    ignored = signals_handled([signal.SIGINT], signal.SIG_IGN)
    with ignored, signals_handled([signal.SIGTERM], lambda *_: process.terminate()):
        status = process.wait()
    return status if status >= 0 else 128 - status
