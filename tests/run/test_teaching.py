"""The weights of a teacher's part by what images add to its logprobs, over a whole batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from testing.fakes import make_item

from vlmrl.run.teaching import weigh_by_images
from vlmrl.types import Sample

RED, GREY = make_item("red", 1), make_item("grey", 1)
LOGPROBS = {("a", "red"): [-1.0, -2.0, -9.0], ("a", "grey"): [-5.0, -2.0, -9.0], ("b", None): [-3.0, -3.0, -3.0]}


def score(rows):
    """A teacher whose first token of row a depends on the image. Each row is scored alone, as it is seen."""
    assert not any(row.teacher_rows or row.teacher_scores for row in rows)
    return [np.array(LOGPROBS[row.trajectory_id, row.media[0].id if row.media else None]) for row in rows]


def test_the_few_tokens_that_depend_on_an_image_get_their_share():
    def row(name, media, mask):
        return Sample([1], [2, 3, 4], mask, None, [0] * 3, name, name, True, "stop", media)

    seen = row("a", [RED], [1, 1, 0])
    student = replace(seen, media=[], teacher_rows=[seen, None])
    alone = row("b", [], [1, 1, 1])
    shown = []
    store = SimpleNamespace(load=lambda image: shown.append(image) or GREY)
    assert weigh_by_images([student, alone], score, store, 0.6) == {"teacher/image_gain": pytest.approx(4 / 5)}
    assert [(image.size, image.getpixel((0, 0))) for image in shown] == [(RED.size, (128, 128, 128))]
    # Of five tokens one gains 4 nats: 0.6 of the weight is its, and 0.4 that of the others.
    assert seen.teacher_weights == pytest.approx([3.0, 0.5, 0.0]) and student.teacher_weights is None
    assert alone.teacher_weights == pytest.approx([0.5] * 3)
    assert weigh_by_images(
        [student, alone], lambda rows: score([replace(r, media=r.media and [GREY]) for r in rows]), store, 0.6
    )
    assert seen.teacher_weights == [1, 1, 0]


def test_a_batch_of_which_the_teacher_sees_no_row_has_no_weights():
    sample = Sample([1], [2], [1], None, [0], "a", "a", True, "stop", [], teacher_rows=[None])

    def never(rows):
        raise AssertionError("nothing is to be scored")

    assert weigh_by_images([sample], never, SimpleNamespace(), 0.6) == {}
