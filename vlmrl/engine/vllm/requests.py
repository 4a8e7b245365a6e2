"""The body of a request to vLLM's `/inference/v1/generate`, and its response."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import numpy as np

from vlmrl.engine.image_files import EncodedImage
from vlmrl.engine.server_backend import BAN, Attempt, EncodedBody, Scored, ScoreRequest
from vlmrl.engine.server_response import UNKNOWN_EXPERT, BadResponse, Response, stop_reason_of

NOT_A_NUMBER = -9999.0  # the logprob that vLLM reports instead of one that is not finite
DATA_URI = b'"data:'


def generate_body(attempt: Attempt) -> EncodedBody:
    """JSON, in which images are parts that requests share."""
    fields: dict[str, Any] = {"sampling_params": _sampling_params(attempt)}
    if attempt.adapter is not None:
        fields["model"] = attempt.adapter
    return _body(attempt, fields)


def score_body(attempt: Attempt, request: ScoreRequest) -> EncodedBody:
    """JSON as above. vLLM samples at least one token, and reports on all tokens of the prompt."""
    return _body(attempt, {"sampling_params": {"max_tokens": 1, "prompt_logprobs": request.most_likely}})


def _body(attempt: Attempt, fields: dict[str, Any]) -> EncodedBody:
    fields |= {"request_id": attempt.id, "token_ids": list(attempt.request.prompt_ids)}
    return EncodedBody.of(fields, "content_parts", list(map(_image_part, attempt.images)))


def _image_part(image: EncodedImage) -> list[bytes]:
    """An image by its hash, under which vLLM keeps it processed, and its data or the address of its file."""
    assert image.json is not None
    address = [image.json] if image.json.startswith(DATA_URI) else [b'"file://', image.json[1:]]
    return [b'{"type":"image_url","uuid":"%s","url":' % image.sha256.encode(), *address, b"}"]


def _sampling_params(attempt: Attempt) -> dict[str, Any]:
    request = attempt.request
    params = request.sampling
    fields: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "stop": list(params.stop),
        "stop_token_ids": sorted(attempt.stop_ids),
        "ignore_eos": True,  # only the ids above end a response, not those of the model's generation config
        "include_stop_str_in_output": True,  # or the text that is searched for stop strings lags behind
        "skip_special_tokens": False,
        "logprobs": 0,  # the sampled token's alone
    }
    if attempt.device != "cpu":  # vLLM 0.32 on a CPU dies of a seed once it computes a prompt in two parts
        fields["seed"] = params.seed
    if attempt.expert_routing:
        fields["routed_experts_prompt_start"] = request.routing_from
    if attempt.banned_ids:
        fields["logit_bias"] = {str(index): BAN for index in attempt.banned_ids}
    return fields


def response_of(attempt: Attempt, response: dict[str, Any]) -> Response:
    """Raises BadResponse, LookupError or TypeError for a response of another form, ValueError for an unknown stop id."""
    choice = response["choices"][0]
    ids = list(choice["token_ids"] or [])
    entries = [(entry["logprob"], entry["token_id"]) for entry in choice["logprobs"]["content"] or []]
    if any(logprob == NOT_A_NUMBER for logprob, _ in entries):
        raise BadResponse("the server's logits were not finite")
    weights = [(span["version"], span["end"] - span["start"]) for span in choice["weight_versions"] or []]
    experts = choice.get("routed_experts") if attempt.expert_routing else None
    return Response(
        token_ids=ids,
        logprobs=entries,
        stop_reason=stop_reason_of(choice["finish_reason"], choice.get("stop_reason"), attempt.stop_ids),
        prompt_tokens=response["usage"]["prompt_tokens"],
        weights=weights,
        experts=None if experts is None else _experts(experts, [count for _, count in weights if count]),
    )


def scored_of(request: ScoreRequest, response: dict[str, Any]) -> Scored:
    """Raises BadResponse, LookupError or TypeError for a response of another form.

    vLLM lists the most likely ids of each place, and the prompt's own id if it is none of them, with their ranks from 1 on.
    """
    logprobs: list[tuple[float | None, int]] = []
    most_likely = []
    for token, entries in zip(request.tokens, response["prompt_logprobs"][-len(request.tokens) :], strict=False):
        logprobs.append((None, token) if token < 0 else (entries[str(token)]["logprob"], token))
        ranked = [(e["logprob"], id) for id, e in (entries or {}).items() if e["rank"] <= request.most_likely]
        try:
            most_likely.append([(logprob, int(id)) for logprob, id in ranked])
        except ValueError as error:
            raise BadResponse(f"an id of another form: {error}") from error
    return Scored(response["usage"]["prompt_tokens"], logprobs, most_likely)


def _experts(encoded: str, counts: list[int]) -> np.ndarray:
    """A `.npy` file of ``[tokens, layers, top_k]`` in base64. ``counts`` are the tokens that each set of weights sampled.

    After a weight update vLLM computes all tokens again, but returns the new experts only from the last sampled one on.
    """
    try:
        experts: np.ndarray = np.load(BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.int32)
    except Exception as error:  # its header may claim any size, or be no Python: tokenize.TokenError
        raise BadResponse(f"experts of another form: {error}") from error
    if len(counts) > 1:
        experts[: len(experts) - counts[-1]] = UNKNOWN_EXPERT
    return experts.ravel()
