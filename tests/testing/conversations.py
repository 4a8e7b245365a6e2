"""Generated conversations, and the loss mask that comparing whole renderings gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from testing.templates import full_text, ids_of
from vlmrl.multimodal.renderer import Renderer

WORDS = ["red", "green", "blue", "the", "zoom", "picture", "<b>", "box", "500", "answer,", "yes!", "ü", "北"]
ZOOM = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {"x": {}}}}}


def conversation(dice: random.Random, *, images: bool, thinks: bool, calls: bool) -> list[dict[str, Any]]:
    """Up to four responses to users and to tools, with images in any message but a response."""

    def text() -> str:
        return " ".join(dice.choices(WORDS, k=dice.randint(1, 6)))

    def shown() -> Any:
        if not images or dice.random() < 0.4:
            return text()
        parts = [{"type": "text", "text": text()}, {"type": "image", "image": f"{dice.randrange(9)}.png"}]
        dice.shuffle(parts)
        return parts

    messages = [{"role": "system", "content": text()}] * dice.randrange(2) + [{"role": "user", "content": shown()}]
    for _ in range(dice.randint(1, 4)):
        thinking = f"<think>\n{text()}\n</think>\n\n" if thinks and dice.random() < 0.5 else ""
        response: dict[str, Any] = {"role": "assistant", "content": thinking + text()}
        messages.append(response)
        if calls and dice.random() < 0.5:
            call = {"name": "zoom", "arguments": {"x": text()}}
            response["tool_calls"] = [{"type": "function", "function": call}] * dice.randint(1, 2)
            messages += [{"role": "tool", "content": shown()} for _ in response["tool_calls"]]
        else:
            messages.append({"role": "user", "content": shown()})
    return messages


def compared(renderer: Renderer, messages: Sequence[Any], tools: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """The text before each response and the response's ids, from whole renderings with and without it."""
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = full_text(renderer, messages[:place], tools)
            after = full_text(renderer, messages[: place + 1], tools, generate=False)
            assert after.startswith(before)
            response = after[len(before) : after.rindex(renderer.end_of_turn) + len(renderer.end_of_turn)]
            found.append((before, ids_of(renderer, response)))
    return found
