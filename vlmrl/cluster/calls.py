"""Calls of many actors at once: their time limits, and which error is reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from vlmrl.cluster import ClusterError

PLACING = 300.0  # seconds until there is room for all processes
LOADING = 1800.0  # until each has its model
STEPPING = 4 * 3600.0  # for a call of the trainer; a rank that waits in vain for another gives up much earlier
MOVING = 900.0  # for weights on their way
KEEPING = 60.0  # for a word from who keeps a server's process
LAST_WORDS = 2.0  # after a first error, for the one that caused it
BUCKET = 256 * 2**20  # bytes of weights that travel at once
CONTROL = 64  # calls of an engine beside those for replies

Ref = Any  # of an object in Ray's store
Actor = Any  # the handle of one


def results(calls: Sequence[Ref], seconds: float, what: str) -> list[Any]:
    """All results. After a first error the others are not waited for: they may themselves wait for the one that failed."""
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
            end = time.monotonic() + LAST_WORDS
    died = next((error for error in errors if isinstance(error, ActorDiedError)), None)
    if died is not None:
        raise ClusterError(f"a process died when it was to {what}: {died}") from died
    if errors:
        raise errors[0]
    if pending:
        raise ClusterError(f"{len(pending)} of {len(calls)} processes did not {what} in {seconds:g} s.")
    return [results[call] for call in calls]
