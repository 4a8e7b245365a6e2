"""Draws samples.svg beside this file: a trajectory of three turns as token blocks, and its rows in each sample form."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

INK, MUTED = "#1f2328", "#59636e"
COLORS = {"prompt text": "#0072b2", "image": "#f0b429", "sampled response": "#b5400a", "observation text": "#35b597"}
KINDS = dict(zip("PIRO", COLORS, strict=True))
TURNS = ("PPIIIIP", "RRR"), ("OIIIO", "RRR"), ("OO", "RRR")  # what is new in each turn: prompt, then response
GAP, SIZE = 0.35, 0.86  # between two segments, and of a block, where a token's place is 1 wide
LEFT, RIGHT, BOTTOM, TOP = -6.1, 29.0, -17.1, 2.7
HATCH = "/////"  # of images, so that they differ from text without colors too
RC = {"svg.hashsalt": "vlmrl", "font.family": "DejaVu Sans", "hatch.linewidth": 0.7}


def pale(color: str, share: float = 0.2) -> tuple[float, ...]:
    """``color`` mixed with white, of which ``share`` is left."""
    return tuple(1 - share * (1 - part) for part in to_rgb(color))


def segments() -> list[tuple[str, float]]:
    """Each segment of the trajectory with the place of its first token."""
    placed, x = [], 0.0
    for segment in (part for turn in TURNS for part in turn):
        placed.append((segment, x))
        x += len(segment) + GAP
    return placed


def block(ax: Axes, x: float, y: float, kind: str, solid: bool) -> None:
    color = COLORS[kind]
    face, edge = (color, color) if solid else (pale(color), pale(color, 0.55))
    box = {"xy": (x, y), "width": SIZE, "height": SIZE, "clip_on": False}
    ax.add_patch(Rectangle(**box, facecolor=face, edgecolor=edge, linewidth=0.8))
    if kind == "image":
        line = "white" if solid else edge
        ax.add_patch(Rectangle(**box, facecolor="none", edgecolor=line, linewidth=0, hatch=HATCH))


def write(ax: Axes, x: float, y: float, text: str, size: float, ha: str = "center", **options: str) -> None:
    ax.text(x, y, text, size=size, ha=ha, va="center", **{"color": INK} | options)


def row(ax: Axes, y: float, trained: set[int], first: int = 0, hidden: int | None = None) -> None:
    """A row whose response begins with turn ``first``'s response; ``trained`` responses are solid, segment ``hidden``'s
    image is out."""
    tokens = 0
    for number, (segment, x) in enumerate(segments()[: 2 * max(trained) + 2]):
        shown = segment.replace("I", " ") if number == hidden else segment
        for place, letter in enumerate(shown):
            if letter != " ":
                block(ax, x + place, y, KINDS[letter], letter == "R" and number // 2 in trained)
        tokens += len(shown) - shown.count(" ")
        if number == hidden:
            left, width = x + segment.index("I"), segment.count("I") - 1 + SIZE
            dashed = {"edgecolor": MUTED, "linewidth": 0.9, "linestyle": (0, (2, 2)), "clip_on": False}
            ax.add_patch(Rectangle((left, y), width, SIZE, facecolor="none", **dashed))
            write(ax, left + width / 2, y + SIZE / 2, "left out", 8.5, color=MUTED)
    edge = segments()[2 * first + 1][1] - GAP / 2 - (1 - SIZE) / 2
    ax.plot([edge, edge], [y - 0.22, y + SIZE + 0.22], color=INK, linewidth=1.6, solid_capstyle="butt")
    write(ax, RIGHT, y + SIZE / 2, f"{tokens} tokens", 9.5, "right")


def heading(ax: Axes, y: float, name: str, note: str) -> None:
    write(ax, LEFT, y + SIZE / 2, name, 10.5, "left", weight="bold")
    write(ax, LEFT, y - 0.3 - 0.38 * note.count("\n"), note, 8.5, "left", color=MUTED)


def trajectory(ax: Axes, y: float) -> None:
    heading(ax, y, "trajectory", "one episode")
    placed = segments()
    for segment, x in placed:
        for place, letter in enumerate(segment):
            block(ax, x + place, y, KINDS[letter], solid=True)
    for number in range(len(TURNS)):
        start, (response, x) = placed[2 * number][1], placed[2 * number + 1]
        end = x + len(response) - 1 + SIZE
        ax.plot([start, start, end, end], [y + 1.15, y + 1.4, y + 1.4, y + 1.15], color=MUTED, linewidth=1)
        write(ax, (start + end) / 2, y + 2.0, f"turn {number}", 10)


def legend(ax: Axes) -> None:
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="white", linewidth=0) for color in COLORS.values()]
    handles[1].set_hatch(HATCH)
    response = COLORS["sampled response"]
    handles.append(Rectangle((0, 0), 1, 1, facecolor=pale(response), edgecolor=pale(response, 0.55)))
    handles.append(Line2D([], [], color=INK, marker="|", linestyle="none", markersize=12, markeredgewidth=1.6))
    spacing = {"handlelength": 1.1, "handleheight": 1.1, "columnspacing": 1.1, "handletextpad": 0.45}
    names = [*COLORS, "pale: not trained", "response begins"]
    ax.legend(handles, names, loc="lower center", ncols=6, frameon=False, fontsize=9.5, borderpad=0.2, **spacing)


def draw() -> Figure:
    """The whole image, 8 inches wide."""
    figure = Figure(figsize=(8, 5), facecolor="white")
    ax = figure.add_axes((0.012, 0.01, 0.976, 0.99), xlim=(LEFT, RIGHT), ylim=(BOTTOM, TOP))
    ax.axis("off")
    trajectory(ax, 0)
    for y, name, note in ((-2.7, "concat", "1 row"), (-5.1, "step_wise", "1 row a turn"), (-10.4, "merged", "1 row")):
        heading(ax, y, name, note)
    heading(ax, -12.8, "merged", "keep_last_images,\nk = 1: 2 rows")
    for y, trained in ((-2.7, {0, 1, 2}), (-5.1, {0}), (-6.6, {1}), (-8.1, {2}), (-10.4, {0, 1, 2}), (-12.8, {0})):
        row(ax, y, trained, min(trained))
    row(ax, -14.3, {1, 2}, 1, hidden=0)
    legend(ax)
    return figure


if __name__ == "__main__":
    with mpl.rc_context(RC):
        draw().savefig(Path(__file__).with_name("samples.svg"), metadata={"Date": None})
