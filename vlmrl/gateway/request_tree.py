"""Finds the earlier response that a request continues, in time linear in the request.

Each message is hashed into a chain, so that equal conversations have equal digests and no conversation is kept. A conversation has
three digests: with its tool calls' ids and its reasoning, without reasoning, for clients that leave it out, and without both, for
clients that rename ids. None depends on the form of the content (a string or text parts), nor on the encoding of images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vlmrl.gateway.chat import ChatResponse
from vlmrl.multimodal.messages import is_image
from vlmrl.types import Message


@dataclass(frozen=True)
class Digests:
    """The digests of a conversation with the ids of its tool calls and its reasoning, with the ids, and without both."""

    whole: bytes
    with_ids: bytes
    without_ids: bytes

    def after(self, content: bytes, ids: Sequence[str], reasoning: str) -> Digests:
        """Of the conversation with one more message. All are the same as long as there are no ids and no reasoning."""
        whole = with_ids = without = _hash(self.without_ids + content)
        if ids or self.with_ids != self.without_ids:
            whole = with_ids = _hash(self.with_ids + _delimited([content, json.dumps(ids).encode()]))
        if reasoning or self.whole != self.with_ids:
            whole = _hash(self.whole + _delimited([content, json.dumps([ids, reasoning]).encode()]))
        return Digests(whole, with_ids, without)


@dataclass(frozen=True)
class Found:
    """What is known of a request: it continues the response of request 3, and its messages from index 5 on are new.

    ``nearest`` is a request that begins with the same ``shared`` messages. ``digests`` are of the messages after them.
    """

    continues: int | None
    new_from: int
    nearest: int | None
    shared: int
    digests: list[Digests]
    last: Digests  # of all messages


class RequestTree:
    """The conversations of one episode: ``tree.find(messages, tools).continues`` is the number of a request, or ``None``."""

    def __init__(self) -> None:
        self._responses: dict[bytes, int] = {}  # by the digests of a request and its response: the newest such request
        self._begun: dict[bytes, int] = {}  # by the digest of first messages: the first request that begins with them

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Found:
        """The request whose messages and response are the first ones of ``messages``, without an assistant message after them.

        The images of ``messages`` are loaded. Among equal responses it is the one with the same tool call ids and reasoning, or with
        the same ids, else the newest.
        """
        digests = _start(tools)
        continues, new_from = None, 0
        nearest = self._begun.get(digests.without_ids)
        shared, unseen = 0, list[Digests]()
        for index, message in enumerate(messages, start=1):
            digests = digests.after(_content(message), _call_ids(message), _reasoning(message))
            if message["role"] == "assistant":
                keys = (digests.whole, digests.with_ids, digests.without_ids)
                continues = next((self._responses[key] for key in keys if key in self._responses), None)
                new_from = 0 if continues is None else index
            begun = self._begun.get(digests.without_ids)
            if begun is None:
                unseen.append(digests)
            else:
                nearest, shared = begun, index
        return Found(continues, new_from, nearest, shared, unseen, digests)

    def add(self, number: int, found: Found, response: ChatResponse) -> None:
        """Request ``number`` has got its ``response``."""
        message = message_of_response(response)
        answered = found.last.after(_content(message), _call_ids(message), response.reasoning.strip())
        for digest in (answered.whole, answered.with_ids, answered.without_ids):
            self._responses[digest] = number
        for digests in (*found.digests, answered):
            self._begun.setdefault(digests.without_ids, number)


def message_of_response(response: ChatResponse) -> Message:
    """The response as a client sends it back, without its reasoning."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in response.tool_calls
    ]
    return {"role": "assistant", "content": response.content} | ({"tool_calls": calls} if calls else {})


def _start(tools: Sequence[dict[str, Any]]) -> Digests:
    digest = _hash(json.dumps(list(tools)).encode())
    return Digests(digest, digest, digest)


def _content(message: Message) -> bytes:
    """What of a message the model sees, in one form: no ids, no reasoning."""
    head, calls = message["role"], message.get("tool_calls")
    if calls or message.get("name"):
        functions = [[call["function"]["name"], _plain(call["function"]["arguments"])] for call in calls or ()]
        head = json.dumps([head, message.get("name"), functions], sort_keys=True)
    return _delimited([head.encode(), *_pieces(message.get("content") or "")])


def _pieces(content: str | list[dict[str, Any]]) -> Iterator[bytes]:
    """A message's texts and images in order. Texts that follow each other are one."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for shown, run in groupby(content, is_image):
        if shown:
            yield from (b"image " + part["image"].id.encode() for part in run)
        else:
            text = "".join(part.get("text") or "" for part in run)
            if text:
                yield b"text " + text.encode(errors="surrogatepass")


def _call_ids(message: Message) -> list[str]:
    own = [message["tool_call_id"]] if message.get("tool_call_id") else []
    return own + [str(call.get("id")) for call in message.get("tool_calls") or ()]


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()


def _plain(value: Any) -> Any:
    """JSON in which ``1.0`` is ``1``: clients write it as either. ``1e308`` stays, whose 309 digits take long to write."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _delimited(parts: Sequence[bytes]) -> bytes:
    """The parts as one string in which each one ends clearly: ``2:ab1:c``."""
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
