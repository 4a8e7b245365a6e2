"""Servers as teachers: the logprobs of given tokens, with the supervision and the retries of a :class:`ServerEngine`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vlmrl.engine.base import EngineError, SamplingParams, check_placeholders
from vlmrl.engine.server import UNREACHED, Server, ServerError
from vlmrl.engine.server_backend import Attempt, Call, Scored, ScoreRequest
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import CHECK_SECONDS, ServerPool
from vlmrl.engine.server_response import BadResponse, is_logprob, sampled_logprobs
from vlmrl.multimodal.placeholders import collapse
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Sample

T = TypeVar("T")

STOP_SECONDS = 0.2  # between two looks whether the scoring shall stop
ROUNDING = 0.05  # of logprobs and probabilities that a server computes in bfloat16


class TeacherScores(NamedTuple):
    """The logprobs of a row's response tokens under a teacher server's model, in nats; 0 where no token is trained."""

    logprobs: np.ndarray  # float32 [response]
    top_ids: np.ndarray  # int32 [response, k], the most likely first; the policy may lack some that a larger head has
    top_logprobs: np.ndarray  # float32 [response, k]


class ServerScorer(ServerEngine):
    """Scores rows on ``servers`` with their ``most_likely`` ids at each token. No weights are sent to them.

    ``seconds_limit``: for one try of a row, with its wait for a server. ``at_once``: rows that servers have at a time; the others of
    a batch do not wait in a server's queue, where their time would run.
    """

    def __init__(
        self,
        servers: ServerPool,
        renderer: Renderer,
        most_likely: int,
        seconds_limit: float,
        at_once: int,
    ) -> None:
        super().__init__(servers, renderer, banned_ids=())
        self._most_likely, self._limit, self._at_once = most_likely, seconds_limit, at_once
        self.check_stop: Callable[[], None] = lambda: None
        """Called while servers score; raises what :meth:`score` then ends with, such as the stop of the run."""

    def score(self, rows: Sequence[Sample]) -> list[TeacherScores]:
        """Of each row, its trained tokens. Waits for the servers; not to be called in their loop.

        Raises:
            EngineError: no server answered, also after retries, or not in time.
            ValueError: a server reads other tokens or images.
        """
        found = self.thread.wait(self._until_stopped(self._score_all([self.request_of(row) for row in rows])))
        sizes = [len(row.response_ids) for row in rows]
        return [TeacherScores(*(part[:size] for part in scores)) for size, scores in zip(sizes, found, strict=True)]

    def score_on_each(self, row: Sample) -> dict[str, TeacherScores]:
        """The scores of one row by each server that serves, by URL. One that fails, or has just failed, is left out."""
        return self.thread.wait(self._until_stopped(self._score_on_each(self.request_of(row))))

    def logprobs(self, rows: Sequence[Sample]) -> list[np.ndarray]:
        """The logprobs ``[response]`` of each row's tokens, in nats."""
        return [scores.logprobs for scores in self.score(rows)]

    def request_of(self, row: Sample) -> ScoreRequest:
        """The request to score a row's trained tokens.

        A row that ends with the token that opens an image gets one token more, whose score is not needed: some servers look at the
        token behind each opening token, and answer with HTTP 500 if there is none.
        """
        pad = self._renderer.image_token_id
        prompt = collapse(row.token_ids, pad, row.media)
        tokens = [token if mask else -1 for token, mask in zip(row.response_ids, row.loss_mask, strict=True)]
        if prompt[-1] == self._renderer.image_opening_id:
            prompt, tokens = [*prompt, self._renderer.end_of_turn_id], [*tokens, -1]
        request = ScoreRequest(
            row.trajectory_id, prompt, row.media, SamplingParams(1), tokens=tokens, most_likely=self._most_likely
        )
        check_placeholders(request, pad)
        return request

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[TeacherScores]:
        room = asyncio.Semaphore(self._at_once)

        async def score(request: ScoreRequest) -> TeacherScores:
            async with room:
                return await self._score(request)

        return await asyncio.gather(*map(score, requests))

    async def _score_on_each(self, request: ScoreRequest) -> dict[str, TeacherScores]:
        found: dict[str, Any] = {}

        async def score(server: Server) -> None:
            with suppress(*UNREACHED, ServerError, BadResponse):
                async with asyncio.timeout(min(self._limit, CHECK_SECONDS)):
                    found[server.url] = await self._generate_on(server, request)

        healthy = [each for each in self.servers.ready if not (each.silent or each.backoff or each.unresponsive)]
        await asyncio.gather(*map(score, healthy))
        return found

    async def _until_stopped(self, scoring: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(scoring)
        try:
            while not (await asyncio.wait({task}, timeout=STOP_SECONDS))[0]:
                self.check_stop()
            return task.result()
        finally:
            task.cancel()

    async def _score(self, request: ScoreRequest) -> TeacherScores:
        """A row that is not scored in time gets another try where there are several servers: the first one may be silent."""
        tries = min(2, len(self.servers.all))
        for number in range(tries):
            self.retried += number
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._limit):
                    scores: Any = await self._generate(request)
                    return scores
            except TimeoutError:
                if server := self._server_of.get(request.trajectory_id):
                    server.failed(began)  # its back-off sends the next try to another one
            finally:
                self.release(request.trajectory_id)
        reason = f"was not scored in rollout.engine_timeout ({self._limit:g} s) by teacher.model, in {tries} tries"
        raise EngineError(f"trajectory {request.trajectory_id}: its row {reason}.")

    def _call_for(self, attempt: Attempt) -> Call:
        is_score = isinstance(attempt.request, ScoreRequest)
        return self.backend.score(attempt) if is_score else self.backend.generate(attempt)

    def _parsed(self, attempt: Attempt, response: Any) -> Any:
        """TeacherScores for a :class:`ScoreRequest`; otherwise the response, whatever the server's weights are named."""
        if not isinstance(attempt.request, ScoreRequest):
            sampled = self.backend.parse(attempt, response)
            sampled_logprobs(sampled, attempt.request.sampling.max_tokens)
            return sampled
        return scores_of(attempt.request, self.backend.parse_scores(attempt, response))


