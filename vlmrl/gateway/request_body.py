"""The body of a request as JSON, and rules for its fields. Invalid input gets an error response, never a crash."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn, TypeVar

from vlmrl.env.tool_calls import MAX_DEPTH, is_deep
from vlmrl.gateway.chat import ChatError, ChatRequest
from vlmrl.multimodal.messages import MOST_VALUES, has_many_values
from vlmrl.types import Message
from vlmrl.utils.json_files import json_body

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters; each sampled token is compared with their tokens
MAX_SEED = 2**63
MAX_MODEL_LENGTH = 1024  # characters of a model's name, which each event of a stream repeats
MAX_KEY_LENGTH = 256  # characters of a reward's id, or of a tool call's
# Characters of reasoning and calls in a request: they have no tokens where a template does not show them.
MAX_BESIDE = 2**22
FORM_REMEDY = "ask for the form in the prompt or offer it as a tool, since the run samples from the policy alone"

Images = TypeVar("Images")


@dataclass(frozen=True)
class ParsedRequest:
    """A request of any API, and how its response is sent."""

    chat: ChatRequest
    model: str  # as the client named it
    stream: bool = False
    include_usage: bool = False  # in the stream
    logprobs: bool = False


def refuse(field: str, rule: str, value: Any, remedy: str = "") -> NoReturn:
    """Raise a ChatError with status 400: ``n must be 1, but it is 4: send one request for each response.``"""
    shown = reprlib.repr(value)[:100]
    raise ChatError(400, field, f"{field} must be {rule}, but it is {shown}{': ' + remedy if remedy else ''}.")


def read_json(content: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ChatError for anything else, also for NaN and for halves of surrogate pairs."""
    try:
        return json_body(content)
    except ValueError as error:
        raise ChatError(400, "body", str(error)) from None


def text_field(value: Any, field: str) -> str:
    if not isinstance(value, str):
        refuse(field, "a string", value)
    return value


def id_field(value: Any, field: str) -> str:
    """A tool call's id."""
    if not isinstance(value, str) or len(value) > MAX_KEY_LENGTH:
        refuse(field, f"a string of at most {MAX_KEY_LENGTH} characters", value)
    return value


def object_field(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(field, "an object", value)
    return value


def list_field(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        refuse(field, "a list", value)
    return value


def flag_field(value: Any, field: str) -> bool:
    if not isinstance(value, bool | None):
        refuse(field, "true or false", value)
    return bool(value)


def count_field(value: Any, field: str) -> int | None:
    """A whole number of at least 1, or ``None``."""
    if value is not None and (type(value) is not int or value < 1):
        refuse(field, "a whole number of at least 1", value)
    return value


def model_field(value: Any) -> str:
    """The model's name, ``""`` if there is none."""
    name = text_field(value or "", "model")
    if len(name) > MAX_MODEL_LENGTH:
        refuse("model", f"a name of at most {MAX_MODEL_LENGTH} characters", name)
    return name


def seed_field(value: Any) -> int | None:
    if value is not None and (type(value) is not int or abs(value) > MAX_SEED):
        refuse("seed", "a whole number of at most 64 bits", value)
    return value


def stop_field(value: Any, field: str) -> tuple[str, ...]:
    """Stop strings, one or a list of them."""
    stops = [value] if isinstance(value, str) else [] if value is None else list_field(value, field)
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        refuse(field, f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", value)
    return tuple(stops)


def check_depth(value: Any, field: str) -> None:
    """Raises ChatError for a value that is nested so deeply that code which follows it would exceed Python's stack."""
    if is_deep(value):
        raise ChatError(400, field, f"{field} must not be nested more than {MAX_DEPTH} levels deep.")


def refuse_fields(body: Mapping[str, Any], refused: Mapping[str, tuple[Sequence[Any], str]]) -> None:
    """Raise ChatError for a field that would change the response in a way that a run cannot follow.

    ``refused`` has for each name the values that change nothing, and what to do instead.
    """
    for field in refused.keys() & body.keys():
        harmless, remedy = refused[field]
        value = body[field]
        if value is not None and value not in harmless:
            rule = " or ".join(json.dumps(each) for each in harmless) if harmless else "left out"
            refuse(field, rule, value, remedy)


def content_field(
    value: Any, field: str, part: Callable[[dict[str, Any], str, Images], dict[str, Any]], images: Images
) -> str | list[dict[str, Any]]:
    """A message's content: a string, or a list of parts, each as ``part(object, its field, images)``, as :func:`one_text`.

    ``images`` is ``None`` where it may have none.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(field, "a string or a list of parts", value)
    places = [f"{field}[{i}]" for i in range(len(value))]
    return one_text([part(object_field(each, place), place, images) for each, place in zip(value, places, strict=True)])


def one_text(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as the content of a message: a string if they hold no image. Texts that follow each other are one."""
    joined: list[dict[str, Any]] = []
    for kind, run in groupby(parts, lambda part: part["type"]):
        same = list(run)
        joined += [{"type": "text", "text": "".join(part["text"] for part in same)}] if kind == "text" else same
    if all(part["type"] == "text" for part in joined):
        return "".join(part["text"] for part in joined)
    return joined


def size_beside(messages: Sequence[Message]) -> int:
    """The characters of what messages hold beside their contents: reasoning and calls. They are kept with the turn of a request."""
    found = 0
    for message in messages:
        calls = message.get("tool_calls")
        found += len(message.get("reasoning_content") or "")
        found += len(json.dumps(calls, ensure_ascii=False)) if calls else 0
    return found


def check_beside(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
    """Raise ChatError for messages with more than MAX_BESIDE characters beside their contents, and for calls or tools with too many
    values."""
    for field, shown in (("messages", [message.get("tool_calls") for message in messages]), ("tools", tools)):
        if has_many_values(shown):
            what = "in their calls " * (field == "messages")
            raise ChatError(400, field, f"{field} must have at most {MOST_VALUES} values {what}together: send fewer.")
    if (size := size_beside(messages)) > MAX_BESIDE:
        rule = (
            f"must hold at most {MAX_BESIDE} characters of reasoning and calls, but they hold {size}: send less back."
        )
        raise ChatError(400, "messages", f"messages {rule}")
