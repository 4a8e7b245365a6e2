"""Samples messages from a model behind an OpenAI-compatible chat API, with retries, rate limits and a budget of tokens.

    api = ChatEngine(ApiModel("https://api.openai.com/v1", "gpt-5-mini"))
    response = await api.complete([{"role": "user", "content": "2+2?"}], [], SamplingParams(max_tokens=256), seconds=60.0)

Its responses have no token ids and logprobs, so they cannot be trained on by reinforcement learning. Tokens are counted as the API
reports them.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from yarl import URL

from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.types import Completion, Message
from vlmrl.utils.http import (
    HttpResponse,
    RefusedError,
    RetryableError,
    async_retrying,
    excerpt,
    http_loop,
    parse_json,
    send_request,
)
from vlmrl.utils.tokens import bearer_headers

LONGEST_PAUSE = 30.0  # seconds between two attempts, unless the API asks for more
LONGEST_WAIT = 3600.0  # seconds that it may ask for: then all requests wait, and an episode may fail
MOST_BYTES = 8 * 2**20  # of one response, which is read in the run's event loop
MOST_TOKENS = 2**32  # of one response, as the API reports them
PASSING = (408, 409, 425, 429)  # statuses that another attempt may not meet, besides 5xx
WRONG_ACCESS = (401, 403, 404)  # the key, the address or the model is wrong: no request will succeed
STOP_REASONS: Mapping[Any, Literal["stop", "length"]] = {"length": "length", "max_tokens": "length"}


class BudgetSpentError(ValueError):
    """The tokens that the API may spend are spent. An episode that this stops has not failed: it is left to play."""


@dataclass(frozen=True)
class ApiModel:
    """A model behind a chat API: ``ApiModel("https://api.openai.com/v1", "gpt-5-mini")``."""

    url: str
    """The API's base URL, without ``/chat/completions``."""
    name: str
    """The model's name there."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key, which is in no config, log or command line."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request; ``None`` leaves out one that would be sent."""
    budget: int | None = None
    """Tokens of prompts and responses that may be spent; no request begins once they are."""


@dataclass(frozen=True)
class ApiResponse:
    """A response, with the counts that the API reports: ``ApiResponse({"role": "assistant", "content": "4"}, "stop", 12, 1)``."""

    message: Message
    """Content as a string, and ``tool_calls`` in OpenAI's form if it calls tools."""
    stop_reason: Literal["stop", "length"]
    prompt_tokens: int | None
    response_tokens: int | None


class ChatEngine:
    """An engine whose requests are messages: see :meth:`complete`.

    ``spent`` counts the tokens so far, ``retries`` the attempts that failed.
    """

    policy_version = 0

    def __init__(self, model: ApiModel) -> None:
        self.model = model
        self.spent = 0
        self.retries = 0
        self._headers = {"Content-Type": "application/json", **bearer_headers(model.key_variable)}
        self._not_before = 0.0  # of the next request, by time.monotonic(): a rate limit holds for all of them

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], sampling: SamplingParams, seconds: float
    ) -> ApiResponse:
        """One response to ``messages`` in the API's form: in ``seconds`` with all pauses and retries, each attempt in half of it.

        Raises:
            BudgetSpentError: no token is left of the budget.
            EngineError: no usable response in time.
            RefusedError: the API refuses this request, for example its length.
            ValueError: it refuses every request, since the key, the address or the model is wrong.
        """
        content = await asyncio.to_thread(_encoded, self._body(messages, tools, sampling))
        try:
            async with asyncio.timeout(seconds):
                retry = async_retrying(patience=seconds, longest_pause=LONGEST_PAUSE)
                return await retry(self._attempt, content, seconds / 2)
        except (RetryableError, TimeoutError) as error:
            raise EngineError(
                f"{self.model.url}: no usable response in {seconds:g} s: {str(error) or 'timeout'}"
            ) from error

    def _body(self, messages: Sequence[Message], tools: Sequence[Any], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model.name, "messages": list(messages), "max_tokens": sampling.max_tokens}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if tools:
            body["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return {name: value for name, value in (body | dict(self.model.body)).items() if value is not None}

    async def _attempt(self, content: bytes, seconds: float) -> ApiResponse:
        while (pause := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        if self.model.budget is not None and self.spent >= self.model.budget:
            raise BudgetSpentError(f"--budget {self.model.budget}: {self.spent} tokens are spent.")
        url, times = URL(f"{self.model.url.rstrip('/')}/chat/completions"), aiohttp.ClientTimeout(total=seconds)
        try:
            sending = send_request("POST", url, content, self._headers, times, limit=MOST_BYTES)
            response = await http_loop().run(sending)
            self._check_status(response)
            answer = read_response(response.body)
        except RetryableError:
            self.retries += 1
            raise
        if self.model.budget is not None and answer.prompt_tokens is None:
            raise ValueError(f"--budget needs an API that reports its tokens, but {self.model.url} sends no `usage`.")
        self.spent += (answer.prompt_tokens or 0) + (answer.response_tokens or 0)
        return answer

    def _check_status(self, response: HttpResponse) -> None:
        if response.status == 200:
            return
        reason = f"{response.status} {excerpt(response.body, 300)}"
        if response.status in PASSING or response.status >= 500:
            after = retry_after(response.headers)
            self._not_before = max(self._not_before, time.monotonic() + after)
            raise RetryableError(reason, after)
        if response.status in WRONG_ACCESS:
            remedy = (
                f"check the URL, the model's name and the key in the environment variable {self.model.key_variable}"
            )
            raise ValueError(f"--api {self.model.url} --model {self.model.name}: {remedy}. The API says: {reason}")
        raise RefusedError(reason, response.status)

    def report(self) -> str:
        """What has been spent so far, in a line."""
        return f"{self.model.name}: {self.spent} tokens spent, {self.retries} requests sent again"

    # An engine of token ids, which it is not:

    async def generate(self, request: Request) -> Completion:
        raise EngineError(f"{self.model.url} takes messages, not token ids: {request.trajectory_id} cannot be sampled.")

    def release(self, trajectory_id: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def close(self) -> None: ...


def read_response(body: bytes) -> ApiResponse:
    """The response in the body of a chat completion. Raises RetryableError if there is none."""
    try:
        found = parse_json(body)
        choice, usage = found["choices"][0], found.get("usage") or {}
        message = choice["message"]
        content = message.get("content") or message.get("refusal") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        shown: Message = {"role": "assistant", "content": str(content)}
        if calls := [_call(call) for call in message.get("tool_calls") or ()]:
            shown["tool_calls"] = calls
        json.dumps(shown, ensure_ascii=False).encode()  # raises for half a surrogate pair
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        known = [count if isinstance(count, int) and 0 <= count <= MOST_TOKENS else None for count in counts]
        return ApiResponse(shown, STOP_REASONS.get(choice.get("finish_reason"), "stop"), *known)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RetryableError(f"no chat completion ({type(error).__name__}: {error}): {excerpt(body, 200)!r}") from error


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or ""
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call["id"]),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": arguments},
    }


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds of a header ``Retry-After``, which has seconds or a date, at most LONGEST_WAIT; 0 without one."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_WAIT)


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, allow_nan=False).encode()
