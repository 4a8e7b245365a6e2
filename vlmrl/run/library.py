"""Training from Python, in a script or a notebook: ``result = vlmrl.train(config)``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.config import Config, resolve_config
from vlmrl.model.loading import LoadedModel
from vlmrl.report.run_data import Record, RunData, load_run
from vlmrl.run.program import run_training
from vlmrl.run.stopping import StopRequest
from vlmrl.utils.threads import DaemonPool

Callback = Callable[[Mapping[str, Any]], object]
"""Gets a row of ``metrics.jsonl``. Returning ``True`` ends the training after this step, as after the last one."""


@dataclass(frozen=True)
class TrainResult:
    """What a training left: ``result.metrics[-1]["reward/mean"]``, ``result.trajectories()``, ``result.model``."""

    run: RunData
    """All that the run wrote; see :func:`vlmrl.load_run`."""
    model: LoadedModel | None
    """The trained model with its tokenizer and image processor. ``None`` with servers: it is in ``folder / "model"``."""
    interrupted: bool
    """Whether an interrupt ended it: then ``model`` is that of the last finished step."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder

    @property
    def metrics(self) -> list[Record]:
        """The rows of ``metrics.jsonl``: one for each training step and each evaluation."""
        return self.run.metrics

    @property
    def summary(self) -> Record:
        """The held-out rewards: ``reward_before``, ``reward_after`` and their standard errors."""
        return self.run.summary

    def trajectories(self, step: int | None = None) -> list[Record]:
        """The records of one step's trajectories; by default of the last step that has any."""
        return self.run.trajectories(self.run.steps[-1] if step is None else step)


def train_config(
    config: Config,
    *,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    resume: bool = False,
) -> TrainResult:
    """Train with ``config``, also where an event loop runs already, such as in Jupyter. The command line is not read.

    ``on_step`` gets the metrics of each step of reinforcement learning, ``on_evaluation`` those of each evaluation; one that returns
    ``True`` ends the training early. They are called in the thread that trains. An interrupt (Ctrl-C, or the stop button) saves the
    weights of the last finished step and returns; a second one is raised.

    Args:
        config: the settings. Relative paths are looked up in the working directory.
        on_step: ``on_step({"step": 3, "reward/mean": 0.4, ...})``.
        on_evaluation: ``on_evaluation({"step": 0, "eval/reward/mean": 0.2, ...})``.
        resume: continue from the newest checkpoint of the run of this name.

    Raises:
        ValueError: a setting is wrong, or names what does not exist.
        RolloutError, EngineError: too many episodes failed, or the engine did.
    """
    stop = StopRequest()

    def on_row(row: Mapping[str, Any]) -> None:
        is_evaluation = any(key.startswith(("eval/", "blanked/")) for key in row)
        is_supervised = any(key.startswith("sft/") for key in row)
        callback = on_evaluation if is_evaluation else None if is_supervised else on_step
        if callback is not None and callback(row) is True:
            stop.early = True

    thread = DaemonPool("train")
    resolved = resolve_config(config)
    training = thread.submit(lambda: run_training(resolved, resume=resume, stop=stop, on_row=on_row))
    try:
        while True:
            try:
                run = training.result()
                break
            except KeyboardInterrupt:
                if stop.number is not None:
                    raise
                print("stopping: the last finished step is saved first; interrupt again to stop waiting", flush=True)
                stop.request(signal.SIGINT)
    finally:
        thread.close()
    has_model = run is not None and not run.model.is_on_meta
    return TrainResult(
        load_run(resolved.folder), run.model if run is not None and has_model else None, stop.number is not None
    )
