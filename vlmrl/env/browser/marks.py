"""Numbered marks on the elements of a screenshot, by which a model can name the element to click."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

Box = Sequence[float]  # left, top, right, bottom in CSS pixels
COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bc6c00")


def marked(png: bytes, boxes: Sequence[Box], scale: float) -> Image.Image:
    """The screenshot with a frame around each box and its number, from 1, in the frame's upper left corner."""
    shown = Image.open(io.BytesIO(png)).convert("RGB")
    draw = ImageDraw.Draw(shown)
    font = ImageFont.load_default(size=max(9, round(10 * scale)))
    for number, box in enumerate(boxes, 1):
        color = COLORS[(number - 1) % len(COLORS)]
        left, top, right, bottom = (round(scale * side) for side in box)
        draw.rectangle(
            (left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=max(1, round(scale))
        )
        label = draw.textbbox((left, top), str(number), font=font)
        width, height = round(label[2]) - left + 2, round(label[3]) - top + 1
        left, top = min(left, shown.width - width), min(top, shown.height - height)
        draw.rectangle((left, top, left + width, top + height), fill=color)
        draw.text((left + 1, top), str(number), fill="white", font=font)
    return shown
