"""Image placeholders in token ids: one per image, as engines expect them, or all tokens of each image, as models are trained on.

`renderer.py` writes the first form; all who send, train, check or show ids convert here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from vlmrl.types import MediaItem, Message


def expand(token_ids: Sequence[int], image_token_id: int | None, media: Sequence[MediaItem]) -> list[int]:
    """Replace each image's placeholder by all tokens of the image: ``[1, P, 2]`` with an image of 3 tokens is ``[1, P, P, P, 2]``.

    Raises ValueError if there are images, but not as many as placeholders.
    """
    ids, done = list(token_ids), 0
    if not media:
        return ids
    assert image_token_id is not None  # a text model has no images
    if (count := ids.count(image_token_id)) != len(media):
        raise ValueError(f"the ids hold {count} image placeholders, but there are {len(media)} images.")
    expanded: list[int] = []
    for item in media:
        place = ids.index(image_token_id, done)
        expanded += ids[done:place] + image_ids(item, image_token_id)
        done = place + 1
    return expanded + ids[done:]


def collapse(token_ids: Sequence[int], image_token_id: int | None, media: Sequence[MediaItem]) -> list[int]:
    """The reverse of :func:`expand`: ``[1, P, P, P, 2]`` with an image of 3 tokens is ``[1, P, 2]``."""
    collapsed: list[int] = []
    done = 0
    for start, end in image_spans(token_ids, image_token_id, media):
        assert image_token_id is not None  # a text model has no images
        collapsed += [*token_ids[done:start], image_token_id]
        done = end
    return [*collapsed, *token_ids[done:]]


def image_ids(item: MediaItem, image_token_id: int) -> list[int]:
    """The tokens that stand for an image in an expanded prompt."""
    ids = [image_token_id] * item.num_tokens
    for offset, separator in item.separators.items():
        ids[offset] = separator
    return ids


def image_spans(
    token_ids: Sequence[int], image_token_id: int | None, media: Sequence[MediaItem]
) -> list[tuple[int, int]]:
    """Where each image's tokens begin and end in expanded ids: ``[1, P, P, P, 2]`` with an image of 3 tokens has ``[(1, 4)]``.

    Only each image's first placeholder is searched for; :func:`vlmrl.samples.audit` checks the rest. Raises ValueError if
    ``token_ids`` contain fewer images than ``media``.
    """
    spans: list[tuple[int, int]] = []
    ids, done = list(token_ids), 0
    for item in media:
        before = next(offset for offset in range(item.num_tokens) if offset not in item.separators)
        start = ids.index(image_token_id, done + before) - before  # type: ignore[arg-type]
        done = start + item.num_tokens
        spans.append((start, done))
    return spans


def numbers_images(write: Callable[..., str], base: Sequence[Message]) -> bool:
    """Whether a template writes an image otherwise after another one, such as ``Picture 2: `` with Qwen's `add_vision_id`.

    ``write(messages, tools, generate)`` renders; ``base`` are a system's and a user's message.
    """
    look: Message = {"role": "user", "content": [{"type": "image"}]}
    added = set()
    for first in (base[1], look):
        with suppress(Exception):  # a template may raise for any message, and no type of error is agreed on
            before, whole = write([base[0], first], None, False), write([base[0], first, look], None, False)
            added.update([whole[len(before) :]] if whole.startswith(before) else [])
    return len(added) > 1
