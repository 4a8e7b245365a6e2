"""datasets/geo3k.py, run by path: a tiny folder always, the real one where it is."""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
from pathlib import Path

import datasets as hf
import pytest
from PIL import Image

from vlmrl.config import Data
from vlmrl.config.code import load_object
from vlmrl.data import load_tasks

ROOT = Path(__file__).parents[2]
SCRIPT = f"{ROOT}/datasets/geo3k.py"
SHARED = Path(os.environ.get("VLMRL_SHARED", ROOT.parent / "shared")) / "data" / "geometry3k"
ENDING = (
    "\n\nReason step by step. You may have an answer scored by the calc_score tool. "
    "To finish, reply without a tool call and with the final answer in \\boxed{}."
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(buffer, format="PNG")
    return buffer.getvalue()


def folder(path: Path) -> Path:
    (path / "images").mkdir(parents=True)
    (path / "images" / "1.png").write_bytes(png())
    shared = {"problem_text": "Find x.", "choices": ["5", "14"], "answer": "B", "answer_text": "14"}
    lists = {"problem_type_goal": ["Length"], "problem_type_graph": ["Triangle"]}
    splits = [("train", "images/1.png"), ("train", None), ("val", "images/1.png"), ("test", "images/1.png")]
    rows = [{"id": i, "split": s, "image": image, **shared, **lists} for i, (s, image) in enumerate(splits)]
    (path / "geometry3k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_becomes_two_parquet_files(tmp_path, monkeypatch, capsys):
    source = folder(tmp_path / "source")
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--out", str(tmp_path / "out"), "--source", str(source)])
    runpy.run_path(SCRIPT, run_name="__main__")
    shown = capsys.readouterr().out
    assert "train.parquet: 1 rows, 1 left out because they have no image" in shown
    assert "validation.parquet: 1 rows, 0 left out" in shown
    task = load_tasks(Data(str(tmp_path / "out")))[0]
    image = {"bytes": png(), "path": "1.png"}
    question = {"type": "text", "text": f"Find x.\nA. 5\nB. 14{ENDING}"}
    assert task.id == "out/train/0"
    assert task.prompt == [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
    assert task.answer == "14"
    assert task.data == {
        "id": "0",
        "problem": "Find x.",
        "choices": ["5", "14"],
        "letter": "B",
        "goal": ["Length"],
        "figure": ["Triangle"],
    }
    assert load_tasks(Data(str(tmp_path / "out"), "validation"))[0].data["id"] == "2"


def test_without_choices_no_letter_can_be_guessed(tmp_path):
    prepare = load_object(f"{SCRIPT}:prepare")
    assert prepare(tmp_path / "out", str(folder(tmp_path / "source")), choices=False) == {"train": 1, "validation": 1}
    task = load_tasks(Data(str(tmp_path / "out" / "train.parquet")))[0]
    assert task.prompt[0]["content"][1] == {"type": "text", "text": f"Find x.{ENDING}"}
    assert (task.data["choices"], task.data["letter"]) == ([], None)


def test_rows_of_the_hub(tmp_path, monkeypatch):
    features = hf.Features({"images": hf.List(hf.Image()), "problem": hf.Value("string"), "answer": hf.Value("string")})
    row = {"images": [{"bytes": png(), "path": None}], "problem": "In <image> find x.", "answer": "5"}
    table = hf.Dataset.from_list([row], features=features)
    monkeypatch.setattr(hf, "load_dataset", lambda name, split: table if name == "hiyouga/geometry3k" else None)
    assert load_object(f"{SCRIPT}:prepare")(tmp_path) == {"train": 1, "validation": 1}
    monkeypatch.undo()
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    task = load_tasks(Data(str(tmp_path), "validation"))[0]
    assert [part.get("text") for part in task.prompt[0]["content"]] == ["In ", None, f" find x.{ENDING}"]
    assert (task.images, task.answer) == ([{"bytes": png(), "path": None}], "5")
    assert (task.data["id"], task.data["choices"]) == ("validation/0", [])


def test_the_real_folder(tmp_path):
    if not (SHARED / "geometry3k.jsonl").exists():
        pytest.skip(f"no geometry3k.jsonl in {SHARED}; set VLMRL_SHARED")
    rows = [json.loads(line) for line in (SHARED / "geometry3k.jsonl").read_text().splitlines()]
    seen = {name: [row for row in rows if row["split"] == name and row["image"]] for name in ("train", "val")}
    counts = load_object(f"{SCRIPT}:prepare")(tmp_path, str(SHARED))
    assert counts == {"train": len(seen["train"]), "validation": len(seen["val"])}
    tasks = load_tasks(Data(str(tmp_path), "validation"))
    for index in (0, len(tasks) - 1):
        assert tasks[index].images[0]["bytes"] == (SHARED / seen["val"][index]["image"]).read_bytes()
        assert tasks[index].answer == seen["val"][index]["answer_text"]
