"""What a run saves when it is stopped or fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vlmrl.report.progress import RunProgress
from vlmrl.run.build import Run
from vlmrl.run.checkpointing import LoopState, save_after_failure, save_stopped
from vlmrl.run.recorder import Recorder
from vlmrl.run.stopping import RunStopped
from vlmrl.train.controller import RunTrainer
from vlmrl.utils.open_files import reserved_files


@asynccontextmanager
async def saved_at_the_end(
    run: Run, trainer: RunTrainer, state: LoopState, recorder: Recorder, progress: RunProgress
) -> AsyncIterator[None]:
    """If the block is stopped or fails, save what was trained and write the report."""
    with reserved_files() as reserve:
        try:
            yield
        except BaseException as error:
            reserve.close()
            try:
                if not isinstance(error, RunStopped):
                    await save_after_failure(run, trainer, state, progress, error)
                elif trainer.is_started:
                    await save_stopped(run, trainer, state, progress)
            finally:  # last: SIGTERM leaves few seconds, and the page of a long run takes more
                await recorder.finish()
            raise
