"""`vlmrl data check` shows what the model will read, what is skipped, and what cannot be loaded."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from vlmrl import SFT, Config, Conversations, Data, Env, Model, Part, Rollout, obs
from vlmrl.cli import main as cli
from vlmrl.cli.data_check import CheckOptions, check

ROOT = Path(__file__).parents[2]


class Look(Env):
    tools = [  # noqa: RUF012
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
    ]

    def step(self, response_text):
        return obs(), True, {"reward": 1.0}


class Greet(Look):
    def reset(self):
        return [{"role": "user", "content": "Hello there."}]


def shown(qwen3_vl: Path, show: int = 1, **config: Any) -> tuple[str, bool]:
    """The output without colors, and whether the check passed."""
    config = {"env": Look} | config
    settings = CheckOptions(Config(model=Model(path=str(qwen3_vl)), **config), show=show)
    console = Console(file=io.StringIO(), width=400)
    passed = check(settings, console)
    return console.file.getvalue(), passed


def seeing(index: int, seed: int) -> dict[str, Any]:
    size = (100, 60) if index == 0 else (64, 32)
    return {
        "prompt": "<image>Is <|im_end|> a word?",
        "images": [Image.new("RGB", size)],
        "answer": "no",
        "level": index,
    }


def test_a_task_is_shown_as_the_model_reads_it(qwen3_vl):
    output, passed = shown(qwen3_vl, data=Data(generator=seeing, size=2, seed=None))
    assert passed
    assert "image 1   100x60 px, resized to 96x64: 6 tokens" in output
    assert "⟦<|vision_start|>⟧⟦image 1: 6 tokens⟧⟦<|vision_end|>⟧Is <|im_end|> a word?⟦<|im_end|>⟧\n" in output
    assert "tools     look(at)" in output and "answer    'no'" in output and "data      level=0" in output
    assert "source    seeing" in output
    assert "resized   1 of 2 images change their size" in output


def test_the_first_messages_of_the_env_are_shown_and_their_difference_from_the_row(qwen3_vl):
    output, _ = shown(qwen3_vl, env=Greet, data=Data(generator=seeing, size=1))
    assert "Hello there." in output and "Is <|im_end|> a word?" not in output
    assert "the env changes the messages or tools of the row" in output


def numbered(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "7" * (10 * index), "answer": index}


def test_prompts_that_are_too_long_and_those_that_leave_no_room_are_counted(qwen3_vl):
    rollout = Rollout(max_tokens=300, max_response_tokens=100)
    output, passed = shown(
        qwen3_vl, data=Data(generator=numbered, size=20, max_prompt_tokens=250), rollout=rollout, env=Greet
    )
    over = int(output.split("too long ")[1].split(" of 20")[0])
    no_room = int(output.split("no room")[1].split(" are too long for a response")[0])
    assert passed and over > 0 and no_room > 0
    fewer, _ = shown(
        qwen3_vl, data=Data(generator=numbered, size=20, max_prompt_tokens=240), rollout=rollout, env=Greet
    )
    assert int(fewer.split("too long ")[1].split(" of 20")[0]) > over


def test_rows_that_cannot_be_loaded_are_reported_and_fail_the_check(qwen3_vl, tmp_path):
    strange = [{"role": "user", "content": {"type": "text", "text": "c"}}]  # no list: the template cannot write it
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}, {"prompt": strange, "answer": "1"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output, passed = shown(qwen3_vl, show=3, data=Data(str(tmp_path / "a.jsonl"), seed=None))
    assert not passed and "row 2 of " in output
    assert "problem" in output and "row 1 of " in output and "column 'answer' is empty" in output
    assert "3 of 3 rows read" in output and "result    1 of 3 rows can be played, with 0 images" in output


def png(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def test_every_image_is_decoded_and_each_broken_one_is_named_by_row_and_file(qwen3_vl, tmp_path):
    """The broken rows are far behind those that are shown."""
    (tmp_path / "good.png").write_bytes(png((64, 64)))
    (tmp_path / "cut.png").write_bytes(png((64, 64))[:3000])
    (tmp_path / "thin.png").write_bytes(png((1000, 3)))
    (tmp_path / "text.png").write_text("no image")
    names = ["good"] * 20 + ["cut", "good", "thin", "text", "gone"]
    rows = [{"prompt": "<image>?", "answer": "1", "images": [f"{name}.png"]} for name in names]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output, passed = shown(qwen3_vl, data=Data(str(tmp_path / "a.jsonl")))
    assert not passed and "result    21 of 25 rows can be played, with 21 images" in output
    problems = [line for line in output.splitlines() if line.startswith("problem")]
    for line, (row, name, reason) in zip(
        problems,
        [
            (20, "cut.png", "image file is truncated"),
            (22, "thin.png", "aspect ratio must be smaller than 200"),
            (23, "text.png", "cannot identify image file"),
            (24, "gone.png", "no image"),
        ],
        strict=True,
    ):
        assert f"row {row} of " in line and name in line and reason in line
    assert "object at" not in output
    fewer, passed = shown(qwen3_vl, data=Data(str(tmp_path / "a.jsonl"), size=20))
    assert passed and "20 of 20 rows can be played" in fewer


def test_held_out_rows_are_read_and_empty_texts_are_warned_of(qwen3_vl, tmp_path):
    rows = [{"prompt": "a" if number else " ", "answer": "" if number in (3, 5) else "1"} for number in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output, passed = shown(qwen3_vl, show=0, data=Data(str(tmp_path / "a.jsonl"), held_out=4))
    assert passed and "8 of 8 rows read" in output and "4 of 4 rows read" in output
    found = re.findall(r"the answer is empty in (?:row|2 rows:) ([\d, ]+)", output)
    assert sorted(re.findall(r"\d+", ",".join(found))) == ["3", "5"]
    assert "the prompt is empty in row 0: the model reads nothing" in output


@pytest.mark.parametrize(
    ("row", "warning"),
    [
        ({"prompt": '[{"role": "user", "content": "What?"}]'}, "holds messages written as a text"),
        ({"prompt": "<|im_start|>user\nWhat?<|im_end|>"}, "are written in a chat template"),
        ({"prompt": "What?", "image": "a.png"}, "holds images that no prompt shows"),
    ],
)
def test_what_a_run_warns_of_is_shown_before_the_first_task(qwen3_vl, tmp_path, row, warning):
    """It was in the plan of the run alone."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {"answer": "1"}) + "\n" + json.dumps(row | {"answer": ""}))
    output, passed = shown(qwen3_vl, show=1, data=Data(str(tmp_path / "a.jsonl"), seed=None))
    output = " ".join(output.split())
    assert passed and output.count(warning) == 1 and output.index(warning) < output.index("tokens")
    assert output.count("is empty in row 1") == 1


