"""Whatever a server answers, a request ends in a checked response, a counted failure, or one clear error."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
from typing import Any

import pytest
from hostile.servers import END, cases
from testing.fakes import PAD, Router
from torch import nn

from vlmrl.config import ServerSettings
from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.engine.server import Server, ServerError
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import Limits, ServerPool
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.types import Completion

DEADLINE = 60.0  # seconds for one response, which takes milliseconds
KNOWN = {"default": 0, "run.1": 1}
VOCABULARY = 1000


class Words:
    image_token_id = PAD
    stop_ids = frozenset({END})


class Answering(ServerPool):
    """A pool whose only server answers every call with ``response``, a status and a body."""

    response = (200, b"")

    async def _fetch(self, server, call, timeout):
        status, body = self.response
        if status != 200:
            raise ServerError(f"{server.url}{call.path}: HTTP {status}: {body[:100]!r}", status)
        return body


@pytest.fixture(params=[False, True], ids=["dense", "experts"])
def engine(request):
    server = Server("http://127.0.0.1:9")
    pool = Answering(SGLangBackend(ServerSettings(urls=(server.url,))), [server], limits=Limits(retries=0))
    routing = ExpertRouters(nn.ModuleList([Router()]), "Router") if request.param else None
    made = ServerEngine(pool, Words(), banned_ids=[PAD], routing=routing, vocabulary=VOCABULARY)
    made.versions |= KNOWN
    yield made
    made.close()


async def outcome(engine: ServerEngine, response: tuple[int, bytes]) -> Completion | Exception:
    """How a request ends that a server answers with ``response``."""
    [server] = engine.servers.all
    engine.servers.response = response
    await engine.servers.serve(server)  # an earlier response may have drained it
    async with asyncio.timeout(DEADLINE):
        try:
            return await engine._generate(Request("trajectory 1", [1, 2, 3], [], SamplingParams(8)))
        except (EngineError, ValueError) as error:
            return error


def check(result: Completion | Exception) -> None:
    if isinstance(result, Exception):
        assert isinstance(result, EngineError) or type(result) is ValueError
        assert "trajectory 1" in str(result) or "server" in str(result)
        assert len(str(result)) < 5000
        return
    size = len(result.token_ids)
    assert 0 < size <= 8 or result.stop_reason == "abort"
    assert all(type(token) is int and 0 <= token < VOCABULARY and token != PAD for token in result.token_ids)
    assert len(result.logprobs) == len(result.policy_versions) == size
    assert all(math.isfinite(logprob) for logprob in result.logprobs)
    assert set(result.policy_versions) <= set(KNOWN.values())
    assert result.stop_reason in ("stop", "length", "abort") and result.prompt_tokens == 3


def answer(ids: list[int]) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": 3,
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }
    return {"output_ids": ids, "meta_info": meta}


def test_a_sample_of_what_servers_may_answer(engine, how_many):
    async def ask():
        return [
            await outcome(engine, response) for response in itertools.islice(cases(random.Random(0)), how_many(400))
        ]

    results = asyncio.run(ask())
    for result in results:
        check(result)
    kinds = [type(result) for result in results]
    assert min(kinds.count(Completion), kinds.count(EngineError), kinds.count(ValueError)) > 5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda response: response["meta_info"].update(finish_reason={"type": "tired"}),
        lambda response: response["meta_info"].update(output_token_logprobs=[[-1.0]] * 2),
        lambda response: response["meta_info"].update(output_token_logprobs=[[10**350, 5, None], [-1.0, END, None]]),
        lambda response: response["meta_info"].update(weight_versions=[{"version": ["a"], "start": 0, "end": 2}]),
        lambda response: response["meta_info"].update(
            weight_versions=[{"version": "default", "start": 0, "end": 10**12}]
        ),
        lambda response: response["meta_info"].update(output_token_logprobs=[[-1e6, 5, None], [-1.0, END, None]]),
        lambda response: response["meta_info"].update(output_token_logprobs=[[2.0, 5, None], [-1.0, END, None]]),
        lambda response: response.update(output_ids=[5.0, END]),
        lambda response: response.update(output_ids=[-5, END]),
        lambda response: response.update(output_ids=[5] * 9),
        lambda response: response.pop("meta_info"),
        lambda response: response.update(more=[0] * 20_000),
        lambda response: response.update(answer([])),
        lambda response: response.update(answer([PAD, END])),
        lambda response: response.update(answer([VOCABULARY, END])),
        lambda response: response.update(answer([2**32, END])),
    ],
)
def test_a_response_of_another_form_is_a_failed_attempt(engine, spoil):
    response = answer([5, END])
    spoil(response)
    result = asyncio.run(outcome(engine, (200, json.dumps(response).encode())))
    assert isinstance(result, EngineError) and re.search(
        "in 1 attempts: (BadResponse|.* more than 10800 commas)", str(result)
    )
