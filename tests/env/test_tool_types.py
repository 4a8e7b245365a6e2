"""Python's types in tools: arguments are converted to those of the hints, and images in results are shown."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from testing.episodes import a_task, image

from vlmrl import ToolEnv, obs
from vlmrl.env.tools import parts_of


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


def test_images_in_a_result_are_shown_wherever_they_are_and_its_paths_are_text(tmp_path: Path):
    @dataclass
    class View:
        crop: Image.Image
        scale: Any

    red, path = image(), tmp_path / "own.png"
    image("blue").save(path)
    shown, text = {"type": "image", "image": red}, {"type": "text", "text": '{"crop": "image 1", "scale": 2}'}
    assert parts_of({"crop": red, "scale": 2}) == parts_of(View(red, np.int64(2))) == [shown, text]
    assert parts_of([shown, {"type": "text", "text": "Closer"}]) == [shown, {"type": "text", "text": "Closer"}]
    assert parts_of([[red], "left"])[0] == shown
    for answer in ({"obs_str": "a", "multi_modal_data": {"image": [str(path)]}}, {"type": "image", "image": str(path)}):
        assert [part["type"] for part in parts_of(answer)] == ["text"]  # JSON of somebody else's server opens nothing
    assert parts_of(obs("a", images=[str(path)]))[0] == {"type": "image", "image": str(path)}


def test_arguments_have_the_types_of_the_hints():
    """``[...][2.0]`` raised TypeError, so that a response failed its group; ``unit == Unit.F`` was false for every response."""

    def look(index: int, box: list[int], units: list[Unit] | None, note: str | None) -> str:
        """Look.

        Args:
            index: A.
            box: B.
            units: C.
            note: D.
        """
        return f"{index} {box} {[unit is Unit.F for unit in units or []]} {note}"

    class Look(ToolEnv):
        functions = [look]  # noqa: RUF012

        def judge(self, response: str) -> float:
            return 1.0

    given = [{"index": 2.0, "box": [1.0, 2], "units": ["fahrenheit"], "note": None}, {"index": 2.5, "box": []}]
    calls = [f"<tool_call>{json.dumps({'name': 'look', 'arguments': arguments})}</tool_call>" for arguments in given]
    observation, _, info = asyncio.run(Look(a_task()).step("".join(calls)))
    assert observation["tool_results"][0] == [{"type": "text", "text": "2 [1, 2] [True] None"}]
    assert info["tool_errors"] == 1
