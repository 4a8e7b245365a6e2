"""Lockstep batching: batches depend on the tasks alone, so that a run can be repeated exactly."""

from __future__ import annotations

import asyncio

from vlmrl.engine.base import BatchEngine, Request
from vlmrl.types import Completion


class LockstepBatching:
    """An engine that waits for one request of every running trajectory, then samples them as one batch in task order.

    The runner calls :meth:`join` before trajectories start, and :meth:`drop` as each one ends.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine
        self._running_trajectories = 0
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._batches: set[asyncio.Task[None]] = set()

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    def join(self, count: int) -> None:
        """``count`` trajectories start."""
        self._running_trajectories += count

    def drop(self) -> None:
        """One trajectory has ended."""
        self._running_trajectories -= 1
        self._start_if_complete()

    async def generate(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start_if_complete()
        try:
            return await future
        except asyncio.CancelledError:  # no response is sampled for a cancelled request
            self._waiting = [pair for pair in self._waiting if pair[1] is not future]
            raise

    def release(self, trajectory_id: str) -> None:
        self.engine.release(trajectory_id)

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    def close(self) -> None:
        self.engine.close()

    def _start_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._running_trajectories:
            batch, self._waiting = sorted(self._waiting, key=lambda pair: pair[0].trajectory_id), []
            task = asyncio.create_task(self._sample(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _sample(self, batch: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        try:
            results = await self.engine.generate_batch([request for request, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
