"""A server's response in a form common to all server programs, and the checks that make it a :class:`Completion`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlmrl.engine.base import Request
from vlmrl.model.expert_routing import ExpertRouters, routing_from_indices
from vlmrl.types import Completion, ExpertRouting

UNKNOWN_EXPERT = -1  # in place of a token's experts, if the server does not return those of its last weights
StopReason = Literal["stop", "length", "abort"]


LEAST_LOGPROB, MOST_LOGPROB = -1e5, 1e-3  # no model has lower ones; a server's rounding may leave one just above 0
MOST_IDS = 2**31  # of a vocabulary whose size is not known


class BadResponse(Exception):
    """A response that cannot be used. Another attempt may succeed."""


class StaleWeights(BadResponse):
    """A response sampled with weights that this run never sent, or with older ones than it sent last: the server needs a resync."""


def is_logprob(value: object) -> bool:
    """Whether a server's value is a logprob that a model may have: no more than 0, its rounding aside."""
    return type(value) in (int, float) and LEAST_LOGPROB <= value <= MOST_LOGPROB  # type: ignore[operator]


def stop_reason_of(reason: object, stopped_at: object, stop_ids: frozenset[int]) -> StopReason:
    """``reason`` as the server gives it, and what it ``stopped_at``: an id, or a string.

    Raises BadResponse for an unknown reason, ValueError for an id that is not one of ``stop_ids``.
    """
    if isinstance(stopped_at, int) and stopped_at not in stop_ids:
        raise ValueError(
            f"the server ended a response at token {stopped_at}, which is not one of the stop ids {sorted(stop_ids)}: its tokenizer "
            "or generation config differs from model.path's."
        )
    if reason not in ("stop", "length", "abort"):
        raise BadResponse(f"the response ended for an unknown reason: {reprlib.repr(reason)}")
    return reason


@dataclass(frozen=True)
class Response:
    """What a server sampled: ``Response([5, 6], [(-0.1, 5), (-2.3, 6)], "stop", 12, [("run.4", 2)])``."""

    token_ids: list[int]
    logprobs: Sequence[tuple[float | None, int]]
    """Per token, its logprob and the id that the server reports with it."""
    stop_reason: StopReason
    prompt_tokens: int
    """Length of the prompt as the server counts it, images expanded."""
    weights: Sequence[tuple[str, int]]
    """Name of the weights, and the number of consecutive tokens that they sampled."""
    experts: np.ndarray | None = None
    """Expert indices of the tokens from ``request.routing_from`` on, without the last one: [tokens, layers, top_k], flattened.
    UNKNOWN_EXPERT in all layers of a token: not known."""


def sampled_logprobs(response: Response, max_tokens: int) -> list[float]:
    """The logprobs of the sampled tokens. Raises BadResponse unless each of at most ``max_tokens`` tokens has its own."""
    ids = response.token_ids
    if not all(type(token) is int and token >= 0 for token in ids) or len(ids) > max_tokens:
        raise BadResponse(f"{len(ids)} sampled ids, some of which are not token ids, or more than {max_tokens}")
    logprobs = [logprob for logprob, _ in response.logprobs if logprob is not None and is_logprob(logprob)]
    if [token for _, token in response.logprobs] != ids or len(logprobs) != len(ids):
        raise BadResponse(
            f"{len(ids)} ids came with {len(response.logprobs)} logprobs of other ids, or with logprobs that are not finite, "
            "or positive"
        )
    return logprobs


def _check_ids(response: Response, banned_ids: Sequence[int], vocabulary: int) -> None:
    """Raises BadResponse for what a policy cannot sample: no token at all, a banned id, one outside of its vocabulary."""
    ids = set(response.token_ids)
    if not ids and response.stop_reason != "abort":
        raise BadResponse("it holds no token, though it was not aborted")
    if wrong := [id for id in ids if id >= vocabulary] + sorted(ids.intersection(banned_ids)):
        raise BadResponse(f"the id {wrong[0]} is banned, or outside of the policy's vocabulary of {vocabulary} ids")


def completion_of(
    request: Request,
    response: Response,
    versions: Mapping[str, int],
    *,
    adapter: str | None = None,
    routing: ExpertRouters | None = None,
    routing_hint: str = "",
    banned_ids: Sequence[int] = (),
    vocabulary: int | None = None,
) -> Completion:
    """The checked response, with policy ``versions`` by the name of the weights.

    ``vocabulary`` is the number of ids that the policy knows. Raises BadResponse if another attempt may succeed, ValueError if none
    can.
    """
    ids, logprobs = response.token_ids, sampled_logprobs(response, request.sampling.max_tokens)
    _check_ids(response, banned_ids, MOST_IDS if vocabulary is None else vocabulary)
    expected = len(request.prompt_ids) + sum(item.num_tokens - 1 for item in request.media)
    if response.prompt_tokens != expected:
        raise ValueError(
            f"trajectory {request.trajectory_id}: the server counted {response.prompt_tokens!r:.50} prompt tokens, but the renderer "
            f"{expected}: they expand or resize images differently."
        )
    token_versions = _versions(response, versions)
    if adapter is not None:
        token_versions = [versions[adapter]] * len(ids)  # a response keeps the adapter that it started with
    experts: list[ExpertRouting | None] = []
    if routing is not None and response.stop_reason != "abort":
        experts = _expert_routing(response, routing, token_versions, expected - request.routing_from, routing_hint)
    return Completion(ids, logprobs, response.stop_reason, token_versions, expected, experts)


def _versions(response: Response, versions: Mapping[str, int]) -> list[int]:
    """Per token, the policy version that sampled it."""
    total = sum(count for _, count in response.weights)
    if total != len(response.token_ids) or any(count < 0 for _, count in response.weights):
        raise BadResponse(f"{len(response.token_ids)} ids came with the policy versions of {total}")
    found: list[int] = []
    for name, count in response.weights:
        if name not in versions:
            raise StaleWeights(f"it was sampled from weights {name!r:.200}, which this run never sent")
        found += [versions[name]] * count
    return found


def _expert_routing(
    response: Response, routing: ExpertRouters, versions: list[int], prompt_tokens: int, hint: str
) -> list[ExpertRouting | None]:
    """The experts of the last ``prompt_tokens`` tokens of the prompt and of the response.

    The last sampled token has none, because it never went through the model. Neither have tokens sampled before a weight update: the
    server computed them again, and returns the experts of the new weights.
    """
    if response.experts is None:
        raise ValueError(f"the server did not return the experts of its tokens: {hint}set train.replay_routing False.")
    layers, top_k = routing.layers, routing.top_k
    computed = prompt_tokens + len(versions) - 1
    if len(response.experts) != computed * layers * top_k:
        raise ValueError(
            f"the server returned {len(response.experts)} experts for {computed} tokens, which is not {top_k} in each of "
            f"{layers} layers."
        )
    experts = response.experts.reshape(-1, layers, top_k)
    current = np.array([True] * prompt_tokens + [version == versions[-1] for version in versions[:-1]], bool)
    known = current & ~(experts == UNKNOWN_EXPERT).all(axis=(1, 2))
    if ((experts[known] < 0) | (experts[known] >= routing.num_experts)).any():
        raise BadResponse(f"the server returned experts other than 0 to {routing.num_experts - 1}")
    computed_with = routing_from_indices(experts)
    return [*(each if kept else None for each, kept in zip(computed_with, known, strict=True)), None]
