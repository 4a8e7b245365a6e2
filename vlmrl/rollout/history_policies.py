"""History policies: functions that rewrite the messages before the next response (`rollout.history`).

A plain function rewrites the messages before they are rendered again. A coroutine function may ask the model with its second argument,
an :class:`Asker`; the messages that it returns unchanged are not rendered again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vlmrl.multimodal.messages import copied, images_of, parts_of_message
from vlmrl.types import Message

Messages = list[Message]
Ask = Callable[[Messages], Awaitable[str]]

REQUEST = (
    "The context is almost full. Write down what you need in order to finish the task: what you know, what you have done, and what "
    "is left to do. Everything else will be forgotten. To keep an image, write its number, counted from the first image above: "
    "[image 1]."
)
SUMMARY = "What you wrote down before:\n"


class Conversation(list[Message]):
    """The messages that a plain history policy gets: ``task`` of them came before the first response, examples of responses too."""

    task = 0

    def copied(self) -> Conversation:
        """The same messages in dicts of their own."""
        copies = Conversation(copied(list(self)))
        copies.task = self.task
        return copies


@dataclass(frozen=True)
class Asker:
    """What a history policy knows of the episode, and how it asks the model, before each response but the first.

    ``await asker.ask(messages)`` appends the messages to what the model saw last, which lacks the newest observation, and returns the
    text of the response. It is a turn of the episode, which is trained like others and which the env does not get.
    """

    ask: Ask
    tokens: int
    """Tokens of the next prompt if nothing is removed; ``max_tokens`` if it does not fit."""
    max_tokens: int
    """``rollout.max_tokens``."""
    task: Messages
    """The messages before the first response."""
    observation: Messages
    """The newest messages of the env, which are the last."""
    is_requested: bool
    """Whether the env's step returned ``info["compact"]``."""


async def compact(
    messages: Messages,
    asker: Asker,
    at: float = 0.75,
    turns: int = 0,
    keep: int = 1,
    images: int = 4,
    request: str = REQUEST,
) -> Messages:
    """Replace the conversation by what the model writes down, as soon as it has ``at * rollout.max_tokens`` tokens.

    The next prompt has the task's messages, the model's summary, and the last ``keep`` responses with the observations after them, the
    newest observation in any case. The summary keeps at most ``images`` of the images that it names as ``[image 2]``: the second of
    those that it was written from. It is also written ``turns`` responses after the last
    one (0: not for that reason), and if the env asks for it.

    Sources: SUPO, arXiv 2510.06727, and CompactionRL, arXiv 2607.05378: summaries that the policy writes, trained with the episode.
    """
    responses = _responses(messages, len(asker.task))
    kept = 0 if responses[0] == len(asker.task) else keep  # else there is a summary
    is_due = asker.tokens >= at * asker.max_tokens or 0 < turns <= len(responses) - kept
    if not is_due and not asker.is_requested:
        return messages
    text = await asker.ask([{"role": "user", "content": request}])
    rest = messages[responses[-min(keep, len(responses))] :] if keep else asker.observation
    seen = images_of(messages[: len(messages) - len(asker.observation)])
    shown = {image.id for image in images_of([*asker.task, *rest])}
    numbers = dict.fromkeys(int(number) for number in re.findall(r"\[image (\d{1,4})\]", text))
    named = [seen[number - 1] for number in numbers if 0 < number <= len(seen)]
    new = [image for image in named if image.id not in shown][:images]
    parts = [{"type": "text", "text": SUMMARY + text}, *({"type": "image", "image": image} for image in new)]
    return [*asker.task, {"role": "user", "content": parts}, *rest]


def keep_images(messages: Messages, first: int = 0, last: int = 1, every: int = 0, text: str = "") -> Messages:
    """Keep the ``first`` and the ``last`` images, and with ``every`` n each n-th one. ``text`` takes the place of the others.

    ``{number}`` in ``text`` is the image's number, from 1. A message that had nothing but images may become empty.
    """
    count = len(images_of(messages))
    number = 0

    def kept(part: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal number
        if part["type"] != "image":
            return [part]
        number += 1
        if number <= first or number > count - last or (every and number % every == 0):
            return [part]
        return [{"type": "text", "text": text.replace("{number}", str(number))}] if text else []

    shown = []
    for message in messages:
        before = parts_of_message(message)
        parts = [each for part in before for each in kept(part)]
        shown.append({**message, "content": parts} if parts != before else message)
    return shown


def keep_last_images(messages: Messages, k: int = 1) -> Messages:
    """Keep only the last ``k`` images. A message that had nothing else becomes empty."""
    return keep_images(messages, last=k)


def drop_thinking(messages: Messages) -> Messages:
    """Remove the ``<think>`` blocks of responses, for templates that keep them."""
    return [
        {**message, "content": _without_thinking(message["content"])} if _is_plain_response(message) else message
        for message in messages
    ]


def _without_thinking(text: str) -> str:
    """The text without ``<think>...</think>`` and the whitespace after it, in linear time: responses are hostile input."""
    *pieces, rest = text.split("</think>")
    kept, removed = [], False
    for piece in pieces:
        before, opening, _ = (piece.lstrip() if removed else piece).partition("<think>")
        removed = bool(opening)
        kept.append(before if removed else f"{before}</think>")
    return "".join([*kept, rest.lstrip() if removed else rest])


def last_turns(messages: Messages, k: int = 1) -> Messages:
    """Keep the messages before the first response, and only the last ``k`` responses with the observations after them."""
    responses = _responses(messages, messages.task if isinstance(messages, Conversation) else 0)
    if len(responses) <= k:
        return messages
    return messages[: responses[0]] + (messages[responses[-k] :] if k else messages[responses[-1] + 1 :])


def _responses(messages: Messages, task: int) -> list[int]:
    """The places of the responses: those of the role ``assistant`` in the first ``task`` messages are examples."""
    return [place for place, message in enumerate(messages) if message["role"] == "assistant" and place >= task]


def _is_plain_response(message: Message) -> bool:
    return message["role"] == "assistant" and isinstance(message.get("content"), str)


HISTORY_POLICIES: dict[str, Callable[..., Messages | Awaitable[Messages]]] = {
    "compact": compact,
    "keep_images": keep_images,
    "keep_last_images": keep_last_images,
    "drop_thinking": drop_thinking,
    "last_turns": last_turns,
}
