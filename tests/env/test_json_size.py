"""Counting the values of a JSON text while it arrives."""

from __future__ import annotations

import json
import time

import pytest

from vlmrl.env.json_size import JsonSize
from vlmrl.utils.json_files import MAX_DIGITS

TEXT = json.dumps({'a,"[{': [1, {"\\": '"\\', "b\\": [[], "{,\\\\"]}]}).encode()  # 3 commas, 3 lists, 2 objects


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 7, len(TEXT)])
def test_values_within_strings_do_not_count_however_the_text_is_cut(length: int, is_stream: bool):
    size = JsonSize(is_stream)
    for start in range(0, len(TEXT), length):
        size.add(TEXT[start : start + length])
    assert (size.bytes, size.values, size.objects) == (len(TEXT), 3 + 3 + 2, 2)


def test_in_a_stream_an_open_string_ends_with_its_line():
    stream = JsonSize(is_stream=True)
    stream.add(b': "\ndata: [{},1]\r: "\r\ndata: [')
    assert (stream.values, stream.objects, stream.lines) == (4, 1, 3)


@pytest.mark.parametrize("length", [1, 7, 500])
def test_a_long_number_is_seen_however_it_is_cut_and_digits_of_a_string_are_none(length: int):
    for text, expected in ((b"[1, -%d]", True), (b'["%d", 1.5]', False)):
        size, text = JsonSize(), text % 10**400
        for start in range(0, len(text), length):
            size.add(text[start : start + length])
        assert (size.long_numbers > 0) == expected


def test_numbers_below_the_limit_are_counted_in_linear_time():
    """Each digit began a search of up to 400 more: an MCP server's answer of 35 MB held up all episodes for 10 s."""
    numbers = b"1." + b"3" * (MAX_DIGITS - 10) + b","
    size, began = JsonSize(), time.thread_time()
    for _ in range(300):
        size.add(numbers * 160)
    assert time.thread_time() - began < 2  # it is 0.3 s, and was 6 s
    assert (size.values, size.long_numbers) == (48_000, 0)
