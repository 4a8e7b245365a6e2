"""Conversations as rows with a loss mask: which tokens are the assistant's, found by comparing what the chat template writes.

What the template writes for the messages before a response, with its generation prompt, is what the policy is sampled from. What it
writes more with the response is the response, up to the token that ends it. Both are encoded apart, as in an episode. As long as the
template does not change what it wrote before, a conversation is one row; where it does, such as one that drops earlier thinking, a
new row begins with the changed text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmrl.multimodal.messages import images_of, parts_of_message
from vlmrl.multimodal.renderer import BASE, Renderer, TooLongError
from vlmrl.types import ImageSource, Message

PROBE: Message = {"role": "user", "content": "."}
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields of a message that transformers takes for its reasoning: the first one that is set."""


class RowError(ValueError):
    """A row that cannot be trained on. ``reason`` is a short name under which such rows are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class MaskedRow:
    """The ids of one row in pieces, each with whether it is trained, with one placeholder per image; and its images in order."""

    pieces: list[tuple[list[int], bool]]
    images: list[ImageSource]
    responses: dict[int, list[int]] = field(default_factory=dict)
    """The ids of each trained response, by its number among the conversation's responses."""

    def train_on(self, number: int, ids: list[int], end: list[int]) -> None:
        """Put ``ids`` in place of those of the trained response ``number``, and behind them ``end``, which has no loss."""
        place = next(place for place, piece in enumerate(self.pieces) if piece[0] is self.responses[number])
        self.pieces[place : place + 1] = [(ids, True), (end, False)] if end else [(ids, True)]
        self.responses[number] = ids


def masked_rows(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    trained: Sequence[bool] = (),
    max_tokens: float = math.inf,
) -> list[MaskedRow]:
    """The rows of a conversation. ``trained`` says for each response whether it has a loss; empty: all have.

    Messages after the last trained response are left out. The template writes all messages before a response again for each, which
    takes quadratic time: a row stops where it is longer than ``max_tokens``, with each image counted as one.

    Raises:
        RowError: the template refuses the messages, or does not write a response after its generation prompt; or a row is too long.
    """
    shown = renderer.adapt_tool_messages(messages)
    try:
        clean, images = renderer.clean(shown)
        schemas = renderer.check_tools(tools)
    except ValueError as error:
        raise RowError("template", str(error)) from error
    places = [place for place, message in enumerate(shown) if message["role"] == "assistant"]
    rows: list[MaskedRow] = []
    known: str | None = None  # the text of the last row
    waiting: list[str] = []  # its end, which has no loss, and is encoded if a trained response follows
    for number, place in enumerate(places):
        if trained and not any(trained[number:]):
            break
        if trained and not trained[number] and (number == 0 or trained[number - 1]):
            # the next one with a loss may be far: its prompt is checked before those on the way are written
            following = places[trained.index(True, number)]
            _check_text(renderer, _written(renderer, clean[:following], schemas, generate=True), max_tokens)
        prompt = _written(renderer, clean[:place], schemas, generate=True)
        response = _response(renderer, clean, place, prompt, schemas)
        if known is None or not prompt.startswith(known):
            known, waiting = "", []
            rows.append(MaskedRow([], []))
        row = rows[-1]
        waiting.append(prompt[len(known) :])
        known = prompt + response
        if trained and not trained[number]:
            waiting.append(response)
            continue
        # A template may write the text without the image, as Qwen3-VL's does.
        if images_of([shown[place]]):
            raise RowError("roles", "a response shows an image: the model cannot have sampled it.")
        _check_shown(clean[place], place, renderer.opening + response)
        _check_text(renderer, known, max_tokens)
        ids = renderer.encode_written(response)
        row.pieces += [*((renderer.encode_written(text), False) for text in waiting), (ids, True)]
        row.responses[number], waiting = ids, []
        row.images = images[: len(images_of(shown[:place]))]
        check_length(sum(len(ids) for ids, _ in row.pieces), max_tokens)
    rows = [row for row in rows if row.responses]
    for row in rows:
        _check_images(renderer, row)
    return rows


def check_length(tokens: int, most: float) -> None:
    """Raises RowError for a row with more than ``most`` tokens, which may have more than those counted."""
    if tokens > most:
        raise RowError("too_long", f"it has {tokens} tokens or more, and rollout.max_tokens is {most}.")


