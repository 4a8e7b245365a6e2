"""Sizes of resized images: a processor that gets such an image, as a server's does, leaves it as it is."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.glm4v.image_processing_glm4v import smart_resize as resize_of_glm
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as resize_of_qwen

from vlmrl.families.glm4v import Glm4V
from vlmrl.families.qwen2_vl import Qwen2VL
from vlmrl.families.qwen3_vl import Qwen3VL
from vlmrl.families.qwen_vl import size_within

KINDS: list[tuple[Any, Any, int, int]] = [
    (Qwen2VL, resize_of_qwen, 14, 1),  # and Qwen2.5-VL
    (Qwen3VL, resize_of_qwen, 16, 1),
    (Glm4V, partial(resize_of_glm, 2), 14, 2),  # its limits count two equal frames
]
IN_TOKENS = (1, 2, 4, 5, 8, 16, 64, 70, 100, 256, 1280, 16384)


def processor_of(patch: int, frames: int, least: int, most: int) -> Any:
    size = {"shortest_edge": frames * least, "longest_edge": frames * most}
    return SimpleNamespace(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size)


@pytest.mark.parametrize(("kind", "theirs", "patch", "frames"), KINDS, ids=["qwen2", "qwen3", "glm"])
def test_a_resized_image_keeps_its_size(kind, theirs, patch, frames, how_many):
    """With our limit and at a processor without it. Where the processor finds a size that it keeps, it is ours."""
    family, unit, dice, seen = kind(None), 2 * patch, random.Random(0), Counter[str]()
    for _ in range(how_many(4000)):
        width, height = (round(2 ** dice.uniform(0, 13)) for _ in range(2))
        least, most = sorted(unit**2 * dice.choice(IN_TOKENS) for _ in range(2))
        limit = dice.choice([None, unit**2 * dice.choice(IN_TOKENS) + dice.randrange(unit**2)])
        allowed = min(most, limit or most)
        processor = processor_of(patch, frames, least, most)
        case = (width, height, least, most, limit)
        try:
            rows, columns = theirs(height, width, *(2,) * (frames - 1), unit, frames * least, frames * allowed)
        except ValueError:
            with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
                family.resized(processor, (width, height), limit)
            continue
        if allowed < least:
            continue
        resized = family.resized(processor, (width, height), limit)
        assert least <= resized[0] * resized[1] <= allowed, case
        assert family.resized(processor, resized, limit) == family.resized(processor, resized, None) == resized, case
        again = theirs(*resized[::-1], *(2,) * (frames - 1), unit, frames * least, frames * most)
        assert again == resized[::-1], case
        kept = least <= rows * columns <= allowed and max(rows, columns) <= 200 * min(rows, columns)
        assert not kept or (columns, rows) == resized, case
        seen["theirs" if kept else "mended"] += 1
    assert min(seen["theirs"], seen["mended"]) > 300


@pytest.mark.parametrize(
    ("size", "tokens", "wanted"),
    [
        ((4000, 30), (1, 16), (16, 1)),  # smart_resize finds 43 x 1
        ((30, 4000), (1, 16), (1, 16)),
        ((18, 197), (64, 76), (3, 25)),  # and makes the image larger and smaller by turns here
        ((7575, 45), (16, 256), (168, 1)),  # and refuses its own 237 x 1
        ((100, 100), (60, 70), (8, 8)),
    ],
)
def test_a_mended_size_has_the_nearest_aspect_ratio(size, tokens, wanted):
    limits = (tokens[0] * 32**2, tokens[1] * 32**2)
    width, height = size_within(limits, 32, size, found=(10**6, 10**6))
    assert (width // 32, height // 32) == wanted


@pytest.mark.parametrize(("kind", "theirs", "patch", "frames"), KINDS, ids=["qwen2", "qwen3", "glm"])
def test_a_limit_below_the_processors_minimum_is_kept(kind, theirs, patch, frames):
    """Servers, whose processors scale such an image up again, are refused: see `check_image_limit`."""
    family, unit, dice = kind(None), 2 * patch, random.Random(0)
    processor = processor_of(patch, frames, 64 * unit**2, 256 * unit**2)
    for tokens in (0, 1, 2, 17, 63):
        for _ in range(50):
            size = (dice.randint(10, 900), dice.randint(10, 900))
            resized = family.resized(processor, size, (tokens + 1) * unit**2 - 1)
            assert 1 <= family.num_tokens(processor, resized) <= max(1, tokens)
            assert family.resized(processor, resized, (tokens + 1) * unit**2 - 1) == resized


def test_where_no_size_is_within_both_limits_the_upper_one_is_kept():
    """211 is prime: its only rectangle is 211 squares long and one wide, too long for the processors."""
    family, processor = Qwen3VL(None), processor_of(16, 1, 211 * 32**2, 211 * 32**2)
    for size, wanted in [((100, 100), (448, 448)), ((3000, 1000), (768, 256)), ((16, 3000), (32, 6016))]:
        assert family.resized(processor, size, None) == wanted
        assert family.resized(processor, wanted, None) == wanted
