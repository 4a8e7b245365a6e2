"""The zoom recipe's images: no two signs alike, one letter as the answer, the same from the same seed."""

from pathlib import Path

import numpy as np

from vlmrl.config.code import load_object

make_task = load_object(f"{Path(__file__).parents[2] / 'datasets/letters.py'}:make_task")


def test_a_task_asks_for_one_letter_in_its_image():
    task = make_task(3, seed=5)
    assert task["images"][0].size == (1024, 1024)
    assert len(task["answer"]) == 1 and task["answer"].isupper()
    assert task["prompt"].startswith("<image>Which letter is on the ")


def test_the_same_index_and_seed_give_the_same_image_and_others_do_not():
    first, again, other = (np.asarray(make_task(*where)["images"][0]) for where in ((3, 5), (3, 5), (4, 5)))
    assert (first == again).all() and (first != other).any()


def test_the_letter_is_gone_in_the_size_that_is_shown_first():
    """White strokes on a sign of plain color: at 192 pixels no pixel of them is white any more."""
    image = make_task(0, seed=0)["images"][0]
    white = np.asarray(image).min(axis=2) > 245
    assert white.sum() > 500
    assert (np.asarray(image.resize((192, 192))).min(axis=2) > 245).sum() == 0
