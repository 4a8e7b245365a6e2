"""The checks of a teacher: it reads the same tokens and images as the policy, and its images reach it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmrl.checks.image_swap import MIN_CHANGE, ImageSwapError, Score, from_first_image, largest_change, noise
from vlmrl.model.loading import Reader
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Sample


def check_reader(policy: Reader, teacher: Reader) -> None:
    """Raise ValueError unless both models read the same ids from a text, and the same tokens from an image."""
    for what, mine, theirs in _compared(policy, teacher):
        if mine == theirs:
            continue
        example = _difference(mine, theirs)
        raise ValueError(
            f"teacher.model {teacher.path}: its {what} must be that of {policy.path}, but it differs{example}. A teacher scores the "
            "policy's own token ids: use a model with the same tokenizer."
        )


def _compared(policy: Reader, teacher: Reader) -> list[tuple[str, Any, Any]]:
    pairs = [
        ("model family", *(type(each.family).__name__ for each in (policy, teacher))),
        ("tokenizer's vocabulary", *(each.tokenizer.get_vocab() for each in (policy, teacher))),
        ("tokenizer's added tokens", *(_added(each) for each in (policy, teacher))),
    ]
    for part in ("model", "normalizer", "pre_tokenizer"):
        name = "merges" if part == "model" else part
        pairs.append((f"tokenizer's {name}", *(_backend(each).get(part) for each in (policy, teacher))))
    if policy.image_processor is not None:
        size = policy.family.resized(policy.image_processor, (640, 480), None)
        tokens = (each.family.num_tokens(each.image_processor, size) for each in (policy, teacher))
        pairs.append((f"number of tokens of an image of {size[0]}x{size[1]} pixels", *tokens))
    return pairs


def _added(reader: Reader) -> dict[str, int]:
    return {str(token): index for index, token in reader.tokenizer.added_tokens_decoder.items()}


def _backend(reader: Reader) -> dict[str, Any]:
    return json.loads(reader.tokenizer.backend_tokenizer.to_str())


def _difference(mine: Any, theirs: Any) -> str:
    """``: '<image>' is 5 there and 7 here``, for a vocabulary."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        name = min((str(key) for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)), default="")
        if not isinstance(mine.get(name), dict | list) and not isinstance(theirs.get(name), dict | list):
            return f": {name!r} is {theirs.get(name)} there and {mine.get(name)} here"
        return f" in {name!r}"
    return f": {theirs} there and {mine} here" if len(f"{mine}{theirs}") < 200 else ""


def check_teacher_images(
    score: Score, store: MediaStore, samples: Sequence[Sample], image_token_id: int | None
) -> float | None:
    """Swap the first image that the teacher sees. Returns the largest change of its logprobs in nats; None without images.

    ``score`` is the teacher's.

    Raises:
        ImageSwapError: no logprob changes.
    """
    rows = [row for sample in samples for row in (sample.teacher_rows or [sample]) if row is not None and row.media]
    if not rows:
        return None
    assert image_token_id is not None  # or there were no images
    row = replace(from_first_image(rows[0], image_token_id), teacher_rows=[])
    swapped = replace(row, media=[store.load(noise(row.media[0])), *row.media[1:]])
    change = largest_change(score, row, swapped)
    if change <= MIN_CHANGE:
        raise ImageSwapError(
            f"trajectory {row.trajectory_id}, the teacher's image 0 ({row.media[0].id}): with noise in its place the teacher's "
            f"logprobs changed by {change:.2g} nats, where more than {MIN_CHANGE:g} was expected. The teacher is blind, and "
            "so would the policy learn. (--train.no-image-check skips this check.)"
        )
    return change
