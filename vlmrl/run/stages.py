"""The stages that training steps, the warm start and a resume have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from vlmrl.engine.base import Engine, EngineError
from vlmrl.run.build import Run
from vlmrl.run.evaluate import Evaluator
from vlmrl.run.stopping import RunStopped, StopRequest
from vlmrl.samples import AuditReport, audit, emit
from vlmrl.train.controller import RunTrainer
from vlmrl.types import Sample, Trajectory


def audited_samples(run: Run, trajectories: Sequence[Trajectory]) -> tuple[list[Sample], AuditReport]:
    """The samples of these trajectories, and the audit's report. Raises AuditError if they are inconsistent."""
    samples = [sample for trajectory in trajectories for sample in emit(trajectory, run.config.rollout.samples)]
    policy = run.model.policy
    image_token_id, banned_ids, routing = policy.image_token_id, policy.banned_ids, policy.routing
    return samples, audit(samples, trajectories, image_token_id=image_token_id, banned_ids=banned_ids, routing=routing)


async def push_weights(run: Run, trainer: RunTrainer, policy_version: int) -> dict[str, float]:
    """Push the trainer's weights to the paused engine, unless both share them. Returns metrics of the weight update."""
    if run.copied is not None:
        run.copied.load_weights(trainer.named_weights())
    metrics = {} if run.serving is None else await run.serving.push(policy_version)
    run.engine.weights_changed(policy_version)
    return metrics


async def push_to_finish(
    run: Run, trainer: RunTrainer, step: int, evaluator: Evaluator, stop: StopRequest
) -> dict[str, float]:
    """Push the weights to the paused engine. Returns metrics; none if a stop ended it: no response is sampled any more.

    What a server refused was trained: the step is finished, and the loop raises why.
    """
    try:
        return await stop.finish(push_weights(run, trainer, step))
    except RunStopped:
        return {}
    except EngineError as error:
        if stop.number is None:  # or the signal may have ended the server, and the loop raises RunStopped
            evaluator.failure = evaluator.failure or error
        return {}


@asynccontextmanager
async def paused_for_update(engine: Engine, stop: StopRequest) -> AsyncIterator[None]:
    """As :func:`~vlmrl.engine.base.paused`. After a stop no server is waited for that hangs."""
    try:
        await stop.finish(engine.pause())
        yield
    finally:
        with suppress(RunStopped):
            await stop.finish(engine.resume())
