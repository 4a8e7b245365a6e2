"""Draws dataflow.svg beside this file: the parts of vlmrl as boxes, and what they pass on along the arrows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, MUTED = "#1f2328", "#59636e"
SAMPLING, TRAINING, SHARED = "#0072b2", "#b5400a", "#35b597"
RC = {"svg.hashsalt": "vlmrl", "font.family": "DejaVu Sans"}


@dataclass(frozen=True)
class Box:
    """A part: its lower left corner, what it is called, where it is, and the color of its edge."""

    x: float
    y: float
    name: str
    place: str
    color: str
    width: float = 21.0
    height: float = 9.0

    def at(self, side: str, shift: float = 0.0) -> tuple[float, float]:
        """The middle of a side (``n``, ``e``, ``s`` or ``w``), moved along it by ``shift``."""
        x, y = self.x + self.width / 2, self.y + self.height / 2
        return {
            "n": (x + shift, self.y + self.height),
            "s": (x + shift, self.y),
            "e": (self.x + self.width, y + shift),
            "w": (self.x, y + shift),
        }[side]


DATA = Box(0, 51, "dataset or generator", "data/", SAMPLING)
LOOP = Box(38, 51, "turn loop", "rollout/turn_loop.py", SAMPLING)
EMIT = Box(79, 51, "samples", "samples/emit.py", TRAINING)
RENDERER = Box(0, 31, "renderer, image store", "multimodal/", SAMPLING)
ENV = Box(25.5, 31, "your environment", "env/", SAMPLING)
ENGINE = Box(51, 31, "engine", "engine/hf/, engine/sglang/", SAMPLING)
AUDIT = Box(79, 34, "audit", "samples/audit.py", TRAINING)
CREDIT = Box(79, 17, "advantages", "train/credit.py, algos/", TRAINING)
SENDER = Box(51, 16, "weight update", "weight_sync/", SHARED)
POLICY = Box(19, 8, "policy adapter", "model/", SHARED)
PACK = Box(79, 0, "prefix tree, packing", "train/packing.py", TRAINING)
TRAINER = Box(51, 0, "trainer", "train/trainer.py", TRAINING)
BOXES = (DATA, LOOP, EMIT, RENDERER, ENV, ENGINE, AUDIT, CREDIT, SENDER, POLICY, PACK, TRAINER)


def draw_box(ax: Axes, box: Box) -> None:
    style = "round,pad=0,rounding_size=1.2"
    ax.add_patch(
        FancyBboxPatch(
            (box.x, box.y), box.width, box.height, style, facecolor="white", edgecolor=box.color, linewidth=1.6
        )
    )
    x, y = box.x + box.width / 2, box.y + box.height / 2
    ax.text(x, y + 1.6, box.name, size=9.5, ha="center", va="center", color=INK, weight="bold")
    ax.text(x, y - 2.2, box.place, size=7.5, ha="center", va="center", color=MUTED, family="DejaVu Sans Mono")


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str,
    dx: float = 0.0,
    dy: float = 1.6,
    ha: str = "center",
    color: str = INK,
    dashed: bool = False,
) -> None:
    """An arrow with its label beside the middle, moved by ``dx, dy``."""
    line = {"linestyle": (0, (3, 2))} if dashed else {}
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.3, **line))
    x, y = (start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2 + dy
    ax.text(x, y, label, size=8, ha=ha, va="center", color=color)


def draw() -> Figure:
    """The whole drawing, 9 inches wide."""
    figure = Figure(figsize=(9, 5.6), facecolor="white")
    ax = figure.add_axes((0.01, 0.01, 0.98, 0.98), xlim=(-1, 101), ylim=(-1.5, 62))
    ax.axis("off")
    for box in BOXES:
        draw_box(ax, box)
    arrow(ax, DATA.at("e"), LOOP.at("w"), "Task")
    arrow(ax, LOOP.at("e"), EMIT.at("w"), "Trajectory")
    arrow(ax, LOOP.at("s", -8), ENV.at("n", 2.5), "response", dx=1.2, dy=0.5, ha="left")
    arrow(ax, ENV.at("n", -6), LOOP.at("w", -3), "observation,\nreward", dx=-4.4, dy=-3.4, ha="right")
    arrow(ax, LOOP.at("s", 4), ENGINE.at("n", -7), "token ids, images", dx=-1.0, dy=-2.6, ha="right")
    arrow(ax, ENGINE.at("n", 3), LOOP.at("e", -3), "sampled ids,\nlogprobs", dx=2.0, dy=0.8, ha="left")
    arrow(ax, RENDERER.at("n"), LOOP.at("w", -1.2), "", dashed=True, color=MUTED)
    ax.text(-0.5, 45.2, "messages as ids,\neach image once", size=7.5, ha="left", va="center", color=MUTED)
    arrow(ax, EMIT.at("s"), AUDIT.at("n"), "Sample", dx=1.2, dy=0, ha="left")
    arrow(ax, AUDIT.at("s"), CREDIT.at("n"), "exactly what\nwas sampled", dx=1.2, dy=0, ha="left")
    arrow(ax, CREDIT.at("s"), PACK.at("n"), "Sample", dx=1.2, dy=0, ha="left")
    arrow(ax, PACK.at("w"), TRAINER.at("e"), "Micro-\nBatch", dy=3.2)
    arrow(ax, TRAINER.at("n"), SENDER.at("s"), "weights", dx=1.2, dy=0, ha="left", color=SHARED)
    arrow(ax, SENDER.at("n"), ENGINE.at("s"), "policy version + 1", dx=1.2, dy=0, ha="left", color=SHARED)
    arrow(ax, POLICY.at("e", 3), ENGINE.at("w", -3), "", dashed=True, color=SHARED)
    arrow(ax, POLICY.at("e", -2), TRAINER.at("w", 1), "", dashed=True, color=SHARED)
    ax.text(
        29.5,
        4.8,
        "one model code, one distribution\nfor sampling and training",
        size=7.5,
        ha="center",
        color=MUTED,
        va="center",
    )
    return figure


if __name__ == "__main__":
    with mpl.rc_context(RC):
        draw().savefig(Path(__file__).with_name("dataflow.svg"), metadata={"Date": None})
