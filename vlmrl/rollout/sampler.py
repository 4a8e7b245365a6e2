"""Makes the engine's requests of one episode within its budgets, for the turn loop, a user's generator and the gateway."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.config import Rollout
from vlmrl.engine.base import Engine, EngineError, Request, SamplingParams, generate_within
from vlmrl.multimodal.placeholders import collapse
from vlmrl.rollout.record import Prompt, TurnRecorder
from vlmrl.types import Completion, Ending, Turn


class EpisodeLimitError(ValueError):
    """A budget refuses a request: ``ending`` is ``max_turns`` or ``max_tokens``."""

    def __init__(self, ending: Ending, message: str) -> None:
        super().__init__(message)
        self.ending = ending


class AbortedError(EngineError):
    """The engine was stopped from outside before the response was complete. The trajectory ends as ``aborted``."""


@dataclass(frozen=True)
class Sampled:
    """A response, and the seconds that it took."""

    completion: Completion
    seconds: float


class Sampler:
    """Samples the responses of the episode that ``recorder`` records.

    ``refused`` is the budget that refused a request last, if one did.
    """

    def __init__(self, recorder: TurnRecorder, engine: Engine, config: Rollout, seed: int) -> None:
        self.recorder = recorder
        self.engine = engine
        self.config = config
        self.seed = seed
        self.refused: Ending | None = None
        self._issued = 0
        self._open: set[int] = set()  # requests that may still become turns

    def begin(self) -> int:
        """The number of a new request. Call :meth:`end` when it is recorded or has failed.

        Raises:
            EpisodeLimitError: ``rollout.max_turns`` requests have been answered or are in flight.
        """
        limit = self.config.max_turns
        if self.recorder.count + len(self._open) >= limit:
            raise self.refuse("max_turns", f"the episode has had {limit} requests (rollout.max_turns).")
        number = self._issued
        self._issued += 1
        self._open.add(number)
        return number

    def end(self, number: int) -> None:
        """Request ``number`` is recorded or has failed. A second call changes nothing."""
        self._open.discard(number)

    def refuse(self, ending: Ending, message: str) -> EpisodeLimitError:
        """The error of a request that the budget ``ending`` refuses, which is remembered."""
        self.refused = ending
        return EpisodeLimitError(ending, message)

    def too_long(self, tokens: int | str) -> EpisodeLimitError:
        """The error of a prompt of so many ``tokens``."""
        limit = self.config.max_tokens
        return self.refuse("max_tokens", f"the prompt has {tokens} tokens, and rollout.max_tokens is {limit}.")

    async def sample(
        self,
        prompt: Prompt,
        *draw: int,
        engine_id: str | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Sampled:
        """Sample one response.

        Args:
            prompt: it must leave room for a token within ``rollout.max_tokens``.
            draw: numbers that tell this response from others of the trajectory; its seed is made from them.
            engine_id: the engine's id of the branch; by default the trajectory's.
            max_tokens: a limit of this response, below those of the run.
            stop: further stop strings.
            sampling: fields of :class:`~vlmrl.engine.base.SamplingParams` in place of the run's.

        Raises:
            EpisodeLimitError: the prompt is too long.
            AbortedError, EngineError: the engine was stopped; it failed, or did not answer in ``rollout.engine_timeout``.
            ValueError: the engine expanded the prompt to another length.
        """
        config, trajectory_id = self.config, self.recorder.trajectory.id
        if prompt.length >= config.max_tokens:
            raise self.too_long(prompt.length)
        where = f"trajectory {trajectory_id}, request {draw[0]}"
        limits = (config.max_response_tokens, config.max_tokens - prompt.length, max_tokens)
        limit = min(each for each in limits if each is not None)
        seed = derive_seed(self.seed, trajectory_id, *draw)
        stops = tuple(dict.fromkeys((*config.stop, *stop)))
        params = SamplingParams(limit, config.temperature, config.top_p, config.top_k, stops, seed)
        whole = self.recorder.whole(prompt)
        ids = collapse(whole.token_ids, self.recorder.image_token_id, whole.media)
        routing_from = max(0, prompt.kept - 1)  # nor has the engine run the last response's last token
        request = Request(engine_id or trajectory_id, ids, whole.media, replace(params, **sampling), routing_from)
        began = time.perf_counter()
        try:
            completion = await generate_within(config.engine_timeout, self.engine, request)
        except TimeoutError:
            seconds = f"{config.engine_timeout:g} s"
            raise EngineError(f"{where}: no response in rollout.engine_timeout ({seconds}).") from None
        if completion.stop_reason == "abort":
            raise AbortedError(f"{where}: the engine aborted it.")
        if completion.prompt_tokens != prompt.length:
            raise ValueError(
                f"{where}: the engine counted {completion.prompt_tokens} prompt tokens, but the renderer {prompt.length}: they do "
                "not expand or resize images alike."
            )
        return Sampled(completion, time.perf_counter() - began)

    def cut(self, turn: Turn) -> Ending | None:
        """The budget of the run that cut the turn's response, if one did; not a limit of the client's own."""
        if turn.stop_reason != "length":
            return None
        if len(turn.response_ids) == self.config.max_response_tokens:
            return "length"
        return "max_tokens" if turn.length >= self.config.max_tokens else None

    def limit(self, turns: Sequence[Turn]) -> Ending | None:
        """The budget that refused a request, or cut a response of ``turns``, if one did."""
        return self.refused or next(filter(None, map(self.cut, reversed(turns))), None)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from all ``parts``, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
