"""The reward curve of a run as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.utils.output_files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e4e7eb"
TRAIN, HELD_OUT = "#0f7b8a", "#d9622b"


def draw_curve(
    rows: Sequence[Mapping[str, Any]],
    path: Path | str,
    *,
    title: str = "",
    levels: Mapping[str, float] | None = None,
) -> None:
    """Draw the reward curve of a run's ``rows`` as a PNG.

    The training reward is a thin line and a smoothed one, evaluations are markers. ``levels`` are dashed reference lines by label:
    ``{"images blanked": 0.11, "chance": 0.25}``. Raises ValueError if no row has a reward.
    """
    from matplotlib.figure import Figure

    train, evaluations = curve_points(rows, "reward/mean"), curve_points(rows, "eval/reward/mean")
    if not train[0] and not evaluations[0]:
        raise ValueError(
            f"rows: none of the {len(rows)} rows has reward/mean or eval/reward/mean, so there is nothing to draw."
        )
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="tight", facecolor="white")
    axes = figure.add_subplot()
    _draw_train(axes, *train)
    if evaluations[0]:
        style: dict[str, Any] = {"marker": "o", "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1.2}
        axes.plot(*evaluations, color=HELD_OUT, linewidth=1.4, label="held out", zorder=4, **style)
    for label, value in (levels or {}).items():
        draw_level(axes, label, value)
    style_axes(axes, title, "reward")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png")


def curve_points(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The steps and values of the rows that have ``key``, by step."""
    known = sorted((row["step"], row[key]) for row in rows if row.get(key) is not None)
    return [step for step, _ in known], [value for _, value in known]


def _draw_train(axes: Axes, steps: list[int], values: list[float]) -> None:
    if len(steps) < 8:
        axes.plot(steps, values, color=TRAIN, linewidth=2.2, marker=".", label="training", zorder=3)
        return
    axes.plot(steps, values, color=TRAIN, linewidth=0.9, alpha=0.35, label="training, each step", zorder=2)
    axes.plot(steps, smooth(values), color=TRAIN, linewidth=2.4, label="training, smoothed", zorder=3)


def smooth(values: Sequence[float]) -> list[float]:
    """A centred Gaussian mean whose standard deviation is a 40th of the rows, at least 1.5.

    The weights are renormalised at both ends, so that a constant series stays constant.
    """
    import numpy as np

    width = max(1.5, len(values) / 40)
    reach = min(math.ceil(3 * width), len(values) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    weighted = np.convolve(np.asarray(values, dtype=float), kernel)[inside]
    return list(weighted / np.convolve(np.ones(len(values)), kernel)[inside])


def draw_level(axes: Axes, label: str, value: float) -> None:
    """A dashed line at ``value`` over the whole width."""
    axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=(0, (5, 4)), zorder=2)
    place: dict[str, Any] = {"xy": (1, value), "xytext": (-4, 3), "xycoords": axes.get_yaxis_transform()}
    axes.annotate(label, textcoords="offset points", ha="right", va="bottom", color=MUTED, fontsize=9.5, **place)


def style_axes(axes: Axes, title: str, ylabel: str) -> None:
    """The look of all curves: a light grid, no box, the legend above, the title on the left."""
    from matplotlib.ticker import MaxNLocator

    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.margins(x=0.02, y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c5cbd3")
    axes.tick_params(colors=MUTED, labelsize=10, length=0, pad=6)
    axes.set_xlabel("step", color=INK, fontsize=11, labelpad=6)
    axes.set_ylabel(ylabel, color=INK, fontsize=11, labelpad=8)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, fontsize=10, labelcolor=INK)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=34)