def _check_text(renderer: Renderer, text: str, most: float) -> None:
    """Raises RowError for a row that is certainly too long, before all of its text is encoded."""
    try:
        renderer.check_text(text, most)
    except TooLongError as error:
        check_length(error.least, most)


def check_masks(renderer: Renderer, name: str) -> None:
    """Raises ValueError for a template whose responses cannot be found; ``name`` is the template's."""
    try:
        masked_rows(
            renderer, [*BASE, {"role": "assistant", "content": "yes"}, PROBE, {"role": "assistant", "content": "no"}]
        )
    except RowError as error:
        raise ValueError(
            f"the chat template {name} cannot be fine-tuned with: {error} Set model.chat_template to another one."
        ) from error


def _response(
    renderer: Renderer, clean: list[Message], place: int, prompt: str, schemas: list[dict[str, Any]] | None
) -> str:
    """The text of the response at ``place``, with the token that ends it."""
    whole = _written(renderer, clean[: place + 1], schemas, generate=False)
    if not whole.startswith(prompt):
        start = next(index for index, pair in enumerate(zip(whole + "\0", prompt, strict=False)) if pair[0] != pair[1])
        raise RowError(
            "template",
            f"message {place}: the chat template does not write the response after its generation prompt, but "
            f"{whole[start : start + 40]!r} where the prompt has {prompt[start : start + 40]!r}.",
        )
    for name in _called(clean[place]):
        if name not in whole[len(prompt) :]:
            raise _hidden_call(place, name)
    end = whole.rfind(renderer.end_of_turn, len(prompt))
    if end >= 0:
        return whole[len(prompt) : end + len(renderer.end_of_turn)]
    following = clean[place + 1] if place + 1 < len(clean) else PROBE
    longer = _written(renderer, [*clean[: place + 1], following], schemas, generate=False)
    first = renderer.encode_written(longer[len(whole) :])[:1] if longer.startswith(whole) else []
    if renderer.stop_ids.isdisjoint(first):
        raise RowError("template", f"message {place}: the chat template writes no token that ends the response.")
    return whole[len(prompt) :] + renderer.decode(first)


def _check_shown(message: Message, place: int, shown: str) -> None:
    """Raises RowError if what the template shows lacks a part of the message's text, its first field of REASONING, or a call."""
    name = next((name for name in REASONING if message.get(name)), None)
    if name is not None and str(message[name]).strip() not in shown:
        where = f"message {place}: the chat template does not show its {name}"
        raise RowError("template", f"{where}: put it into the content as text, or remove it.")
    text = "".join(str(part.get("text", "")) for part in parts_of_message(message))
    if "".join(text.split()) not in "".join(shown.split()):  # templates write spaces in their own way
        raise RowError(
            "template",
            f"message {place}: the chat template leaves out a part of its text {text[:40]!r}, such as what is before, between or in "
            "thoughts: write one thought, at the beginning, or set model.chat_template to one that writes all of it.",
        )
    calls = _called(message)
    for name in calls:  # the text may have it, too
        if shown.count(name) < text.count(name) + calls.count(name):
            raise _hidden_call(place, name)


def _called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    return [(call.get("function") or call).get("name") or "" for call in message.get("tool_calls") or []]


def _hidden_call(place: int, name: str) -> RowError:
    return RowError("template", f"message {place}: the chat template does not show the call of {name!r}.")


def _written(renderer: Renderer, clean: list[Message], schemas: list[dict[str, Any]] | None, *, generate: bool) -> str:
    try:
        return renderer.write(clean, schemas, generate)
    except Exception as error:  # a template may raise for any message, and no type of error is agreed on
        raise RowError(
            "template", f"the chat template refuses the messages: {type(error).__name__}: {error}."
        ) from error


def _check_images(renderer: Renderer, row: MaskedRow) -> None:
    """The row shows all of its images. Trained responses have none."""
    shown = 0 if renderer.image_token_id is None else sum(ids.count(renderer.image_token_id) for ids, _ in row.pieces)
    if shown != len(row.images):
        raise RowError("images", f"the messages hold {len(row.images)} images, but the chat template shows {shown}.")
