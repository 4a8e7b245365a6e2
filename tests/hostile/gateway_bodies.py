"""Hostile requests of agents: bodies of all APIs, tool schemas and stop strings, most of them nearly right, and responses to them."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from hostile.test_payloads import PNG, PNG_URI, schema
from testing.hostile import CONTROL, NAMES, ODD, PLACES, text, value

Body = dict[str, Any]
ROLES = ("user", "user", "user", "assistant", "tool", "system", "developer")


def words(rng: random.Random) -> str:
    """A text that is often short, sometimes hostile."""
    return rng.choice(("", "hello", " a\n", "e\u0301", text(rng, 1), text(rng, 2)))


def often(rng: random.Random, right: Any, share: float = 0.97) -> Any:
    return right if rng.random() < share else value(rng)


def arguments(rng: random.Random) -> Body:
    return {rng.choice(("a", "bbox", "text", "", "é", "<tool_call>")): value(rng, 2) for _ in range(rng.randint(0, 3))}


def nested(rng: random.Random) -> Any:
    """Something deep, in either kind of bracket."""
    made: Any = {}
    for _ in range(rng.choice((1, 3, 3, 9, 40, 400))):
        made = [made] if rng.random() < 0.5 else {"properties": made}
    return made


def sent(rng: random.Random, body: Body) -> bytes:
    """The bytes of a body. Most have no number that JSON lacks, for which all would be refused."""
    return json.dumps(body if rng.random() < 0.05 else _finite(body)).encode()


def _finite(made: Any) -> Any:
    if isinstance(made, dict):
        return {key: _finite(item) for key, item in made.items()}
    if isinstance(made, list):
        return [_finite(item) for item in made]
    return made if not isinstance(made, float) or math.isfinite(made) else 0.5


def openai_call(rng: random.Random) -> Body:
    written: Any = json.dumps(arguments(rng))
    written = rng.choice((written, written, written, "", "{", "[1]", "[" * 2000, arguments(rng)))
    function = {"name": often(rng, rng.choice(NAMES)), "arguments": written}
    return {"id": often(rng, rng.choice(("call_1", "call_2", ""))), "type": "function", "function": function}


def openai_part(rng: random.Random) -> Body:
    if rng.random() < 0.7:
        return {"type": "text", "text": often(rng, words(rng))}
    address = rng.choice((PNG_URI, PNG_URI, PNG_URI, rng.choice(PLACES), "data:image/png;base64,", "\0"))
    return {"type": "image_url", "image_url": rng.choice(({"url": address, "detail": "low"}, address))}


def openai_message(rng: random.Random) -> Body:
    role = rng.choice(ROLES)
    content: Any = words(rng) if rng.random() < 0.6 else [openai_part(rng) for _ in range(rng.randint(0, 3))]
    message: Body = {"role": often(rng, role), "content": often(rng, content)}
    if role == "assistant" and rng.random() < 0.6:
        message |= {"content": None, "tool_calls": [openai_call(rng) for _ in range(rng.randint(0, 3))]}
    if role == "assistant" and rng.random() < 0.3:
        message["reasoning_content"] = often(rng, words(rng))
    if role == "tool":
        message["tool_call_id"] = often(rng, "call_1")
    return message


def tool(rng: random.Random, is_openai: bool) -> Body:
    """A tool whose schema is hostile: deep, wrong, self-referring, or full of tokens."""
    form = rng.choice((schema(rng), schema(rng), nested(rng), {"type": "object", "properties": arguments(rng)}))
    name, description = often(rng, rng.choice((*NAMES, "f", "f"))), often(rng, words(rng))
    if not is_openai:
        return {"name": name, "description": description, "input_schema": often(rng, form)}
    function = {"name": name, "description": description, "parameters": form, "strict": True}
    return {"type": "function", "function": often(rng, function)}


def tools(rng: random.Random, is_openai: bool) -> list[Body]:
    return [tool(rng, is_openai) for _ in range(rng.choice((0, 1, 1, 2, 5)))]


def openai_body(rng: random.Random) -> Body:
    body: Body = {"messages": [openai_message(rng) for _ in range(rng.choice((1, 1, 2, 3, 6)))]}
    if rng.random() < 0.5:
        body["tools"] = tools(rng, is_openai=True)
    fields: Body = {
        "stop": stops(rng),
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "tool_choice": rng.choice(("auto", "none", "required")),
        "seed": rng.choice((0, -5, 2**63)),
        "temperature": value(rng, 0),
        "response_format": {"type": "text"},
        "n": 1,
        "metadata": value(rng),
        "unknown": value(rng),
    }
    return body | {name: often(rng, fields[name]) for name in rng.sample(sorted(fields), rng.randint(0, 4))}


def responses_part(rng: random.Random) -> Body:
    if rng.random() < 0.7:
        kind = rng.choice(("input_text", "input_text", "output_text", "refusal"))
        return {"type": kind, "refusal" if kind == "refusal" else "text": often(rng, words(rng))}
    return {
        "type": "input_image",
        "image_url": rng.choice((PNG_URI, PNG_URI, rng.choice(PLACES), None)),
        "detail": "low",
    }


def responses_item(rng: random.Random) -> Body:
    kind = rng.choice(("message", "message", "message", "function_call", "function_call_output", "reasoning"))
    content: Any = words(rng) if rng.random() < 0.6 else [responses_part(rng) for _ in range(rng.randint(0, 3))]
    if kind == "function_call":
        call = openai_call(rng)
        return {"type": kind, "id": "fc_1", "call_id": call["id"], **call["function"], "status": "completed"}
    if kind == "function_call_output":
        return {"type": kind, "call_id": often(rng, "call_1"), "output": often(rng, content)}
    if kind == "reasoning":
        thoughts = [{"type": "reasoning_text", "text": often(rng, words(rng))} for _ in range(rng.randint(0, 2))]
        return {"type": kind, "id": "rs_1", rng.choice(("summary", "content")): often(rng, thoughts)}
    role = rng.choice(("user", "user", "assistant", "developer", "system"))
    return {"role": often(rng, role), "content": often(rng, content)} | rng.choice(({}, {"type": kind}))


def responses_body(rng: random.Random) -> Body:
    items: Any = [responses_item(rng) for _ in range(rng.choice((1, 1, 2, 3, 6)))]
    body: Body = {"input": words(rng) if rng.random() < 0.1 else items}
    if rng.random() < 0.5:
        made = tools(rng, is_openai=True)
        body["tools"] = [
            {"type": "function"} | (tool["function"] if isinstance(tool["function"], dict) else {}) for tool in made
        ]
    fields: Body = {
        "instructions": words(rng),
        "max_output_tokens": 9,
        "stream": True,
        "include": ["message.output_text.logprobs"],
        "tool_choice": rng.choice(("auto", "none", "required")),
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "truncation": "disabled",
        "metadata": value(rng),
        "unknown": value(rng),
    }
    return body | {name: often(rng, fields[name]) for name in rng.sample(sorted(fields), rng.randint(0, 4))}


def anthropic_block(rng: random.Random, role: str) -> Body:
    if role == "assistant":
        use = {"type": "tool_use", "id": "call_1", "name": rng.choice(NAMES), "input": often(rng, arguments(rng))}
        return rng.choice(
            ({"type": "text", "text": words(rng)}, {"type": "thinking", "thinking": words(rng), "signature": ""}, use)
        )
    kind = rng.randrange(4)
    if kind == 0:
        source = {"type": "base64", "media_type": "image/png", "data": rng.choice((PNG, PNG, "AAAA", "%"))}
        return {"type": "image", "source": often(rng, source)}
    if kind == 1:
        result = rng.choice((words(rng), [{"type": "text", "text": words(rng)}], None))
        return {"type": "tool_result", "tool_use_id": often(rng, "call_1"), "content": result, "is_error": True}
    return {"type": "text", "text": often(rng, words(rng))}


def anthropic_message(rng: random.Random) -> Body:
    role = rng.choice(("user", "user", "assistant"))
    blocks = [anthropic_block(rng, role) for _ in range(rng.randint(0, 4))]
    return {"role": often(rng, role), "content": often(rng, rng.choice((blocks, words(rng))))}


def anthropic_body(rng: random.Random) -> Body:
    body: Body = {"max_tokens": often(rng, rng.choice((1, 50, 10**9)))}
    body["messages"] = [
        *(anthropic_message(rng) for _ in range(rng.choice((0, 1, 4)))),
        {"role": "user", "content": "?"},
    ]
    if rng.random() < 0.5:
        body["tools"] = tools(rng, is_openai=False)
    fields: Body = {
        "system": rng.choice((words(rng), [{"type": "text", "text": words(rng), "cache_control": {}}])),
        "stop_sequences": stops(rng),
        "stream": True,
        "tool_choice": {"type": rng.choice(("auto", "any", "none"))},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "top_k": value(rng, 0),
        "unknown": value(rng),
    }
    return body | {name: often(rng, fields[name]) for name in rng.sample(sorted(fields), rng.randint(0, 4))}


def stops(rng: random.Random) -> Any:
    """Stop strings that are texts of responses, tokens and halves of them, whitespace, or too long."""
    one = (*CONTROL, *ODD, " ", "\n", "a", "}", '"', "e\u0301", "\u0301", "x" * 256, "x" * 257, "", "\U00100000")
    return rng.choice((rng.choice(one), [rng.choice(one) for _ in range(rng.choice((0, 1, 3, 16, 17)))]))


def response(rng: random.Random) -> str:
    """A response of the policy: thoughts, calls that parse or do not, texts between them."""
    calls = [json.dumps({"name": rng.choice((*NAMES, "f")), "arguments": arguments(rng)}) for _ in range(2)]
    pieces = ("<think>", "</think>", "\n", "So: ", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls))
    return "".join(rng.choice((*pieces, *pieces, words(rng))) for _ in range(rng.randint(0, 5)))[:2000]
