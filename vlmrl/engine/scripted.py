"""An engine whose responses come from a function: for warm starts, for `vlmrl play --by-hand`, and for tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from vlmrl.engine.base import Request
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Completion


class ScriptedEngine:
    """Calls ``response(request, turn)`` for the text of each response, and returns it as tokens with logprob 0, end-of-turn
    id included.

    A response that ends with the text of a stop token, such as GLM's ``<|observation|>`` after a call, gets no other.
    ``response`` may be ``async``. It may return a Completion instead of text, to test a special ending.
    """

    def __init__(
        self,
        response: Callable[[Request, int], str | Completion | Awaitable[str | Completion]],
        renderer: Renderer,
        *,
        end_turns: bool = True,
    ) -> None:
        self.policy_version = 0
        self._response = response
        self._renderer = renderer
        self._end_turns = end_turns
        self._turns: Counter[str] = Counter()

    async def generate(self, request: Request) -> Completion:
        turn = self._turns[request.trajectory_id]
        self._turns[request.trajectory_id] += 1
        response = self._response(request, turn)
        if asyncio.iscoroutine(response):
            response = await response
        if isinstance(response, Completion):
            return response
        assert isinstance(response, str)
        ids = self._renderer.tokenizer.encode(response, add_special_tokens=False)
        if self._end_turns and not self._renderer.stop_ids.intersection(ids[-1:]):
            ids = [*ids, self._renderer.end_of_turn_id]
        prompt = expand(request.prompt_ids, self._renderer.image_token_id, request.media)
        if len(ids) > request.sampling.max_tokens:
            ids = ids[: request.sampling.max_tokens]
            return Completion(ids, [0.0] * len(ids), "length", [0] * len(ids), len(prompt))
        return Completion(ids, [0.0] * len(ids), "stop", [0] * len(ids), len(prompt))

    async def generate_batch(self, requests: list[Request]) -> list[Completion]:
        return [await self.generate(request) for request in requests]

    def release(self, trajectory_id: str) -> None:
        self._turns.pop(trajectory_id, None)

    async def pause(self) -> None:
        """Nothing to do: there are no weights."""

    async def resume(self) -> None:
        pass

    def close(self) -> None:
        pass
