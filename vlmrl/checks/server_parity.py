"""Before a run: the servers and the trainer answer one question about an image, and must agree.

What is compared is what would go wrong without a word: that an update reaches every weight, that it gives the weights that the
server would have loaded itself, that an image has the same size on both sides, that features of images do not outlive the
weights they were computed with, and that a logprob means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlmrl.config import Rollout
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.servers import Server
from vlmrl.engine.sglang.engine import SGLangEngine
from vlmrl.multimodal.renderer import Renderer, expand
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Completion, Sample
from vlmrl.weight_sync.server_sync import Send, WeightSync

TOKENS = 16  # that are compared
TOLERANCE = 0.1  # nats, the mean over them; bfloat16 makes 0.01, a wrong convention or stale image features 0.2 to 2
IMAGE = (330, 210)  # pixels: no multiple of any patch

Score = Callable[[Sequence[Sample]], list[np.ndarray]]


class ParityError(ValueError):
    """A server and the trainer disagree."""


@dataclass(frozen=True)
class ParityReport:
    """One server's: the mean difference of logprobs to the trainer's, in nats, on an image it had seen under other weights, and on
    one that it had not (``None``: a text model)."""

    seen: float
    unseen: float | None

    def __str__(self) -> str:
        return f"logprobs differ from the trainer's by {max(self.seen, self.unseen or 0.0):.2g} nats"


@dataclass(frozen=True)
class Question:
    """What a server is asked, and the same prompt as the trainer reads it: with one placeholder per visual token."""

    request: Request
    prompt_ids: list[int]


async def check_parity(
    sync: WeightSync, send: Send, score: Score, questions: Sequence[Question], *, loaded_alike: bool
) -> dict[str, ParityReport]:
    """Give all servers their first weights, and compare. Raises ParityError for one that disagrees.

    ``questions``: one or two, of different images. ``loaded_alike``: the servers loaded the trainer's own weights by themselves.
    """
    servers = sync.engine.servers.all
    loaded = await sync.checksums()
    await sync.fill(send)
    _check_reach(loaded, await sync.checksums())
    for server in servers:
        await sync.engine.ask(server, questions[0].request)  # an image is seen under weights that are no good
    await sync.first(send)
    if loaded_alike:
        _check_equal(loaded, await sync.checksums())
    return {server.url: await _compare(sync.engine, server, score, questions) for server in servers}


async def ask_about(renderer: Renderer, store: MediaStore | None, rollout: Rollout) -> list[Question]:
    """Two questions about an image of noise each; of a text model, one without."""
    sampling = SamplingParams(TOKENS, rollout.temperature, rollout.top_p, rollout.top_k)
    if store is None:
        ids = renderer.prompt([{"role": "user", "content": "Hello!"}]).token_ids
        return [Question(Request("handshake/text", ids, [], sampling), ids)]
    asked = []
    for number in range(2):
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (*IMAGE, 3), dtype=np.uint8))
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the image?"}]
        rendered = renderer.prompt([{"role": "user", "content": content}])
        media = [await store.get(image)]
        request = Request(f"handshake/{number}", rendered.token_ids, media, sampling)
        asked.append(Question(request, expand(request.prompt_ids, renderer.image_token_id, media)))
    return asked


def _check_reach(before: dict[str, dict[str, str]], filled: dict[str, dict[str, str]]) -> None:
    for url, sums in before.items():
        deaf = [name for name, value in sums.items() if filled[url][name] == value and _is_weight(name)]
        if deaf:
            raise ParityError(
                f"the server {url} has weights that no update reaches: {_some(deaf)}. They would stay as they are for the whole run."
            )


def _check_equal(loaded: dict[str, dict[str, str]], sent: dict[str, dict[str, str]]) -> None:
    for url, sums in loaded.items():
        other = [name for name, value in sums.items() if sent[url][name] != value]
        if other:
            raise ParityError(
                f"the server {url} has other weights after an update than it loaded from the same folder: {_some(other)}."
            )


async def _compare(engine: SGLangEngine, server: Server, score: Score, questions: Sequence[Question]) -> ParityReport:
    gaps = [_gap(score, question, await engine.ask(server, question.request)) for question in questions]
    told = ParityReport(gaps[0], gaps[1] if len(gaps) > 1 else None)
    if told.unseen is not None and told.unseen <= TOLERANCE < told.seen:
        raise ParityError(
            f"the server {server.url} keeps image features over a weight update: on an image it had seen before, its logprobs are "
            f"{told.seen:.2g} nats off the trainer's, on a new one {told.unseen:.2g}. Start it with SGLANG_VLM_CACHE_SIZE_MB=0."
        )
    if max(gaps) > TOLERANCE:
        raise ParityError(
            f"the server {server.url} and the trainer do not mean the same by a logprob: they differ by {max(gaps):.2g} nats, where "
            f"at most {TOLERANCE:g} was expected. Logprobs must be of the distribution after temperature and logit_bias, before top-p "
            "and top-k (no SGLANG_RETURN_ORIGINAL_LOGPROB), and of the model that is trained. (sglang.check False skips this check.)"
        )
    return told


def _gap(score: Score, question: Question, completion: Completion) -> float:
    length = len(completion.token_ids)
    row = Sample(
        prompt_token_ids=question.prompt_ids,
        response_ids=completion.token_ids,
        loss_mask=[1] * length,
        rollout_logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        group_id="handshake",
        trajectory_id=question.request.trajectory_id,
        is_last_step=True,
        stop_reason=completion.stop_reason,
        media=list(question.request.media),
    )
    [ours] = score([row])
    return float(np.abs(ours - np.array(completion.logprobs)).mean())


def _is_weight(name: str) -> bool:
    """Not a table that a layer computes for itself, such as rotary positions. ``name`` ends with ``of rank 0``."""
    return name.rpartition(" of rank ")[0].endswith(("weight", "bias"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
