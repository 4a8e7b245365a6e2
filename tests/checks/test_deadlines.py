"""The checks end with an error if the engine does not answer, or has other weights than it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from testing.clocks import pass_time
from testing.episodes import new_store
from testing.fakes import PAD, make_trajectory

from vlmrl.checks.image_swap import check_images
from vlmrl.checks.server_parity import ParityError, Question, check_parity
from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.server import Server, ServerError
from vlmrl.types import Completion

LIMIT = 600.0  # seconds, for a machine that is ten times too slow; a silent server lets them pass at once
WORDS = Question(Request("parity/text", [1, 2], []), [1, 2])


class Servers:
    """Two servers, of which the second answers from the request ``silent`` on with nothing, or with ``error``.

    ``sums``: the first one's checksums, after loading, after an update by other weights, and after the trainer's.
    """

    def __init__(self, silent: int = 2, error: Exception | None = None, sums: Sequence[dict[str, str]] = ()) -> None:
        self.servers = SimpleNamespace(all=[Server("http://one"), Server("http://two")])
        capabilities = SimpleNamespace(checksums=bool(sums))
        self.sums = iter(sums)
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
                pass_time(asyncio.get_running_loop())
                await asyncio.Event().wait()
        return Completion([5, 6], [-0.1, -0.2], "stop", [0, 0], 2)


def check(servers: Servers, **options: Any) -> Any:
    async def sends(*_: Any) -> None: ...

    async def checksums() -> dict[str, dict[str, str]]:
        return {"http://one": next(servers.sums)}

    sync: Any = SimpleNamespace(engine=servers, fill=sends, first=sends, checksums=checksums)
    score: Any = lambda samples: [[-0.1, -0.2]]  # noqa: E731
    options = {"same_weights": False, "timeout": LIMIT} | options
    checking = check_parity(sync, lambda update: None, score, [WORDS], **options)  # type: ignore[arg-type,return-value]
    return asyncio.run(checking)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_server_that_never_answers_the_parity_check_ends_it(silent: int):
    """Under the wrong weights, or under the right ones."""
    servers = Servers(silent)
    with pytest.raises(EngineError, match=r"the server http://two did not answer in rollout\.engine_timeout \(600 s\)"):
        check(servers)
    assert servers.requests == silent + 1


@pytest.mark.parametrize("error", [ServerError("HTTP 500", 500), ConnectionRefusedError("refused")])
def test_a_server_that_fails_in_the_parity_check_is_named(error: Exception):
    with pytest.raises(
        EngineError, match=r"the server http://two gave no answer that can be used: .*(HTTP 500|refused)"
    ):
        check(Servers(0, error))


def test_servers_that_answer_pass():
    reports = check(Servers())
    assert {url: report.seen for url, report in reports.items()} == {"http://one": 0.0, "http://two": 0.0}


DECAY, CONVOLUTION = (f"layers.0.linear_attn.{name} of rank 0" for name in ("A_log", "conv1d.weight"))


@pytest.mark.parametrize(
    ("sent", "rounded", "named"),
    [
        (("2", "1"), ("linear_attn.A_log",), ""),
        (("2", "1"), (), r"A_log of rank 0\.$"),
        (("2", "2"), ("linear_attn.A_log",), r": layers\.0\.linear_attn\.conv1d"),
    ],
)
def test_only_weights_that_the_trainer_rounds_may_differ_after_an_update(
    sent: tuple[str, ...], rounded: tuple[str, ...], named: str
):
    sums = [dict(zip((DECAY, CONVOLUTION), each, strict=True)) for each in (("1", "1"), ("0", "0"), sent)]
    with pytest.raises(ParityError, match=f"other weights after an update .*{named}") if named else nullcontext():
        check(Servers(sums=sums), same_weights=True, rounded=rounded)


def test_a_run_passes_with_a_server_that_a_failed_one_left_full_of_one_value():
    """The first fill changes nothing there, the second does."""
    check(Servers(sums=[{"w.weight of rank 0": each} for each in ("0.01", "0.01", "0.02")]))


def test_a_weight_that_no_update_reaches_is_refused():
    sums = [{"w.weight of rank 0": each, "v.weight of rank 0": "1"} for each in ("2", "0.01", "0.02")]
    with pytest.raises(ParityError, match=r"http://one has weights that no update reaches: v\.weight of rank 0\. They"):
        check(Servers(sums=sums))


def test_an_engine_that_never_responses_ends_the_image_swap_check():
    class Silent:
        async def generate(self, request: Request) -> Completion:
            pass_time(asyncio.get_running_loop())
            await asyncio.Event().wait()
            raise AssertionError

        def release(self, trajectory_id: str) -> None: ...

    checking = check_images(lambda samples: [], Silent(), new_store(), [make_trajectory()], PAD, timeout=LIMIT)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"image-swap check: no response in rollout\.engine_timeout \(600 s\)"):
        asyncio.run(checking)
