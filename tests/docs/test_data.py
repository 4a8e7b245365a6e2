"""The blocks of docs/data.md, run as they stand."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl import Data
from vlmrl.config import resolve_config
from vlmrl.data import TaskStream, load_run_tasks

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, "docs/data.md", "exec"), names)
    return names


def test_the_ways_to_name_data_are_right():
    assert run(BLOCKS[0])["Data"] is Data


def test_the_mixture_draws_three_of_one_part_for_each_of_the_other(tmp_path):
    config = run(BLOCKS[1])["config"]()
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text((json.dumps({"prompt": "x", "answer": "1", "images": ["a.png"]}) + "\n") * 60)
    geo3k = replace(
        config.mixture["geo3k"], data=replace(config.mixture["geo3k"].data, path=str(tmp_path / "rows.jsonl"))
    )
    tasks, held_out = load_run_tasks(resolve_config(replace(config, mixture=config.mixture | {"geo3k": geo3k}), ROOT))
    drawn = [draw.task.part for draw in asyncio.run(TaskStream(tasks).take(8))]
    assert (drawn.count("geo3k"), drawn.count("zoom")) == (6, 2)
    assert held_out is not None and 64 < len(held_out) < 75
