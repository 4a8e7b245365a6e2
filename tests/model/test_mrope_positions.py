"""M-RoPE positions of literal rows. The suite of families compares them with each model's own rule."""

from vlmrl.families.qwen_vl import mrope_positions


def test_two_images_with_nothing_between_them():
    positions, free = mrope_positions([9, 9, 9, 9, 9], [(2, 2), (1, 1)], image_token_id=9)
    assert positions.tolist() == [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]
    assert free == 3
