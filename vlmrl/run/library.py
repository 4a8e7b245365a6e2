"""Training from Python, in a script or a notebook: ``result = vlmrl.train(config)``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from vlmrl.config import Config, resolve_config
from vlmrl.config.code import forget_changed_files
from vlmrl.model.loading import LoadedModel
from vlmrl.report.run_data import RunData
from vlmrl.run.program import run_training
from vlmrl.run.run_folder import folder_with_inode, inode_of
from vlmrl.run.stopping import GRACE_SECONDS, StopRequest, stop_on_signals
from vlmrl.utils.terminal import signals_handled, stop_signals
from vlmrl.utils.threads import DaemonPool

SIGNAL_SECONDS = 0.5  # the kernel may give a signal to another thread, which does not end this one's wait
Callback = Callable[[Mapping[str, Any]], object]
"""Gets a row of ``metrics.jsonl``. Returning ``True`` ends the training after this step, as after the last one."""


class TrainResult(RunData):
    """What a training wrote and left: ``result.metrics[-1]["reward/mean"]``, ``result.trajectories(3)``, ``result.model``."""

    def __init__(self, folder: Path, model: LoadedModel | None, interrupted: bool) -> None:
        self._inode = inode_of(folder)
        super().__init__(folder)
        self.refresh()
        self.model = model
        """The trained model with its tokenizer and image processor. ``None`` with servers: it is in ``folder / "model"``."""
        self.interrupted = interrupted
        """Whether an interrupt ended it: then ``model`` is that of the last finished step."""

    @property
    def folder(self) -> Path:
        """The run's folder, also after a later run of its name has renamed it. Raises ValueError if only another run has the name."""
        found = folder_with_inode(self._folder, self._inode)
        if found is None and self._folder.exists():
            raise ValueError(
                f"{self._folder} is that of another run: the folder of this training was deleted or moved."
            )
        return found or self._folder


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
    weights of the last finished step and returns; a second one is raised. SIGTERM and SIGHUP, where the script has no handlers of its
    own, save it and exit with 143 or 129.

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
    forget_changed_files()
    resolved = resolve_config(config)
    training = thread.submit(lambda: run_training(resolved, resume=resume, stop=stop, on_row=on_row))
    try:
        with _raised_interrupts(), stop_on_signals(stop, GRACE_SECONDS, _ending_signals()):
            is_done = False
            while not is_done:
                try:
                    is_done = bool(wait([training], SIGNAL_SECONDS).done)
                except KeyboardInterrupt:
                    if stop.number is not None:
                        raise
                    stop.request(signal.SIGINT)
                    with suppress(OSError):
                        print(
                            "stopping: the last finished step is saved first; interrupt again to stop waiting",
                            flush=True,
                        )
    finally:
        thread.close()
    run = training.result()
    if stop.number not in (None, signal.SIGINT):
        raise SystemExit(128 + stop.number)
    model = None if run is None or run.model.is_on_meta else run.model
    return TrainResult(resolved.folder, model, stop.number is not None)


def _ending_signals() -> list[signal.Signals]:
    """SIGTERM and SIGHUP, as far as they would end the process."""
    others = (number for number in stop_signals() if number != signal.SIGINT)
    return [number for number in others if signal.getsignal(number) == signal.SIG_DFL]


def _raised_interrupts() -> AbstractContextManager[None]:
    """Let SIGINT raise KeyboardInterrupt in a coroutine, too: asyncio's and Jupyter's handlers only cancel its task."""
    cancels = _runs_event_loop() and signal.getsignal(signal.SIGINT) not in (None, signal.SIG_IGN)
    return signals_handled([signal.SIGINT] if cancels else [], signal.default_int_handler)


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
