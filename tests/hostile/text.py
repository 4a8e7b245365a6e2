"""Texts that a policy, a user, a tool or an MCP server may write, and what must come of them."""

from __future__ import annotations

import asyncio
import base64
import functools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.episodes import a_task, renderer
from testing.hostile import ADDED_TOKENS, HALVES

from vlmrl import ToolEnv, read_tags, read_tool_calls
from vlmrl.config.code import load_object
from vlmrl.env.tools import parts_of, tool_message
from vlmrl.multimodal.messages import tools_as_user
from vlmrl.rollout.history_policies import drop_thinking

MARKUP = (
    *ADDED_TOKENS,
    *HALVES,
    "<answer>",
    "</answer>",
    "<function=add>",
    "<function=",
    "</function>",
    "<parameter=a>",
    "<parameter=",
    "</parameter>",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "\\boxed{",
    "{",
    "}",
)
TEXTS = (
    "",
    " ",
    "\n",
    "\t",
    "a",
    "red",
    "1",
    "-1",
    "1e999",
    "NaN",
    "null",
    "true",
    "é",
    "e\u0301",
    "日本",
    "\u202e",
    "\0",
    "<",
    ">",
    "|",
    "\U00100000",
    "\U00100001",
    "\U00100000\U00100003",
    "\ufffd",
    "\x1c",
    "\u2028",
    "assistant\n",
    "\\",
    "'",
    '"',
)
CALLS = (
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    '{"name": "add", "arguments": {"a": [[[[1]]]]}}',
    '{"name": "add", "arguments": "{\\"a\\": 2}"}',
    '{"name": "add", "arguments": {"a": "\\ud800"}}',
    '{"name": "fly"}',
    '{"name": 5, "arguments": []}',
    "[]",
    '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
    '{"name": "add", "arguments": {"a": ' + "[" * 3000 + "]" * 3000 + "}}",
    "<function=add><parameter=a>1</parameter></function>",
    "<function=add>" + " " * 3000 + "x</function>",
    "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
    "add<arg_key>a</arg_key><arg_value>" + "[" * 3000 + "]" * 3000 + "</arg_value>",
)
WHOLE_CALLS = tuple(f"<tool_call>{call}</tool_call>" for call in CALLS)
ANSWERS = (
    "9",
    "x",
    "a",
    "b",
    "+",
    "-",
    "^9",
    "^{9}",
    "(",
    ")",
    "\\sqrt{",
    "\\frac{1}{",
    "{",
    "}",
    "=",
    "<",
    ",",
    "!",
    "\\pi",
    " ",
)
ROLES = ("user", "user", "tool", "tool", "system", "assistant")
GEO3K = f"{Path(__file__).parents[2]}/envs/geo3k.py"


class Adds(ToolEnv):
    def add(self, a: int) -> str:
        """Add one.

        Args:
            a: To it.
        """
        return str(a + 1)

    functions = (add,)

    def judge(self, response: str) -> float:
        return 0.0


