"""An env's answer: its messages with frozen images, and a digest for comparison with a replay.

An env may draw all its frames on one canvas. Each PIL image is therefore copied when it is shown, and hashed in the same pass.
Encoded images (bytes, files, addresses) need no copy: the turn loop loads them before it calls the env again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from PIL import Image

from vlmrl.multimodal.images import DecodedImage, ImageError, frozen_image, image_digest
from vlmrl.multimodal.messages import copied, images_of, map_images
from vlmrl.types import ImageSource, Message, PointSet


@dataclass(frozen=True)
class StepResult:
    """The result of one ``step``, with the observation as messages."""

    messages: list[Message]
    done: bool
    reward: float | None
    metrics: dict[str, float]
    points: list[PointSet] = field(default_factory=list)
    state: str | None = None
    compact: bool = False  # the history policy is to shorten the conversation now


Answer = list[Message] | StepResult | None
"""What ``reset`` returned, or ``step``."""


def step_mistake(returned: Any, own_format: bool = False) -> str | None:
    """What ``step`` returned in place of ``(obs(...), done, info)``, and the remedy; ``None`` if it returned that.

    ``own_format``: the env has a ``format_observation`` of its own, which may read any dict.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        elements = f"{len(returned)} elements: " if isinstance(returned, tuple) else ""
        return f"it returned {elements}{returned!r:.200}"
    observation, done, info = returned
    if isinstance(observation, str):
        return f"its first element is a str; wrap it: obs({observation!r:.80})"
    if not isinstance(observation, dict):
        return f"its first element is {observation!r:.200}; make it with obs(...)"
    if observation and not own_format and not observation.keys() & {"obs_str", "multi_modal_data"}:
        return f"its first element, {observation!r:.200}, has no text and no image; make it with obs(...)"
    if isinstance(done, str | dict) or (isinstance(done, Real) and not isinstance(done, Integral)):
        return f"its second element, done, must be True or False, and is {done!r:.200}; the reward is info['reward']"
    return None if isinstance(info, dict) else f"its third element, info, must be a dict, and is {info!r:.200}"


def read_points(value: Any) -> list[PointSet]:
    """``info["points"]`` of a step: ``[{"label": "click", "at": [[0.5, 0.25]]}]``. Raises ValueError for anything else."""
    try:
        sets = [PointSet(str(each["label"]), tuple((float(x), float(y)) for x, y in each["at"])) for each in value]
    except (TypeError, ValueError, KeyError):
        sets = None
    if sets is None or not all(each.at and all(0 <= x <= 1 and 0 <= y <= 1 for x, y in each.at) for each in sets):
        raise ValueError(
            "must be a list such as [{'label': 'click', 'at': [[0.5, 0.25]]}], in fractions of the image's width and height, but it "
            f"is {value!r:.200}."
        )
    return sets


def read_messages(name: str, value: Any) -> list[Message]:
    """Copies of the messages that ``name``, such as ``reset``, returned: an env may keep its own, and change them.

    Raises ValueError unless all are dicts with a role, whose texts can be encoded.
    """
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f"{name} must return messages (dicts with a role), but it returned {value!r}.")
    for message in messages:
        _check_texts(name, message.get("content"))
    return [copied(message) for message in messages]


def _check_texts(name: str, content: Any) -> None:
    parts = content if isinstance(content, list) else [{"text": content}]
    for text in (part.get("text") for part in parts if isinstance(part, dict)):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"a text in the messages of {name} must be a str, but it is {text!r}.")
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a text in the messages of {name} cannot be encoded as UTF-8: {error}.") from error


def with_digest(answer: Answer) -> tuple[Answer, str | None]:
    """The answer and its digest; ``None`` if it shows PIL images, which must be frozen first."""
    messages = answer.messages if isinstance(answer, StepResult) else answer or []
    can_change = any(isinstance(image, Image.Image) for image in images_of(messages))
    return answer, None if can_change else digest_of(answer)


def freeze_answer(answer: Answer) -> tuple[Answer, str]:
    """The answer with each PIL image as a :class:`DecodedImage`, and its digest.

    An image that does not decode stays as it is: whoever loads it raises the error that the model may read.
    """
    frozen: dict[int, ImageSource] = {}  # the same image may be shown twice

    def freeze_once(source: ImageSource) -> ImageSource:
        if id(source) not in frozen:
            frozen[id(source)] = source
            if isinstance(source, Image.Image):
                with suppress(ImageError):
                    frozen[id(source)] = frozen_image(source)
        return frozen[id(source)]

    if isinstance(answer, StepResult):
        answer = replace(answer, messages=map_images(answer.messages, freeze_once))
    elif answer is not None:
        answer = map_images(answer, freeze_once)
    return answer, digest_of(answer)


def digest_of(answer: Answer) -> str:
    """A hash of messages or a step result: equal for equal content, with images compared by their pixels."""

    def plain(item: Any) -> Any:
        if isinstance(item, StepResult):
            return plain([item.messages, item.done, item.reward])
        if isinstance(item, DecodedImage):
            return ("image", item.id)
        if isinstance(item, Image.Image):
            return ("image", image_digest(item))
        if isinstance(item, bytes):
            return hashlib.blake2b(item, digest_size=16).hexdigest()
        if isinstance(item, dict):
            return sorted((str(key), plain(inner)) for key, inner in item.items())
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        return repr(item)

    return hashlib.blake2b(repr(plain(answer)).encode(), digest_size=16).hexdigest()
