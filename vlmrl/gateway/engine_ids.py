"""The engine's ids of an episode's branches. An engine keeps the KV cache of one context per id."""

from __future__ import annotations

from vlmrl.engine.base import Engine
from vlmrl.types import Turn

MOST_KEPT = 8  # contexts of one trajectory that an engine keeps between requests


class EngineIds:
    """Ids of one trajectory: ``g/00`` of its first branch, ``g/00~1`` of the next. A branch that goes on keeps its id."""

    def __init__(self, trajectory_id: str, engine: Engine) -> None:
        self._trajectory_id = trajectory_id
        self._engine = engine
        self._idle: dict[str, Turn] = {}  # by id: the turn whose context the engine keeps; the oldest first
        self._busy: set[str] = set()
        self._issued = 0

    def take(self, above: Turn | None) -> str:
        """The id of the turn ``above``, whose response is continued. A new one for ``None``, or if ``above`` was continued
        before."""
        engine_id = next((name for name, turn in self._idle.items() if turn is above), None)
        if engine_id is not None:
            del self._idle[engine_id]
        else:
            engine_id = f"{self._trajectory_id}~{self._issued}" if self._issued else self._trajectory_id
            self._issued += 1
        self._busy.add(engine_id)
        return engine_id

    def give_back(self, engine_id: str, turn: Turn | None = None) -> None:
        """The engine has answered with ``turn``, or failed. Releases the id that was idle for longest if too many are."""
        self._busy.discard(engine_id)
        if turn is None:
            self._engine.release(engine_id)
            return
        self._idle[engine_id] = turn
        if len(self._idle) > MOST_KEPT:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._engine.release(oldest)

    def release(self) -> None:
        """The episode has ended."""
        for engine_id in (*self._idle, *self._busy):
            self._engine.release(engine_id)
        self._idle.clear()
        self._busy.clear()
