"""The checks end with an error if the engine does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from testing.episodes import new_store
from testing.fakes import PAD, make_trajectory

from vlmrl.checks.image_swap import check_images
from vlmrl.checks.server_parity import Question, check_parity
from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.server import Server, ServerError
from vlmrl.types import Completion

LIMIT = 600.0  # seconds, for a machine that is ten times too slow
WORDS = Question(Request("parity/text", [1, 2], []), [1, 2])


class Servers:
    """Two servers, of which the second answers from the request ``silent`` on with nothing, or with ``error``."""

    def __init__(self, silent: int, error: Exception | None = None) -> None:
        self.servers = SimpleNamespace(all=[Server("http://one"), Server("http://two")])
        capabilities = SimpleNamespace(checksums=False)
        self.backend = SimpleNamespace(capabilities=capabilities, logprobs_hint="", image_cache_hint="")
        self.silent, self.error, self.requests = silent, error, 0

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        yield

    async def generate_on(self, server: Server, request: Request) -> Completion:
        if server.url == "http://two":
            self.requests += 1
            if self.requests > self.silent:
                if self.error is not None:
                    raise self.error
                await asyncio.Event().wait()
        return Completion([5, 6], [-0.1, -0.2], "stop", [0, 0], 2)


def check(servers: Servers, timeout: float) -> Any:
    async def sends(send: Any) -> None: ...

    sync: Any = SimpleNamespace(engine=servers, fill=sends, first=sends)
    score: Any = lambda samples: [[-0.1, -0.2]]  # noqa: E731
    checking = check_parity(sync, lambda update: None, score, [WORDS], same_weights=False, timeout=timeout)  # type: ignore[arg-type,return-value]
    return asyncio.run(asyncio.wait_for(checking, LIMIT))


@pytest.mark.parametrize("silent", [0, 1])
def test_a_server_that_never_answers_the_parity_check_ends_it(silent: int):
    """Under the wrong weights, or under the right ones."""
    servers = Servers(silent)
    with pytest.raises(
        EngineError, match=r"the server http://two did not answer in rollout\.engine_timeout \(0\.05 s\)"
    ):
        check(servers, timeout=0.05)
    assert servers.requests == silent + 1


@pytest.mark.parametrize("error", [ServerError("HTTP 500", 500), ConnectionRefusedError("refused")])
def test_a_server_that_fails_in_the_parity_check_is_named(error: Exception):
    with pytest.raises(
        EngineError, match=r"the server http://two gave no answer that can be used: .*(HTTP 500|refused)"
    ):
        check(Servers(0, error), timeout=LIMIT)


def test_servers_that_answer_pass():
    reports = check(Servers(2), timeout=LIMIT)
    assert {url: report.seen for url, report in reports.items()} == {"http://one": 0.0, "http://two": 0.0}


def test_an_engine_that_never_replies_ends_the_image_swap_check():
    class Silent:
        async def generate(self, request: Request) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

        def release(self, trajectory_id: str) -> None: ...

    checking = check_images(lambda samples: [], Silent(), new_store(), [make_trajectory()], PAD, timeout=0.05)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"image-swap check: no reply in rollout\.engine_timeout \(0\.05 s\)"):
        asyncio.run(asyncio.wait_for(checking, LIMIT))