def cases(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: a ``response``, ``messages`` to render, an MCP server's ``blocks``, or an ``answer`` to a problem of geo3k."""
    while True:
        kind = rng.choices(["response", "messages", "blocks", "answer"], [50, 35, 10, 5])[0]
        if kind == "response":
            yield {
                "kind": kind,
                "text": _response(rng),
                "tool_format": rng.choice(["json", "xml", "glm"]),
            }
        elif kind == "messages":
            yield {"kind": kind, "messages": [_message(rng) for _ in range(rng.randint(1, 4))]}
        elif kind == "blocks":
            yield {"kind": kind, "blocks": [_block(rng) for _ in range(rng.randint(0, 3))]}
        else:
            scraps = "".join(rng.choices(ANSWERS, k=rng.randint(1, 30)))
            text = _formula(rng, rng.randint(1, 5)) if rng.random() < 0.6 else scraps
            gold = rng.choice(["15", "\\frac { 3 } { 7 }", "a + b = 90", "20 y^2 - 10 y"])
            yield {"kind": kind, "answer": text, "gold": gold}


def outcome(case: dict[str, Any]) -> str:
    """What came of a case; AssertionError for anything but an answer or an explained error, in time."""
    began = time.thread_time()
    result: str = globals()[f"_{case['kind']}_outcome"](case)
    assert time.thread_time() - began < 10, "a hostile text takes time out of proportion"
    return result


def _formula(rng: random.Random, depth: int) -> str:
    """A formula that parses, of up to ``depth`` levels: towers of powers, factorials, large integers, powers of sums."""
    if not depth:
        return rng.choice(["a", "b", "x", "0", "1", "9", "15", "0.5", "\\pi", "10^{400}", "9" * 60, "99999999"])
    one, two = _formula(rng, depth - 1), _formula(rng, rng.randint(0, depth - 1))
    forms = (
        *(
            f"{one}+{two}",
            f"({one}-{two})",
            f"({one}) \\cdot ({two})",
            f"\\frac{{{one}}}{{{two}}}",
            f"({one})^{{{two}}}",
        ),
        *(f"\\sqrt{{{one}}}", f"({one}+{two}+a+b+x)^9", f"({one})!", f"\\log({one})", f"{one}={two}", f"|{one}|"),
    )
    return rng.choice(forms)


def _text(rng: random.Random, pieces: tuple[str, ...]) -> str:
    chosen = rng.choices(pieces, k=rng.randint(0, 12))
    return "".join(piece * (rng.choice([1, 1, 1, 1, 1, 2, 50]) if len(piece) < 50 else 1) for piece in chosen)


def _response(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(TEXTS) + rng.choice(WHOLE_CALLS) * rng.choice([1, 2, 30]) + rng.choice(TEXTS)
    return _text(rng, (*MARKUP, *TEXTS, *CALLS))


def _message(rng: random.Random) -> dict[str, Any]:
    texts = [_text(rng, (*MARKUP, *TEXTS)) for _ in range(rng.randint(1, 3))]
    role = rng.choice(ROLES)
    if rng.random() < 0.5:
        return {"role": role, "content": texts[0]}
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if role != "assistant" and rng.random() < 0.3:
        parts.insert(rng.randint(0, len(parts)), {"type": "image", "image": "never loaded.png"})
    return {"role": role, "content": parts}


def _block(rng: random.Random) -> dict[str, Any]:
    text = _text(rng, (*MARKUP, *TEXTS))
    junk = base64.b64encode(rng.choice([b"", b"%PDF", b"\x89PNG\r\n\x1a\n", b"GIF89a", rng.randbytes(40)])).decode()
    mime = rng.choice(["image/png", "image/svg+xml", "text/plain", "", "a,b;c"])
    resource = {"uri": rng.choice(["file:///etc/passwd", "http://127.0.0.1:1/x", text]), "mimeType": mime}
    return rng.choice(
        [
            {"type": "text", "text": text},
            {"type": "image", "data": rng.choice([junk, "?", text]), "mimeType": mime},
            {"type": "audio", "data": junk, "mimeType": mime},
            {"type": "resource", "resource": {**resource, "text": text}},
            {"type": "resource", "resource": {**resource, "blob": junk}},
            {"type": "resource_link", "name": text, **resource},
        ]
    )


def _response_outcome(case: dict[str, Any]) -> str:
    text = case["text"]
    for call in read_tool_calls(text, Adds.schemas, case["tool_format"]):
        assert bool(call.problem) or isinstance(call.arguments, dict)
    assert len(read_tags(text, "answer")) <= text.count("</answer>")
    (kept,) = drop_thinking([{"role": "assistant", "content": text}])
    assert len(kept["content"]) <= len(text)
    _geo3k("last_boxed")(text)
    env = Adds(a_task())
    env.tool_format = case["tool_format"]
    observation, done, info = asyncio.run(env.step(text))
    if done:
        return "judged"
    messages = env.format_observation(observation)
    assert isinstance(messages, list) and len(messages) == info["tool_calls"]
    renderer().delta(messages)
    return "explained" if info["tool_errors"] else "called"


def _messages_outcome(case: dict[str, Any]) -> str:
    """The same added tokens as with harmless texts, and the same text."""
    messages = case["messages"]
    data = [message if message["role"] != "assistant" else {**message, "role": "user"} for message in messages]
    for render in (
        renderer().prompt,
        renderer().delta,
        renderer().inline,
        lambda each: renderer().delta(tools_as_user(each)),
    ):
        assert _added(render(data).token_ids) == _added(render(_harmless(data)).token_ids)
    renderer().prompt(messages)
    inside = renderer().inline([{**each, "content": _texts(each)} for each in data]).token_ids
    assert renderer().decode(inside) == "".join(map(_texts, data))
    return "rendered"


def _blocks_outcome(case: dict[str, Any]) -> str:
    from mcp_types import CallToolResult

    from vlmrl.env.mcp import _content

    content = _content(CallToolResult.model_validate({"content": case["blocks"]}))
    message = tool_message(parts_of(content))
    ids = renderer().delta([message]).token_ids
    assert len(_added(ids)) == 5, "a user block with one tool response, and the next response's start"
    return "shown"


def _answer_outcome(case: dict[str, Any]) -> str:
    return "right" if _geo3k("is_right")(case["answer"], case["gold"]) else "wrong"


def _harmless(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def plain(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "text", "text": "x"} if part["type"] == "text" else part

    return [
        {**each, "content": "x" if isinstance(each["content"], str) else list(map(plain, each["content"]))}
        for each in messages
    ]


def _texts(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _added(ids: list[int]) -> list[int]:
    return [token for token in ids if token in _added_tokens()]


@functools.cache
def _added_tokens() -> frozenset[int]:
    return frozenset(renderer().tokenizer.added_tokens_decoder)


@functools.cache
def _geo3k(name: str) -> Any:
    return load_object(f"{GEO3K}:{name}")
