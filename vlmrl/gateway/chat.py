"""A chat request and its response, between an HTTP format (OpenAI's, Anthropic's) and the episode that answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmrl.types import Message


class ChatError(Exception):
    """A request that is answered with an error: ``ChatError(400, "n", "n must be 1, but it is 4.")``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # the field that is wrong, or a word such as `max_turns`
        self.message = message


@dataclass(frozen=True)
class ChatRequest:
    """One request of an agent, in one form for all HTTP formats.

    ``messages`` have the roles system, user, assistant and tool. Content is a string, or a list of text and image parts whose images
    are image sources. A tool message has ``tool_call_id``. An assistant message may have ``tool_calls``::

        [{"id": "call_1", "type": "function", "function": {"name": "zoom", "arguments": {"bbox": [0, 0, 500, 500]}}}]
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON schemas in OpenAI's form
    max_tokens: int | None = None  # of the response
    stop: tuple[str, ...] = ()
    seed: int | None = None
    reads_calls: bool = True  # False: a call in the response stays text (tool_choice none)
    overridden: tuple[str, ...] = ()  # sampling parameters of the client in place of which the run's are used
    on_rendered: Callable[[], object] = field(default=bool, repr=False, compare=False)
    """Called when the prompt is made, and has no more tokens than a prompt may have."""


@dataclass(frozen=True)
class IssuedCall:
    """A tool call of a response, with the id that the agent names in its result: ``IssuedCall("call_3f", "zoom", {"k": 1})``."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ChatResponse:
    """The response to a request.

    ``content`` is the sampled text without its end-of-turn token, its reasoning, its matched stop string and its parsed calls.
    """

    id: str  # unique in the process
    content: str
    reasoning: str  # the text between <think> and </think>
    tool_calls: tuple[IssuedCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int]  # as sampled
    tokens: list[str]  # the text of each, for logprobs in responses
    logprobs: list[float]
    prompt_tokens: int
    stop: str | None = None  # the client's stop string that ended it
