"""Calls of many actors at once, with time limits and error handling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from vlmrl.cluster import ClusterError

PLACEMENT_SECONDS = 300.0  # until there is room for all processes
LOAD_SECONDS = 1800.0  # until each process has its model
TRAINER_SECONDS = 4 * 3600.0  # for a trainer's method; a rank that waits for another in vain gives up much earlier
WEIGHTS_SECONDS = 900.0  # to gather and send weights, or to move them between GPU and host
SERVER_SECONDS = 60.0  # for the actor that runs a server's process
AFTER_ERROR_SECONDS = 2.0  # after a first error, to receive the error that caused it

Ref = Any  # a reference to an object in Ray's store
Actor = Any  # the handle of an actor


def results(calls: Sequence[Ref], seconds: float, what: str) -> list[Any]:
    """The results of all calls. ``what`` names the call in errors.

    After a first error the other calls get only a moment, since they may wait for the process that failed. Raises ClusterError if a
    process died or did not answer within ``seconds``, otherwise the first call's error.
    """
    results: dict[Ref, Any] = {}
    errors: list[RayError] = []
    pending, end = list(calls), time.monotonic() + seconds
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not done:
            break
        try:
            results[done[0]] = ray.get(done[0])
        except RayError as error:
            errors.append(error)
            end = time.monotonic() + AFTER_ERROR_SECONDS
    died = next((error for error in errors if isinstance(error, ActorDiedError)), None)
    if died is not None:
        raise ClusterError(f"a process died during the call `{what}`: {died}") from died
    if errors:
        raise errors[0]
    if pending:
        raise ClusterError(f"{len(pending)} of {len(calls)} processes did not return from `{what}` in {seconds:g} s.")
    return [results[call] for call in calls]
