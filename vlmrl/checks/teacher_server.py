"""The startup check of teacher servers: their tokenizer is the policy's, they score tokens as they sample them, and all alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from vlmrl.checks.doctor_model import highest_id
from vlmrl.checks.server_parity import TOKENS, TOLERANCE, ParityError, Question, ask
from vlmrl.engine.base import EngineError, SamplingParams
from vlmrl.engine.server import UNREACHED, Server, ServerError
from vlmrl.engine.server_scores import ServerScorer
from vlmrl.rollout.record import common_start
from vlmrl.types import Sample

RESPONSES = 8  # that are sampled at most, until one does not begin with a placeholder
PIECES = 2000  # ids whose text is encoded, beside all added tokens


async def check_teacher_servers(
    scorer: ServerScorer, questions: Sequence[Question], tokenizer: Any, placeholders: Collection[int], timeout: float
) -> dict[str, float]:
    """For each URL, the largest mean difference of logprobs of one response, sampled and then scored, in nats.

    ``placeholders``: the ids of images and videos, which the policy is banned from, and the servers are not.

    Raises:
        ValueError: a server reads another id from a text, or counts other tokens for an image.
        ParityError: a server scores a response otherwise than it sampled it, or than the first server.
        EngineError: a server does not answer, or not in time.
    """
    found, first, known = {}, list[tuple[Sample, np.ndarray]](), {*range(highest_id(tokenizer) + 1)} - {*placeholders}
    for server in scorer.servers.all:
        await _check_tokenizer(scorer, server, tokenizer, timeout)
        sampled = [await _sampled(scorer, server, each, known, timeout) for each in questions]
        first = first or sampled
        found[server.url] = max([await _difference(scorer, server, *each, timeout) for each in sampled])
        if not found[server.url] <= TOLERANCE:
            raise ParityError(
                f"the teacher's server {server.url} scores a response with other logprobs than it sampled it with, by "
                f"{found[server.url]:.2g} nats, where at most {TOLERANCE:g} was expected: they must be at temperature 1, and of the "
                "tokens and images in the request."
            )
        apart = max(
            [await _difference(scorer, server, *each, timeout) for each in first if first is not sampled], default=0
        )
        if not apart <= TOLERANCE:
            raise ParityError(
                f"the teacher's servers must serve the same model, but {server.url} scores a response with other logprobs than "
                f"{scorer.servers.all[0].url}, by {apart:.2g} nats, where at most {TOLERANCE:g} was expected: each row goes to any."
            )
    return found


async def _check_tokenizer(scorer: ServerScorer, server: Server, tokenizer: Any, timeout: float) -> None:
    added = "".join(map(str, tokenizer.added_tokens_decoder.values()))
    text = added + tokenizer.decode(range(0, len(tokenizer), max(1, len(tokenizer) // PIECES)))
    try:
        call = scorer.servers.call(server, *scorer.backend.tokenize(text), timeout=timeout)
        theirs = list((await scorer.thread.run(call))["tokens"])
    except (*UNREACHED, ServerError, LookupError, TypeError) as error:
        raise EngineError(
            f"the teacher's server {server.url} encodes no text, so that its tokenizer is not known: {type(error).__name__}: {error}"
        ) from error
    mine = tokenizer.encode(text, add_special_tokens=False)
    if theirs != mine:
        place = common_start(mine, theirs)
        raise ValueError(
            f"the teacher's server {server.url}: its tokenizer must be the policy's, but it reads {theirs[place : place + 3]} where "
            f"the policy reads {mine[place : place + 3]}, {tokenizer.decode(mine[place : place + 3])!r}. A teacher scores the "
            "policy's own token ids: serve a model with the same tokenizer."
        )


async def _sampled(
    scorer: ServerScorer, server: Server, question: Question, known: Set[int], timeout: float
) -> tuple[Sample, np.ndarray]:
    """A response and its logprobs, up to its first id that is not in ``known``: that of a placeholder, or of no token."""
    for seed in range(RESPONSES):
        request = replace(question.request, sampling=SamplingParams(TOKENS, seed=seed))
        sampled: Any = await ask(scorer, server, request, timeout)
        if tokens := list(takewhile(known.__contains__, sampled.token_ids)):
            return question.row(tokens), np.array([logprob for logprob, _ in sampled.logprobs[: len(tokens)]])
    raise ParityError(
        f"the teacher's server {server.url} begins each of {RESPONSES} responses with a placeholder of an image or a video, or with "
        "an id of no token, which no trained model does: serve a trained model."
    )


async def _difference(scorer: ServerScorer, server: Server, row: Sample, logprobs: np.ndarray, timeout: float) -> float:
    """How far a server's scores of a response are from its ``logprobs``, in the mean over the tokens."""
    scores: Any = await ask(scorer, server, scorer.request_of(row), timeout)
    return float(np.abs(scores.logprobs[: len(logprobs)] - logprobs).mean())
