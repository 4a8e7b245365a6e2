"""The startup parity check: before a run, servers and trainer score one response about an image, and must agree.

It finds silent errors: weights that no update reaches, weights that arrive changed, images resized differently, image features
cached over a weight update, and logprobs of another distribution.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlmrl.checks.image_swap import Score
from vlmrl.config import Rollout
from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.engine.server import UNREACHED, Server, ServerError
from vlmrl.engine.server_backend import ServerBackend
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_response import BadResponse
from vlmrl.engine.server_sync import Send, WeightSync
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Completion, Sample

TOKENS = 16  # length of the response that is compared
TOLERANCE = 0.1
"""Nats, mean over the tokens. A wrong convention or stale image features make 0.2 to 2. Below 0.1 lies what bfloat16 makes in hidden
states (0.023 between two layouts of the trainer itself, 28 layers of the 2B shape, random weights) and in a server's logits where it
rounds them (0.027 at logits of 20). The trainer's own logits are float32."""
IMAGE = (330, 210)  # pixels: no multiple of any patch size
FILLS = (0.01, 0.02)
"""The value of every weight while the check tests that updates reach it. The second is for servers that a failed run left with the
first, where the first fill changes nothing."""


class ParityError(ValueError):
    """A server and the trainer disagree."""


@dataclass(frozen=True)
class ParityReport:
    """Mean absolute logprob difference between one server and the trainer, in nats."""

    seen: float
    """On an image that the server had seen under other weights, or on text for a text model."""
    unseen: float | None
    """On an image that it had not seen. None: a text model."""

    def __str__(self) -> str:
        return f"logprobs differ from the trainer's by {max(self.seen, self.unseen or 0.0):.2g} nats"


@dataclass(frozen=True)
class Question:
    """A request to a server, and its prompt as the trainer reads it: with one placeholder per visual token."""

    request: Request
    prompt_ids: list[int]

    def row(self, response_ids: list[int]) -> Sample:
        """The question with a response, to be scored."""
        length = len(response_ids)
        return Sample(
            self.prompt_ids,
            response_ids,
            loss_mask=[1] * length,
            rollout_logprobs=None,
            policy_versions=[0] * length,
            group_id="parity",
            trajectory_id=self.request.trajectory_id,
            is_last_step=True,
            stop_reason="length",
            media=list(self.request.media),
        )


async def check_parity(
    sync: WeightSync,
    send: Send,
    score: Score,
    questions: Sequence[Question],
    *,
    same_weights: bool,
    timeout: float,
    rounded: tuple[str, ...] = (),
) -> dict[str, ParityReport]:
    """Send all servers their first weights, and compare; a report for each URL.

    ``questions``: one or two, about different images. ``same_weights``: the servers have loaded the trainer's initial weights.
    ``timeout``: seconds for one answer. ``rounded``: suffixes of weights that the trainer has rounded to its dtype, while servers keep
    them as they are in the folder.

    Raises:
        ParityError: a server disagrees with the trainer.
        EngineError: a server does not answer, or not in time.
    """
    engine = sync.engine
    servers, checksums = engine.servers.all, engine.backend.capabilities.checksums
    loaded = await sync.checksums() if checksums else {}
    await _check_reach(sync, send, loaded)
    for server in servers:
        await ask(engine, server, questions[0].request, timeout)  # so that it sees the image under wrong weights
    async with engine.asleep():
        await sync.first(send)
    if same_weights:
        _check_equal(loaded, await sync.checksums() if checksums else {}, rounded)
    responses = {
        server.url: [await ask(engine, server, each.request, timeout) for each in questions] for server in servers
    }
    async with engine.asleep():
        differences = {
            url: [_difference(score, *pair) for pair in zip(questions, each, strict=True)]
            for url, each in responses.items()
        }
    return {url: _compare(engine.backend, url, each) for url, each in differences.items()}


