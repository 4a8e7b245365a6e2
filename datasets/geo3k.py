"""Prepare Geometry3K: ``train.parquet`` and ``validation.parquet`` with the images inside, their bytes unchanged.

    python datasets/geo3k.py --out data/geo3k                        # hiyouga/geometry3k, from the hub
    python datasets/geo3k.py --out data/geo3k --source FOLDER        # geometry3k.jsonl and images/

A row has ``prompt`` (messages for envs/geo3k.py, ``<image>`` where the image goes), ``images`` and ``answer``; then
``id``, ``problem``, ``choices`` and ``letter`` (empty where not known), ``goal`` and ``figure``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets as hf  # Hugging Face's: this folder has no __init__.py and is no package
import tyro

SPLITS = {"train": ("train",), "validation": ("validation", "val")}
INSTRUCTIONS = (
    "Reason step by step. You may have an answer scored by the calc_score tool. "
    "To finish, reply without a tool call and with the final answer in \\boxed{}."
)
TEXTS = hf.List(hf.Value("string"))
FEATURES = hf.Features(
    {
        "id": hf.Value("string"),
        "prompt": hf.List({"role": hf.Value("string"), "content": hf.Value("string")}),
        "images": hf.List(hf.Image()),
        "answer": hf.Value("string"),
        "problem": hf.Value("string"),
        "choices": TEXTS,
        "letter": hf.Value("string"),
        "goal": TEXTS,
        "figure": TEXTS,
    }
)

Row = dict[str, Any]


def prepare(out: Path, source: str = "hiyouga/geometry3k", choices: bool = True) -> dict[str, int]:
    """Write both splits, and print and return the number of rows of each.

    Args:
        out: The folder to write to.
        source: A hub name, or a folder with geometry3k.jsonl and images/.
        choices: List the choices in the prompt where they are known. False: leave them out of prompt and rows, so
            that no letter can be guessed.
    """
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in SPLITS:
        read = list(from_folder(Path(source), split) if Path(source).is_dir() else from_hub(source, split))
        rows = [finished(row, choices) for row in read if row["images"]]
        hf.Dataset.from_list(rows, features=FEATURES).to_parquet(out / f"{split}.parquet")
        print(f"{out / split}.parquet: {len(rows)} rows, {len(read) - len(rows)} left out because they have no image")
        counts[split] = len(rows)
    return counts


def from_hub(name: str, split: str) -> Iterator[Row]:
    """Rows of a hub dataset with the columns images, problem and answer."""
    table = hf.load_dataset(name, split=split).cast_column("images", hf.List(hf.Image(decode=False)))
    for index, row in enumerate(table):
        yield {"id": f"{split}/{index}", "problem": row["problem"], "images": row["images"], "answer": row["answer"]}


def from_folder(folder: Path, split: str) -> Iterator[Row]:
    """Rows of ``geometry3k.jsonl``; ``images`` is empty where the row has no image."""
    with (folder / "geometry3k.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["split"] not in SPLITS[split]:
                continue
            yield {
                "id": str(row["id"]),
                "problem": row["problem_text"],
                "images": [image(folder / row["image"])] if row["image"] else [],
                "answer": row["answer_text"],
                "choices": row["choices"],
                "letter": row["answer"],
                "goal": row["problem_type_goal"],
                "figure": row["problem_type_graph"],
            }


def image(path: Path) -> dict[str, Any]:
    return {"bytes": path.read_bytes(), "path": path.name}


def finished(row: Row, choices: bool) -> Row:
    """The row with its prompt and every column."""
    unknown: Row = {"choices": [], "letter": None}
    row = unknown | {"goal": [], "figure": []} | row | ({} if choices else unknown)
    marks = "" if "<image>" in row["problem"] else "<image>" * len(row["images"])
    listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCDEFGH", row["choices"], strict=False))
    content = f"{marks}{row['problem']}{listed}\n\n{INSTRUCTIONS}"
    return {**row, "prompt": [{"role": "user", "content": content}]}


if __name__ == "__main__":
    tyro.cli(prepare)
