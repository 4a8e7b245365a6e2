"""M-RoPE positions of literal rows. The suite of families compares them with each model's own rule."""

import pytest
import torch

from vlmrl.families.qwen_vl import merged_grid, mrope_positions


def test_the_docstrings_example():
    positions, free = mrope_positions([7, 9, 9, 8], [(1, 2)], image_token_id=9)
    assert positions.tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    assert free == 4


def test_a_tall_image_and_a_start():
    positions, free = mrope_positions([9] * 6 + [7, 7], [(3, 2)], image_token_id=9, start=10)
    assert positions[0].tolist() == [10] * 6 + [13, 14]
    assert positions[1].tolist() == [10, 10, 11, 11, 12, 12, 13, 14]
    assert positions[2].tolist() == [10, 11, 10, 11, 10, 11, 13, 14]
    assert free == 15


def test_two_images_with_nothing_between_them():
    positions, free = mrope_positions([9, 9, 9, 9, 9], [(2, 2), (1, 1)], image_token_id=9)
    assert positions.tolist() == [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]
    assert free == 3


@pytest.mark.parametrize("image_token_id", [None, 9])
def test_text_alone_counts_on(image_token_id):
    positions, free = mrope_positions([5, 6, 7], [], image_token_id, start=4)
    assert positions.tolist() == [[4, 5, 6]] * 3
    assert free == 7


def test_merged_grid_counts_visual_tokens():
    assert merged_grid(torch.tensor([[1, 12, 18]]), 2) == (6, 9)