def _check_agreement(token: int, logprob: float, best: Sequence[tuple[float, int]]) -> None:
    """Raises BadResponse for a token's logprob that contradicts those of the most likely ids at its place, rounding aside."""
    listed = {id: each for each, id in best}
    too_likely = best and token not in listed and logprob > best[-1][0] + ROUNDING
    mass = sum(map(math.exp, ({token: logprob} | listed).values()))
    if too_likely or abs(listed.get(token, logprob) - logprob) > ROUNDING or mass > 1 + ROUNDING:
        raise BadResponse(f"token {token} has the logprob {logprob:g} where the most likely ids have {best!r:.100}")


def scores_of(request: ScoreRequest, scored: Scored) -> TeacherScores:
    """The checked scores. Raises BadResponse if another attempt may succeed, ValueError if none can."""
    if scored.prompt_tokens != request.length:
        raise ValueError(
            f"trajectory {request.trajectory_id}: the teacher's server counted {scored.prompt_tokens!r:.50} tokens, but the renderer "
            f"{request.length}: it drops images, or expands or resizes them differently."
        )
    size, count = len(request.tokens), request.most_likely
    if len(scored.logprobs) != size or len(scored.most_likely) != size:
        raise BadResponse(f"{size} tokens came with {len(scored.logprobs)} logprobs")
    logprobs = np.zeros(size, np.float32)
    ids, likely = np.zeros((size, count), np.int32), np.zeros((size, count), np.float32)
    for place, token in enumerate(request.tokens):
        if token < 0:
            continue
        logprob, reported = scored.logprobs[place]
        if reported != token or logprob is None or not is_logprob(logprob):
            raise BadResponse(f"token {token} came as {reported!r:.50} with the logprob {logprob!r:.50}")
        entries = scored.most_likely[place]
        if any(each != each for each, _ in entries):
            raise BadResponse("a logprob among the most likely ids is not a number")  # it has no place in their order
        best = sorted(entries, reverse=True)[:count]
        known = len({id for _, id in best if type(id) is int and 0 <= id < 2**31})
        if known < count or not all(is_logprob(each) for each, _ in best):
            raise BadResponse(f"{known} of {count} most likely ids, or logprobs that are not finite, or positive")
        _check_agreement(token, logprob, best)
        logprobs[place], likely[place], ids[place] = logprob, [each for each, _ in best], [id for _, id in best]
    return TeacherScores(logprobs, ids, likely)