def test_marks_without_an_image_are_warned_of(qwen3_vl, tmp_path):
    (tmp_path / "a.png").write_bytes(png((64, 64)))
    rows = [("<image>One?", 1), ("<image>None?", 0), ("One?", 1)]
    lines = [json.dumps({"prompt": prompt, "images": ["a.png"] * images, "answer": "1"}) for prompt, images in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    output, passed = shown(qwen3_vl, show=0, data=Data(str(tmp_path / "a.jsonl")))
    assert passed and "more <image> marks than images" in output and "as text: row 1\n" in output


def two_marks(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "<image><image>?" if index % 2 else "<image>?", "images": [Image.new("RGB", (64, 32))]}


def test_rows_with_the_same_error_are_one_problem_and_those_without_an_answer_one_warning(qwen3_vl):
    output, passed = shown(qwen3_vl, show=0, data=Data(generator=two_marks, size=8, seed=None))
    assert not passed and output.count("problem") == 1
    assert "task 1 of generator 'two_marks': 2 <image> marks for 1 images" in output
    assert "marks are not read (4 rows: 1, 3, 5, 7)" in output
    assert "task.answer is None in 4 rows: 0, 2, 4, 6: give 'answer' if the env reads it" in output


def test_each_part_of_a_mixture_is_shown_with_its_share(qwen3_vl):
    parts = {
        "seen": Part(data=Data(generator=seeing, size=3), weight=3),
        "greet": Part(data=Data(generator=numbered, size=2), env=Greet),
    }
    output, _ = shown(qwen3_vl, env=Look, mixture=parts)
    assert "seen      3 tasks, 75% of the draws" in output and "greet     2 tasks, 25% of the draws" in output
    assert output.index("seeing/0/") < output.index("numbered/0/")


def test_the_command_takes_a_recipe_and_overrides(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "recipes/quickstart.py")
    monkeypatch.setattr(
        sys, "argv", ["vlmrl", "data", "check", recipe, "--data.size", "3", "--show", "1", "--rows", "2"]
    )
    cli.main()
    output = capsys.readouterr().out
    assert "3 tasks to train on, 256 held out" in output and "image 1   32x32 px" in output
    monkeypatch.setattr(sys, "argv", ["vlmrl", "data", "chek"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Available subcommands: check" in capsys.readouterr().err


def test_conversations_are_shown_with_their_masks_and_bad_ones_are_listed(qwen3_vl, tmp_path):
    Image.new("RGB", (64, 32)).save(tmp_path / "a.png")
    talk = [("user", "<image>What?"), ("assistant", "red"), ("user", "and?"), ("assistant", "no")]
    messages = [{"role": role, "content": text} for role, text in talk]
    columns = [{"images": images, "id": 1} for images in (["a.png"], ["a.png"], ["none.png"], [])]
    rows = [{"messages": messages} | each for each in columns]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sft = SFT(data={"talks": Conversations(path=str(tmp_path / "rows.jsonl"))})
    output, passed = shown(qwen3_vl, sft=sft, env=None)
    assert not passed
    assert "not read: columns id" in output
    assert "⟦image 1: 2 tokens⟧" in output and output.count("▶") == 2
    assert "▶red⟦<|im_end|>⟧◀" in output and "▶no⟦<|im_end|>⟧◀" in output
    assert "images: row 2 of" in output and "marks: row 3 of" in output
    assert "2 of 4 rows can be trained on (1 images, 1 marks)" in output
