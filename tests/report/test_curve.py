"""The reward curve."""

import pytest
from PIL import Image

from vlmrl.report.curve import draw_curve, smooth


def test_smoothing_keeps_a_constant_and_the_middle_of_a_line():
    assert smooth([2.0] * 9) == pytest.approx([2.0] * 9)
    assert smooth([float(n) for n in range(41)])[20] == pytest.approx(20.0)
    assert smooth([3.0]) == [3.0]


@pytest.mark.parametrize("steps", [1, 3, 30])
def test_a_curve_is_drawn(tmp_path, steps):
    rows = [{"step": s, "reward/mean": s / steps} for s in range(steps)] + [{"step": 0, "eval/reward/mean": 0.5}]
    draw_curve(rows, tmp_path / "a/curve.png", title="zoom", levels={"chance": 0.1})
    assert Image.open(tmp_path / "a/curve.png").size == (1280, 720)


def test_a_curve_without_points_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="none of the 1 rows has reward/mean"):
        draw_curve([{"step": 1, "reward/mean": None}], tmp_path / "curve.png")