async def parity_questions(renderer: Renderer, store: MediaStore | None, rollout: Rollout) -> list[Question]:
    """Two questions, each about an image of noise. For a text model, which has no ``store``, one question without an image."""
    sampling = SamplingParams(TOKENS, rollout.temperature, rollout.top_p, rollout.top_k)
    if store is None:
        ids = renderer.prompt([{"role": "user", "content": "Hello!"}]).token_ids
        return [Question(Request("parity/text", ids, [], sampling), ids)]
    questions = []
    for number in range(2):
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (*IMAGE, 3), dtype=np.uint8))
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the image?"}]
        rendered = renderer.prompt([{"role": "user", "content": content}])
        media = [await store.get(image)]
        request = Request(f"parity/{number}", rendered.token_ids, media, sampling)
        questions.append(Question(request, expand(request.prompt_ids, renderer.image_token_id, media)))
    return questions


async def _check_reach(sync: WeightSync, send: Send, loaded: dict[str, dict[str, str]]) -> None:
    """Fill all servers' weights with one value. Raises ParityError if a weight keeps its checksum, which was in ``loaded``."""
    before = loaded
    for value in FILLS:
        async with sync.engine.asleep():
            await sync.fill(send, value)
        filled = await sync.checksums() if loaded else {}
        unchanged = [
            (url, name)
            for url, sums in before.items()
            for name, each in sums.items()
            if filled[url].get(name, each) == each and _is_weight(name)
        ]
        if not unchanged:
            return
        before = filled
    url, _ = unchanged[0]
    names = [name for place, name in unchanged if place == url]
    raise ParityError(
        f"the server {url} has weights that no update reaches: {_some(names)}. They would keep their values for the whole run."
    )


def _check_equal(loaded: dict[str, dict[str, str]], sent: dict[str, dict[str, str]], rounded: tuple[str, ...]) -> None:
    for url, sums in loaded.items():
        changed = [name for name, value in sums.items() if sent[url].get(name) != value]
        other = [name for name in changed if not _weight_of(name).endswith(rounded)]
        if other:
            raise ParityError(
                f"the server {url} has other weights after an update than it loaded from the same folder: {_some(other)}."
            )


async def ask(engine: ServerEngine, server: Server, request: Request, timeout: float) -> Completion:
    """One attempt. Raises EngineError if the server gives no answer that can be used, or not in ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            return await engine.generate_on(server, request)
    except TimeoutError:
        reason = f"did not answer in rollout.engine_timeout ({timeout:g} s)"
        raise EngineError(f"startup parity check: the server {server.url} {reason}{server.log_tail()}") from None
    except (*UNREACHED, ServerError, BadResponse) as error:
        reason = f"gave no answer that can be used: {type(error).__name__}: {error}"
        raise EngineError(f"startup parity check: the server {server.url} {reason}{server.log_tail()}") from error


def _compare(backend: ServerBackend, url: str, differences: Sequence[float]) -> ParityReport:
    """The report of one server's ``differences`` by question. Raises ParityError if one is too large."""
    report = ParityReport(differences[0], differences[1] if len(differences) > 1 else None)
    if report.unseen is not None and report.unseen <= TOLERANCE < report.seen:
        raise ParityError(
            f"the server {url} keeps image features over a weight update: on an image it had seen before, its logprobs differ "
            f"from the trainer's by {report.seen:.2g} nats, on a new one by {report.unseen:.2g}. {backend.image_cache_hint}".rstrip()
        )
    if max(differences) > TOLERANCE:
        hint = f" ({backend.logprobs_hint})" if backend.logprobs_hint else ""
        raise ParityError(
            f"the logprobs of the server {url} differ from the trainer's by {max(differences):.2g} nats, where at most "
            f"{TOLERANCE:g} was expected. They must be of the distribution after temperature and logit_bias, before top-p and "
            f"top-k{hint}, and of the model that is trained. (--server.no-check skips this check.)"
        )
    return report


def _difference(score: Score, question: Question, completion: Completion) -> float:
    """Mean absolute difference of the trainer's logprobs to the server's, in nats."""
    [logprobs] = score([question.row(completion.token_ids)])
    return float(np.abs(logprobs - np.array(completion.logprobs)).mean())


def _is_weight(name: str) -> bool:
    """Not a buffer that a layer computes itself, such as rotary frequencies. ``name`` ends with ``of rank 0``."""
    return _weight_of(name).endswith(("weight", "bias", "A_log"))


def _weight_of(name: str) -> str:
    return name.rpartition(" of rank ")[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
