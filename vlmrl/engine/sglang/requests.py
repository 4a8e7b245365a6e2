"""The body of a request to SGLang's `/generate`, and its response."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from vlmrl.engine.server import TAIL
from vlmrl.engine.server_backend import BAN, Attempt, EncodedBody, Scored, ScoreRequest
from vlmrl.engine.server_response import BadResponse, Response, StopReason, stop_reason_of

HELD = b'"by its hash"'  # no base64, no path and no address
NOT_A_NUMBER = "NaN happened"  # SGLang reports this as a matched stop string


def request_body(attempt: Attempt) -> EncodedBody:
    """JSON, in which images are parts that requests share.

    SGLang reads no image whose hash names one in its preprocess cache. What stands for an image that it should hold is no image, so
    that it refuses the request if it does not.
    """
    fields: dict[str, Any] = {"sampling_params": _sampling(attempt)}
    if attempt.adapter is not None:
        fields["lora_path"] = attempt.adapter
    if attempt.expert_routing:
        fields |= {"return_routed_experts": True, "routed_experts_start_len": attempt.request.routing_from}
    return _body(attempt, fields)


def score_request_body(attempt: Attempt, request: ScoreRequest) -> EncodedBody:
    """JSON as above. SGLang computes logprobs from ``logprob_start_len`` on, and reports none for the first token there."""
    fields = {
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "logprob_start_len": max(0, request.length - len(request.tokens) - 1),
        "top_logprobs_num": request.most_likely,
    }
    return _body(attempt, fields)


def _body(attempt: Attempt, fields: dict[str, Any]) -> EncodedBody:
    images = attempt.images
    fields |= {"rid": attempt.id, "input_ids": list(attempt.request.prompt_ids), "return_logprob": True}
    if images:
        fields["mm_content_hashes"] = [f"sha256:{image.sha256}" for image in images]
    return EncodedBody.of(fields, "image_data", [[HELD if image.json is None else image.json] for image in images])


def _sampling(attempt: Attempt) -> dict[str, Any]:
    params = attempt.request.sampling
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop": list(params.stop),
        "stop_token_ids": sorted(attempt.stop_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logit_bias": {str(index): BAN for index in attempt.banned_ids},
    }


def parse_response(attempt: Attempt, response: dict[str, Any]) -> Response:
    """Raises BadResponse, LookupError or TypeError for a response of another form, ValueError for an unknown stop id."""
    meta, ids = response["meta_info"], list(response["output_ids"])
    stop_reason = _stop_reason(meta["finish_reason"], attempt.stop_ids)
    experts = meta.get("routed_experts") if attempt.expert_routing else None
    try:
        return Response(
            token_ids=ids,
            stop_reason=stop_reason,
            logprobs=[(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"][: len(ids)]],
            prompt_tokens=meta["prompt_tokens"],
            weights=[(span["version"], span["end"] - span["start"]) for span in meta["weight_versions"]],
            experts=None if experts is None else np.frombuffer(base64.b64decode(experts), "<i4"),
        )
    except ValueError as error:  # of a tuple's length, or of base64
        raise BadResponse(f"a response of another form: {error}") from error


def parse_scored(request: ScoreRequest, response: dict[str, Any]) -> Scored:
    """Raises LookupError or TypeError for a response of another form."""
    meta, count = response["meta_info"], len(request.tokens)
    most_likely = meta["input_top_logprobs"][-count:] if request.most_likely else [[]] * count
    return Scored(
        meta["prompt_tokens"],
        [(entry[0], entry[1]) for entry in meta["input_token_logprobs"][-count:]],
        [[(entry[0], entry[1]) for entry in entries or ()] for entries in most_likely],
    )


def _stop_reason(finish: dict[str, Any], stop_ids: frozenset[int]) -> StopReason:
    reason, matched = finish["type"], finish.get("matched")
    if reason == "abort" and finish.get("status_code"):
        raise BadResponse(f"the server aborted it: {str(finish.get('message'))[:TAIL]}")
    if matched == NOT_A_NUMBER:
        raise BadResponse("the server's logits were not finite")
    return stop_reason_of(reason, matched, stop_ids)
