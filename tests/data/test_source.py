"""Rows and generators become tasks: columns, images, paths, splits, order."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets as hf
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlmrl.config import Config, Data, Eval, EvalData, Part
from vlmrl.data import TaskMixture, TaskSource, contents, load_run_tasks, load_split, load_tasks, task_seed
from vlmrl.data.dataset_rows import Rows
from vlmrl.types import Task


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def png(color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(buffer, format="PNG")
    return buffer.getvalue()


A, B, C = png("red"), png("green"), png("blue")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task_with(prompt: Any, images: Any = None, **options: Any) -> Task:
    """The one task of a generator that returns this row."""
    row = {"prompt": prompt, "images": images}
    return load_tasks(Data(generator=lambda index, seed: row, size=1, **options))[0]


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def content(task: Task) -> Any:
    assert [message["role"] for message in task.prompt] == ["user"]
    return task.prompt[0]["content"]


# A string prompt


def test_a_string_without_images_stays_a_string_and_its_mark_is_prose():
    assert task_with("What does <image> mean in HTML?").prompt == [
        {"role": "user", "content": "What does <image> mean in HTML?"}
    ]


@pytest.mark.parametrize("name", ["image", "picture"])
def test_a_mark_in_a_row_without_images_is_a_bad_row(name: str, tmp_path):
    row = {name: A}
    remedy = f"no 'images', only 'prompt', '{name}': rename '{name}' to 'images', or map the column: data.columns="
    made = {"prompt": "<image>Color?", **row}
    with pytest.raises(ValueError, match=r"task 0 of generator.*: the prompt has the mark <image>") as error:
        load_tasks(Data(generator=lambda index, seed: made, size=1))[0]
    assert remedy in str(error.value)
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "<image>Color?", **dict.fromkeys(row, "a.png")}])
    with pytest.raises(ValueError, match=r"row 0 of .*: the prompt has the mark <image>"):
        load_tasks(Data(str(path)))[0]
    in_parts = [{"role": "user", "content": [{"type": "image", "image": A}]}, {"role": "user", "content": "<image>?"}]
    for prompt in ([{"role": "user", "content": [text("<image>?")]}], in_parts):
        load_tasks(Data(generator=lambda index, seed, prompt=prompt: {"prompt": prompt, **row}, size=1))[0]


def test_more_marks_than_images_make_a_bad_row():
    with pytest.raises(
        ValueError, match=r"task 0 of generator.*: 2 <image> marks for 1 images: each mark needs an image"
    ):
        task_with("<image>Color? <image>", [A])
    with pytest.raises(ValueError, match="1 <image> marks for 0 images"):
        task_with([{"role": "user", "content": [{"type": "image"}]}, {"role": "user", "content": "<image>"}], [A])


@pytest.mark.parametrize(
    ("prompt", "images", "shown"),
    [
        ("from <image> to <image>", [A, B], [text("from "), image(A), text(" to "), image(B)]),
        ("Compare.", [A, B], [image(A), image(B), text("Compare.")]),
        ("See <image> here", [A, B, C], [image(A), image(B), text("See "), image(C), text(" here")]),
        (
            [{"role": "user", "content": [{"type": "image"}, text("Is <image> a tag?")]}],
            [A],
            [image(A), text("Is <image> a tag?")],
        ),
    ],
)
def test_marks_take_the_last_images_and_the_others_go_first(prompt, images, shown):
    task = task_with(prompt, images)
    assert (content(task), task.images) == (shown, images)


def test_one_image_needs_no_list():
    assert content(task_with("<image>", A)) == [image(A)]
    pil = Image.new("RGB", (2, 2))
    assert content(task_with("x", pil))[0]["image"] is pil


def test_an_image_that_is_none_names_its_task():
    with pytest.raises(ValueError, match=r"task 0 of generator.*must be bytes, a path.*not None"):
        task_with("<image><image>", [A, None])


# A list of messages


def test_bare_image_parts_take_the_images_in_order():
    prompt = [
        {"role": "system", "content": "Look at <image>."},
        {"role": "user", "content": [{"type": "image"}, text("and <image>"), {"type": "image"}]},
    ]
    task = task_with(prompt, [A, B])
    assert task.prompt == [
        {"role": "system", "content": "Look at <image>."},
        {"role": "user", "content": [image(A), text("and <image>"), image(B)]},
    ]
    assert prompt[1]["content"][0] == {"type": "image"}  # the row itself is left alone


@pytest.mark.parametrize("indices", [(1, 0), (0, 0), (0, 2), (-1, 0), ("0", "1"), ([0], [1])])
def test_image_parts_that_name_other_images_than_the_next_are_refused(indices):
    """As ``{"type": "image", "index": 1, "text": None}``: the index was ignored, so that the prompt showed the wrong image."""

    def prompt(*indices):
        return [{"role": "user", "content": [{"type": "image", "index": each, "text": None} for each in indices]}]

    with pytest.raises(
        ValueError, match=r"task 0 of generator.*: the index of its image parts must count the row's images in order"
    ):
        task_with(prompt(*indices), [A, B])
    for in_order in [(0, 1), (1, 2), (None, None)]:
        assert task_with(prompt(*in_order), [A, B]).prompt[0]["content"] == [image(A), image(B)]


def test_marks_count_in_all_user_messages_only():
    prompt = [
        {"role": "user", "content": "<image> first"},
        {"role": "assistant", "content": "I see <image>"},
        {"role": "user", "content": "then <image>"},
    ]
    assert task_with(prompt, [A, B]).prompt == [
        {"role": "user", "content": [image(A), text(" first")]},
        {"role": "assistant", "content": "I see <image>"},
        {"role": "user", "content": [text("then "), image(B)]},
    ]


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("one", "two <image>", [[image(A), text("one")], [text("two "), image(B)]]),
        ([{"type": "image"}], "<image> b", [[image(A)], [image(B), text(" b")]]),
    ],
)
def test_unmarked_images_and_bare_parts_go_before_marks(first, second, shown):
    prompt = [{"role": "user", "content": each} for each in (first, second)]
    assert [message["content"] for message in task_with(prompt, [A, B]).prompt] == shown


@pytest.mark.parametrize(
    ("prompt", "images", "numbers"),
    [
        ([{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], [A], "1 images for 2 image parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], [A, B], "2 images for 1 image parts"),
        ([{"role": "user", "content": [text("no source")]}], [A], "1 images for 0 image parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "0 images for 1 image parts"),
    ],
)
def test_counts_that_do_not_work_out_are_named(prompt, images, numbers):
    with pytest.raises(ValueError, match=f"task 0 of generator.*: {numbers}"):
        task_with(prompt, images)


@pytest.mark.parametrize(
    "messages",
    [
        [("user", [image(A), text("one")]), ("user", "two")],
        [("user", "one"), ("user", [image(A), text("two")])],
        [("user", [text("<image> one")]), ("user", "two")],
        [("system", "<image> is the key."), ("user", "one")],
        [("user", "one"), ("assistant", "call"), ("tool", "<image> found")],
    ],
)
def test_images_without_a_mark_are_refused_where_a_prompt_has_other_places_for_them(messages):
    """They were put before the first text of a user: shown twice, or at another place than the mark's."""
    prompt = [{"role": role, "content": content} for role, content in messages]
    with pytest.raises(ValueError, match=r"1 images for 0 image parts without a source and 0 <image>"):
        task_with(prompt, [A])


def test_a_mark_whose_image_is_in_another_column_than_that_of_other_rows_is_refused(tmp_path):
    """As in a file of two datasets: the model read `<image>` as text, without the image."""
    rows = [{"prompt": "<image>a", "image": "a.png"}, {"prompt": "<image>b", "image": None, "images": []}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = load_tasks(Data(str(tmp_path / "rows.jsonl")))
    with pytest.raises(ValueError, match="the mark <image>, but the row has no 'images', only 'image'"):
        tasks[0]
    assert tasks[1].prompt == [{"role": "user", "content": "<image>b"}]


def test_parts_with_their_own_source_keep_it_in_one_form():
    prompt = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": A},
                {"type": "image", "url": "https://x.org/a.png", "text": None},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "image", "base64": "aGk="},
                {"type": "image", "image": None},
                "plain",
            ],
        }
    ]
    task = task_with(prompt, [B])
    sources = [A, "https://x.org/a.png", "data:image/png;base64,AAAA", b"hi", B]
    assert content(task) == [*map(image, sources), text("plain")]
    assert task.images == sources


def test_other_keys_of_messages_stay_and_empty_ones_go():
    result = {"role": "tool", "content": "4"}
    prompt = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}, result]
    assert task_with(prompt).prompt == [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, result]


def test_a_prompt_that_ends_with_the_answer_is_a_bad_row():
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    reason = "its last message has the role assistant: it is the answer. Remove that message from the prompt"
    with pytest.raises(ValueError, match=reason):
        task_with(messages)
    for made in (Task("t", messages), {"prompt": messages}):
        with pytest.raises(ValueError, match=rf"task 0 of generator '<lambda>': .* {reason}"):
            load_tasks(Data(generator=lambda index, seed, made=made: made, size=1)).make(0)


@pytest.mark.parametrize("prompt", [None, 3, [], ["hi"], [{"content": "no role"}]])
def test_a_prompt_of_another_kind_is_refused(prompt):
    with pytest.raises(ValueError, match="must be a string or a list of messages"):
        task_with(prompt)


def test_the_system_prompt_goes_before_a_prompt_without_one():
    assert task_with("hi", system_prompt="Be brief.").prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    own = [{"role": "system", "content": "Mine"}, {"role": "user", "content": "hi"}]
    assert task_with(own, system_prompt="Be brief.").prompt == own


# Rows


def test_a_row_becomes_a_task(tmp_path):
    path = jsonl(tmp_path / "geo" / "train.jsonl", [{"problem": "1+1?", "gold": "2", "level": 3, "tags": ["a"]}])
    source = load_tasks(Data(str(path), columns={"prompt": "problem", "answer": "gold"}, seed=7))
    assert len(source) == 1
    assert source[0] == Task(
        "geo/train/0",
        [{"role": "user", "content": "1+1?"}],
        answer="2",
        data={"level": 3, "tags": ["a"]},
        source=path.name,
        seed=task_seed(7, 0),
    )


def test_fields_of_a_column_are_named_with_dots(tmp_path):
    rows = [
        {"prompt": "Which?", "reward_model": {"ground_truth": truth}, "extra_info": {"index": number}}
        for number, truth in ((7, "red"), (9, None))
    ]
    path = str(jsonl(tmp_path / "a.jsonl", rows))
    source = load_tasks(Data(path, columns={"answer": "reward_model.ground_truth", "id": "extra_info.index"}))
    assert (source[0].id, source[0].answer) == (f"{tmp_path.name}/a/7", "red")
    assert source[0].data == {"reward_model": {"ground_truth": "red"}, "extra_info": {"index": 7}}
    with pytest.raises(ValueError, match=r"column 'reward_model.ground_truth' is empty"):
        source[1]
    with pytest.raises(ValueError, match=r"maps 'answer' to 'reward_model.truth', which"):
        load_tasks(Data(path, columns={"answer": "reward_model.truth"}))


def test_messages_of_a_dataset_are_not_all_read_at_its_start(tmp_path, monkeypatch):
    """Their images were all in memory at once, of a dataset that may be larger."""
    part = {"type": "image", "image": b"PNG"}
    rows = [{"prompt": [{"role": "user", "content": [part]}], "answer": "x"}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read, column = [], Rows.column
    monkeypatch.setattr(Rows, "column", lambda self, name: read.append(name) or column(self, name))
    assert load_tasks(Data(str(tmp_path / "rows.parquet")))[2].images == [b"PNG"]
    assert read == ["answer"]


def test_an_empty_field_of_a_column_is_a_warning(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "Which?", "reward_model": {"ground_truth": " "}}])
    (warning,) = load_tasks(Data(str(path), columns={"answer": "reward_model.ground_truth"})).warnings
    assert warning.startswith("column 'reward_model.ground_truth' is empty in row 0")


def test_seeds_are_stable_and_differ():
    assert [task_seed(0, 0), task_seed(0, 1), task_seed(1, 0)] == [713683445, 1419524863, 208367845]


def test_a_missing_mapped_column_lists_the_columns(tmp_path):
    path = str(jsonl(tmp_path / "a.jsonl", [{"problem": "x", "gold": "2"}]))
    with pytest.raises(ValueError, match=r"no column 'prompt': set data.columns.*columns are: problem, gold"):
        load_tasks(Data(path))
    for name in ("images", "answer"):
        with pytest.raises(ValueError, match=rf"maps '{name}' to '{name}'"):
            load_tasks(Data(path, columns={"prompt": "problem", name: name}))
    assert load_tasks(Data(path, columns={"prompt": "problem"}))[0].answer is None


def test_messages_of_mixed_content_survive_json(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": 1},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, text("x")]}], "answer": "C", "images": ["p.png"]},
    ]
    (tmp_path / "p.png").write_bytes(A)
    path = jsonl(tmp_path / "a.jsonl", rows)
    source = load_tasks(Data(str(path)))
    assert (source[0].prompt, source[0].answer, source[0].images) == ([{"role": "user", "content": "hi"}], 1, [])
    assert (content(source[1]), source[1].answer) == ([image(str(tmp_path / "p.png")), text("x")], "C")


def test_a_calls_arguments_get_no_keys_of_other_rows(tmp_path):
    """Parquet has one type for the whole column: it gives each object the keys of all rows' objects."""

    def prompt(arguments):
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        return [{"role": "user", "content": "?"}, call, {"role": "tool", "content": "sunny"}]

    prompts = [prompt({"city": "Rome"}), prompt({"a": {"b": 1, "c": [1]}}), prompt({"a": {"d": "x"}})]
    hf.Dataset.from_list([{"prompt": each} for each in prompts]).to_parquet(tmp_path / "a.parquet")
    assert [task.prompt for task in load_tasks(Data(str(tmp_path / "a.parquet")))] == prompts


def test_image_paths_are_found_beside_the_file_then_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "set" / "images" / "0.png").write_bytes(A)
    (tmp_path / "1.png").write_bytes(B)
    rows = [{"prompt": "x", "images": name} for name in ("images/0.png", "1.png", "gone.png", "http://x/2.png")]
    path = jsonl(tmp_path / "set" / "a.jsonl", rows)
    source = load_tasks(Data(str(path)))
    assert source[0].images == [str(tmp_path / "set" / "images" / "0.png")]
    assert source[1].images == [str(tmp_path / "1.png")]
    assert source[3].images == ["http://x/2.png"]
    with pytest.raises(ValueError, match=r"row 2 .* no image 'gone\.png'\. Looked at: .*set/gone\.png, .*gone\.png"):
        source[2]


GENERATOR = """
import functools

def make(index, seed):
    return {"prompt": "x", "images": ("both.png", "work.png", "gone.png")[index]}

class Maker:
    def __call__(self, index, seed):
        return make(index, seed)

partial, instance = functools.partial(make), Maker()
"""


@pytest.mark.parametrize("name", ["make", "partial", "instance"])
def test_a_generators_images_are_found_beside_its_file_then_in_the_working_directory(tmp_path, monkeypatch, name):
    work, own = tmp_path / "work", tmp_path / "own"
    for path in (own / "both.png", work / "both.png", work / "work.png"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(A)
    (own / "tasks.py").write_text(GENERATOR)
    monkeypatch.chdir(work)
    source = load_tasks(Data(generator=f"{own}/tasks.py:{name}", size=3))
    assert [source[index].images for index in (0, 1)] == [[str(own / "both.png")], [str(work / "work.png")]]
    with pytest.raises(ValueError, match=r"no image 'gone\.png'\. Looked at: .*own/gone\.png, .*work/gone\.png"):
        source[2]


def test_images_are_not_decoded(tmp_path, monkeypatch):
    features = hf.Features({"prompt": hf.Value("string"), "images": hf.List(hf.Image()), "extra": hf.Image()})
    row = {"prompt": "x", "images": [{"bytes": A, "path": None}, {"bytes": b"no image", "path": None}], "extra": None}
    hf.Dataset.from_list([row], features=features).to_parquet(tmp_path / "a.parquet")
    monkeypatch.setattr(Image, "open", None)
    task = load_tasks(Data(str(tmp_path / "a.parquet")))[0]
    assert task.images == [{"bytes": A, "path": None}, {"bytes": b"no image", "path": None}]
    assert task.data == {"extra": None}


def test_a_column_of_single_images_and_images_inside_messages(tmp_path):
    message = {"role": hf.Value("string"), "content": hf.List({"type": hf.Value("string"), "image": hf.Image()})}
    features = hf.Features({"prompt": hf.List(message), "image": hf.Image()})
    own = {"bytes": A, "path": None}
    parts = [{"type": "image", "image": own}, {"type": "image", "image": None}]
    row = {"prompt": [{"role": "user", "content": parts}], "image": {"bytes": B, "path": None}}
    hf.Dataset.from_list([row], features=features).to_parquet(tmp_path / "a.parquet")
    task = load_tasks(Data(str(tmp_path / "a.parquet"), columns={"images": "image"}))[0]
    assert content(task) == [image(own), image({"bytes": B, "path": None})]


# Paths and splits


def test_data_without_path_or_generator_is_an_error():
    with pytest.raises(ValueError, match=r"set data\.path .* or data\.generator"):
        load_tasks(Data())


def test_a_relative_path_is_looked_up_in_the_working_directory(tmp_path, monkeypatch):
    jsonl(tmp_path / "data" / "a.jsonl", [{"prompt": "work"}])
    monkeypatch.chdir(tmp_path)
    assert content(load_tasks(Data("data/a.jsonl"))[0]) == "work"


@pytest.mark.parametrize("name", ["gone.parquet", "data/gone.jsonl", "./gone", "a/b/c", "/gone/folder"])
def test_a_missing_local_path_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"does not exist\. Looked at") as error:
        load_tasks(Data(name))
    assert str((tmp_path / name).resolve()) in str(error.value)


def test_a_failing_hub_name_names_both_places(tmp_path, monkeypatch):
    def refuse(path):
        raise FileNotFoundError("no such dataset")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf, "load_dataset_builder", refuse)
    with pytest.raises(ValueError, match=rf"'some/name' is nothing local .*{tmp_path}.* the hub says: no such dataset"):
        load_tasks(Data("some/name"))


def test_a_hub_name_is_given_to_datasets(monkeypatch):
    rows = hf.Dataset.from_list([{"problem": "x"}])
    parquet = SimpleNamespace(config=SimpleNamespace(data_files=None), info=SimpleNamespace(features=None))
    monkeypatch.setattr(hf, "load_dataset_builder", {"hiyouga/geometry3k": parquet}.get)
    monkeypatch.setattr(hf, "load_dataset", lambda path, split: {("hiyouga/geometry3k", "test"): rows}[path, split])
    task = load_tasks(Data("hiyouga/geometry3k", "test", columns={"prompt": "problem"}))[0]
    assert (task.id, task.source) == ("geometry3k/test/0", "hiyouga/geometry3k")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"one of \.parquet, \.json, \.jsonl, \.csv or a folder"):
        load_tasks(Data(str(tmp_path / "a.txt")))


def test_a_folder_of_files_has_splits_by_name(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation"):
        hf.Dataset.from_list([{"prompt": name}]).to_parquet(tmp_path / "geo" / "data" / f"{name}.parquet")
    (tmp_path / "geo" / "README.md").write_text("not data")
    source = load_tasks(Data(str(tmp_path / "geo")))
    assert [content(source[i]) for i in range(len(source))] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert source[1].id == "geo/train/1"
    assert content(load_tasks(Data(str(tmp_path / "geo"), "validation"))[0]) == "validation"
    with pytest.raises(ValueError, match=r"data.split 'test' names no file.*data/validation\.parquet"):
        load_tasks(Data(str(tmp_path / "geo"), "test"))


def test_files_that_name_no_split_are_all_train(tmp_path):
    jsonl(tmp_path / "geo" / "part_1.jsonl", [{"prompt": "1"}])
    jsonl(tmp_path / "geo" / "part_2.jsonl", [{"prompt": "2"}])
    assert len(load_tasks(Data(str(tmp_path / "geo")))) == 2
    with pytest.raises(ValueError, match="names no file"):
        load_tasks(Data(str(tmp_path / "geo"), "validation"))
    jsonl(tmp_path / "geo" / "test.jsonl", [{"prompt": "3"}])
    with pytest.raises(ValueError, match="names no file"):
        load_tasks(Data(str(tmp_path / "geo")))


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"has: no \.parquet, \.json, \.jsonl, \.csv file"):
        load_tasks(Data(str(tmp_path)))


def test_a_split_may_be_a_slice(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": str(i)} for i in range(5)])
    source = load_tasks(Data(str(path), "train[3:]"))
    assert [content(source[i]) for i in range(len(source))] == ["3", "4"]


def test_folders_saved_by_datasets(tmp_path):
    rows = hf.Dataset.from_list([{"prompt": "x"}])
    rows.save_to_disk(tmp_path / "one")
    hf.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    assert content(load_tasks(Data(str(tmp_path / "one")))[0]) == "x"
    assert load_tasks(Data(str(tmp_path / "two"), "test"))[0].id == "two/test/0"
    with pytest.raises(ValueError, match=r"data.split 'val' is not in .*two, which has: train, test"):
        load_tasks(Data(str(tmp_path / "two"), "val"))


# Order


def test_order_is_a_stable_shuffle_of_seed_and_epoch():
    def source(**options: Any):
        return load_tasks(Data(generator=lambda index, seed: {"prompt": "x"}, size=8, **options))

    assert list(source(seed=None).order(3)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(source().order(0)) == [0, 2, 1, 4, 6, 7, 3, 5]
    assert source().order(0) == source().order(0) != source().order(1)
    assert source(seed=1).order(0) != source().order(0)
    assert sorted(source().order(1)) == list(range(8))


def test_limit_takes_the_first_rows(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": str(i)} for i in range(5)])
    source = load_tasks(Data(str(path), size=2))
    assert len(source) == 2
    assert sorted(source.order(0)) == [0, 1]
    with pytest.raises(IndexError, match=r"task index 2 is not in 0\.\.1"):
        source[2]
    assert len(load_tasks(Data(str(path), size=50))) == 5


# Generators


def counting(index: int, seed: int, *, step: int = 1) -> dict[str, Any]:
    return {"prompt": f"{index}+{step}?", "answer": str(index + step), "level": seed % 2}


def test_a_generator_makes_tasks_from_index_and_seed():
    source = load_tasks(Data(generator=counting, size=3, options={"step": 10}, seed=5))
    assert len(source) == 3
    assert source[2] == Task(
        "counting/5/2",
        [{"role": "user", "content": "2+10?"}],
        answer="12",
        data={"level": task_seed(5, 2) % 2},
        source="counting",
        seed=task_seed(5, 2),
    )


def test_the_columns_of_what_a_generator_makes():
    """``answer`` was None, and nothing said that the columns were not used."""

    def made(index: int, seed: int) -> dict[str, Any]:
        return {"prompt": "own", "question": "q", "reward_model": {"ground_truth": 0}, "kind": "algebra", "images": []}

    columns = {"prompt": "question", "answer": "reward_model.ground_truth", "source": "kind", "images": "elsewhere"}
    task = load_tasks(Data(generator=made, size=1, columns=columns))[0]
    assert (task.prompt[0]["content"], task.answer, task.source) == ("q", 0, "algebra")
    assert task.data == {"prompt": "own", "reward_model": {"ground_truth": 0}}


def test_a_generator_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maze.py").write_text(
        "from vlmrl import Task\n"
        "def make(index, seed, size=4):\n"
        "    return Task(f'maze/{size}/{index}', [{'role': 'user', 'content': 'go'}], data={'seed': seed})\n"
    )
    task = load_tasks(Data(generator="maze.py:make", size=1, system_prompt="s"))[0]
    assert (task.id, task.seed, task.source) == ("maze/4/0", task_seed(0, 0), "make")
    assert task.data == {"seed": task.seed}
    assert [message["role"] for message in task.prompt] == ["system", "user"]


def test_options_that_do_not_fit_are_an_error_at_once():
    with pytest.raises(ValueError, match=r"counting.*unexpected keyword argument 'stride'"):
        load_tasks(Data(generator=counting, size=1, options={"stride": 2}))
    with pytest.raises(ValueError, match=r"data.generator must be a function \(index, seed\), but it is 3.14"):
        load_tasks(Data(generator="math:pi", size=1))


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (None, "None"),
        ("x", "'x'"),
        ({"images": [A] * 99, "question": "1"}, "a dict with the keys 'images', 'question'"),
    ],
)
def test_what_is_no_task_is_refused(made, shown):
    with pytest.raises(ValueError, match=f"must return a Task or a dict with a prompt, but it returned {shown}$"):
        load_tasks(Data(generator=lambda index, seed: made, size=1))[0]


# Held out


def ids(source: TaskSource | None) -> list[str]:
    assert source is not None
    return [task.id for task in source]


def rows_of(size: int, **options: Any) -> Data:
    return Data(generator=lambda index, seed: {"prompt": "x"}, size=size, **options)


@pytest.mark.parametrize(("amount", "least", "most"), [(0.25, 200, 300), (17, 17, 17), (1, 1, 1)])
def test_held_out_and_training_rows_are_disjoint_and_complete(amount, least, most):
    train, held_out = load_split(rows_of(1000, held_out=amount))
    assert least <= len(ids(held_out)) <= most
    assert sorted(ids(train) + ids(held_out)) == sorted(ids(load_tasks(rows_of(1000))))
    assert ids(load_tasks(rows_of(1000, held_out=amount))) == ids(train)


def test_what_is_held_out_is_the_same_for_every_seed_and_order():
    first, other = (
        load_split(rows_of(50, held_out=0.2))[1],
        load_split(rows_of(50, held_out=0.2, seed=None))[1],
    )
    assert first is not None and other is not None
    assert list(first.rows) == list(other.rows) == [8, 9, 39, 46, 47, 49]


def test_a_share_holds_out_the_same_rows_when_rows_are_added():
    (_, few), (_, many) = load_split(rows_of(50, held_out=0.2)), load_split(rows_of(500, held_out=0.2))
    assert few is not None and many is not None
    assert [row for row in many.rows if row < 50] == list(few.rows)


def test_rows_of_one_id_stay_together_wherever_they_stand(tmp_path):
    rows = [{"prompt": f"{figure} {number}", "figure": f"f{figure}"} for number in range(3) for figure in range(20)]
    shuffled = rows[::-1]
    data = [
        Data(str(jsonl(tmp_path / name, given)), columns={"id": "figure"}, held_out=0.3)
        for name, given in (("a.jsonl", rows), ("b.jsonl", shuffled))
    ]
    held_out = [sorted(content(task) for task in load_split(each)[1] or ()) for each in data]
    assert held_out[0] == held_out[1]
    assert 0 < len(held_out[0]) < 60 and len(held_out[0]) % 3 == 0


@pytest.mark.parametrize(("amount", "kept_back"), [(5, 5), (0.01, 0)])
def test_a_side_without_rows_is_an_error(amount, kept_back):
    with pytest.raises(ValueError, match=rf"data\.held_out {amount} keeps back {kept_back} of 5 rows"):
        load_split(rows_of(5, held_out=amount))


# Ids and sources


def test_a_row_has_the_id_and_the_source_that_its_columns_give(tmp_path):
    path = jsonl(tmp_path / "geo" / "train.jsonl", [{"prompt": "x", "uid": 17, "data_source": "hub/geo", "level": 2}])
    task = load_tasks(Data(str(path), columns={"id": "uid", "source": "data_source"}))[0]
    assert (task.id, task.source, task.data) == ("geo/train/17", "hub/geo", {"level": 2})


@pytest.mark.parametrize("name", ["id", "source", "answer"])
def test_a_row_without_its_id_source_or_answer_is_named(tmp_path, name):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "c": "1"}, {"prompt": "y", "c": None}])
    source = load_tasks(Data(str(path), columns={name: "c"}))
    with pytest.raises(ValueError, match=r"row 1 of .*column 'c' is empty"):
        source[1]


# What an env may change


def test_a_copy_shares_the_images_and_nothing_else():
    red = Image.new("RGB", (2, 2), "red")
    task = task_with("<image>Which?", [red])
    copy = task.copy()
    assert copy == task
    assert copy.images[0] is red and copy.prompt[0]["content"][0]["image"] is red
    copy.prompt[0]["content"].pop()
    copy.data["seen"] = True
    assert task == task_with("<image>Which?", [red])


def test_a_task_that_cannot_be_copied_is_named():
    with pytest.raises(ValueError, match=r"task t cannot be copied .*lock.*create everything else in the env"):
        Task("t", [], data={"lock": threading.Lock()}).copy()


# Files that are no good


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("a.jsonl", "", r"a\.jsonl is empty"),
        ("a.jsonl", " \n\n", r"a\.jsonl is empty"),
        ("a.parquet", "", r"a\.parquet is empty"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": oops}\n', r"a\.jsonl, line 2 is not JSON .*oops"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "y', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl is not JSON .*decoding a JSON array"),
        ("a.parquet", "prompt,answer", r"a\.parquet: .*not a parquet file"),
        ("a.json", "[{]", r"a\.json is not JSON \(Expecting property name"),
        ("a.json", "[]", r"a\.json is empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(tmp_path, name, written, message):
    (tmp_path / name).write_text(written)
    with pytest.raises(ValueError, match=message):
        load_tasks(Data(str(tmp_path / name)))


def test_a_slice_without_rows_says_so(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    with pytest.raises(ValueError, match=r"a\.jsonl' has no rows in the split 'train\[5:\]'"):
        load_tasks(Data(str(path), "train[5:]"))


def test_a_csv_file_is_read_and_empty_answers_are_reported(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,level\nWhat?,yes,1\nWho?,  ,2\n")
    tasks = load_tasks(Data(str(tmp_path / "a.csv"), seed=None))
    assert (tasks[0].prompt[0]["content"], tasks[0].answer, tasks[0].data) == ("What?", "yes", {"level": "1"})
    assert list(tasks.warnings) == ["column 'answer' is empty in row 1: any response contains the answer"]


def test_whole_numbers_that_a_reader_made_floats_are_reported(tmp_path):
    hf.Dataset.from_dict({"prompt": ["x", "y"], "answer": [7.0, None]}).to_parquet(tmp_path / "a.parquet")
    [warning] = load_tasks(Data(str(tmp_path / "a.parquet"))).warnings
    assert re.match(r"column 'answer' holds floats such as 7.0 \(row 0\): .* Write answers as texts", warning)


@pytest.mark.parametrize("answers", [[7, 2.5], [2.0, 1.5], [123456789012345678901234, 1], [2**63, -(2**63)], [1, True]])
def test_numbers_of_json_stay_what_they_are(tmp_path, answers):
    tasks = load_tasks(Data(str(jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "answer": each} for each in answers]))))
    assert [repr(task.answer) for task in tasks] == list(map(repr, answers)) and tasks.warnings == []


@pytest.mark.parametrize("answers", ["1\n2", "0.5\n2.5", "007\n8", "x\n1.0"])
def test_answers_that_are_as_the_file_has_them_are_not_reported(tmp_path, answers):
    (tmp_path / "a.csv").write_text("answer\n" + answers)
    assert load_tasks(Data(str(tmp_path / "a.csv"), prompt="x")).warnings == []


def test_a_folder_of_images_has_their_folders_as_answers(tmp_path):
    folder = tmp_path / "animals"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "1.png")
    tasks = load_tasks(Data(str(folder), prompt="<image>What is this?", seed=None))
    assert [task.answer for task in tasks] == ["cat", "dog"] and all(len(task.images) == 1 for task in tasks)
    assert tasks[0].prompt[0]["content"][1] == {"type": "text", "text": "What is this?"}
    with pytest.raises(ValueError, match=r"has no column 'prompt': set data\.columns .* Its columns are: images"):
        load_tasks(Data(str(folder)))


def test_a_folder_of_images_with_metadata_has_its_columns(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    (tmp_path / "metadata.csv").write_text("file_name,prompt,answer\n1.png,<image>Which color?,black\n")
    (task,) = load_tasks(Data(str(tmp_path)))
    assert task.answer == "black" and len(task.images) == 1
    assert task.prompt[0]["content"][-1] == {"type": "text", "text": "Which color?"}


def test_a_mark_in_the_prompt_of_the_setting_needs_a_column_of_images(tmp_path):
    """As beside a file of rows in a folder of images: its rows were asked without an image, and the mark was read as text."""
    folder = tmp_path / "pets"
    (folder / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "cat/1.png")
    (folder / "info.json").write_text('{"name": "pets", "license": "MIT"}')
    with pytest.raises(
        ValueError, match=r"data\.prompt has the mark <image>, but .* has no images: its columns are name, license"
    ):
        load_tasks(Data(str(folder), prompt="<image>What is this?"))
    assert len(load_tasks(Data(str(folder), prompt="What is this?"))) == 1


def test_a_script_in_a_datasets_folder_does_not_run(tmp_path):
    """Its name is the folder's, as a dataset's loading script of the hub had."""
    folder = tmp_path / "geo"
    folder.mkdir()
    (folder / "geo.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "train.jsonl").write_text('{"problem": "a"}\n')
    assert len(load_tasks(Data(path=str(folder), columns={"prompt": "problem"}))) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "cell",
    [
        A,
        [A, B],
        {"bytes": A},
        "data:image/png;base64," + base64.b64encode(A).decode(),
        base64.b64encode(A).decode(),
        "https://example.org/a",
        "https://example.org/a.jpg?size=8",
    ],
    ids=["bytes", "list", "struct", "data URI", "base64", "URL", "URL of a file"],
)
def test_images_of_each_form_that_no_prompt_shows_are_warned_of(tmp_path, cell):
    """Of bytes, as many parquet files hold them, of base64 and of URLs nothing was said: they were trained without."""
    pq.write_table(pa.table({"prompt": ["x"], "image": [cell]}), tmp_path / "a.parquet")
    (warning,) = load_tasks(Data(str(tmp_path / "a.parquet"))).warnings
    assert warning.startswith("column 'image' holds images that no prompt shows: map it to images with data.columns")


def test_images_that_no_prompt_shows_are_warned_of(tmp_path):
    """A dataset whose column is `image` and whose prompts have no mark was trained without its images, unsaid."""
    path = str(jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "image_info": {"size": 8}, "image": ["a.PNG"]}]))
    (warning,) = load_tasks(Data(path, columns={"answer": "image_info.size"})).warnings
    assert warning.startswith("column 'image' holds images that no prompt shows: map it to images with data.columns")
    assert not load_tasks(Data(path, columns={"images": "image"})).warnings
    shown = [{"prompt": "x", "images": [], "image": "a.png"}, {"prompt": "x", "image": "none"}]
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "x"}]
    shown.append({"prompt": [{"role": "user", "content": parts}], "image": "a.png"})
    assert not any(load_tasks(Data(str(jsonl(tmp_path / "b.jsonl", [row])))).warnings for row in shown)


QUESTION = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]


@pytest.mark.parametrize(
    ("prompt", "column", "cell"),
    [
        (QUESTION, "image", {"bytes": A, "path": None}),
        (QUESTION, "image", A),
        ([{"role": "user", "content": [{"type": "text", "text": "How many?"}]}], "image", A),
        (QUESTION, "image", b"BM is no format that is recognized"),
        ("Book a flight.", "screenshot", {"bytes": A, "path": None}),
        ("Book a flight.", "screenshot", {"bytes": None, "path": "0.webp"}),
        ("What?", "decoded_image", [A, B]),
        ("What?", "jpg", b"\xff\xd8\xff\xe0"),
        ("What?", "webp", b"RIFF\n\0\0\0WEBPVP8 "),
        ("What?", "frame", base64.b64encode(A).decode()),
        ("What?", "frame", base64.b64encode(b"RIFF\n\0\0\0WEBPVP8 ").decode()),
    ],
)
def test_images_beside_messages_and_in_columns_of_any_name_are_warned_of(tmp_path, prompt, column, cell):
    """As of TRL's GRPO with images, Mind2Web, MathVista or a WebDataset: they were trained without their images, unsaid."""
    pq.write_table(pa.Table.from_pylist([{"prompt": prompt, column: cell}]), tmp_path / "a.parquet")
    (warning,) = load_tasks(Data(str(tmp_path / "a.parquet"))).warnings
    assert warning.startswith(f"column '{column}' holds images that no prompt shows: map it to images")


def test_a_path_of_an_image_beside_messages_is_warned_of(tmp_path):
    path = str(jsonl(tmp_path / "a.jsonl", [{"prompt": QUESTION, "image": "a.png"}]))
    (warning,) = load_tasks(Data(path)).warnings
    assert warning.startswith("column 'image' holds images that no prompt shows")


@pytest.mark.parametrize("is_list", [False, True])
def test_a_column_whose_type_is_that_of_images_is_warned_of(tmp_path, is_list):
    """Also of formats that are not recognized, and where the first row has none."""
    other = {"bytes": b"BM", "path": None}
    rows = hf.Dataset.from_dict({"prompt": ["a", "b"], "scan": [None, [other] if is_list else other]})
    rows.cast_column("scan", hf.List(hf.Image()) if is_list else hf.Image()).save_to_disk(tmp_path / "saved")
    (warning,) = load_tasks(Data(str(tmp_path / "saved"))).warnings
    assert warning.startswith("column 'scan' holds images that no prompt shows")


def test_other_columns_are_not_taken_for_images(tmp_path):
    """Audio and other files, texts that name a file, and columns that are mapped, such as an image as the answer."""
    sound = b"RIFF\n\0\0\0WAVEfmt "
    cells = [
        {"bytes": sound, "path": "a.wav"},
        sound,
        base64.b64encode(sound).decode(),
        b"%PDF-1.7",
        "See cat.png",
        None,
    ]
    row = {f"field_{number}": cell for number, cell in enumerate(cells)}
    row["target"] = A
    table = pa.Table.from_pylist([{"prompt": QUESTION, **row}])
    late = pa.array([2**40], pa.int64()).cast(pa.timestamp("s"))  # a year that Python has no date for
    pq.write_table(table.append_column("late", late), tmp_path / "a.parquet")
    assert not load_tasks(Data(str(tmp_path / "a.parquet"), columns={"answer": "target"})).warnings


def test_the_column_of_prompts_does_not_count_beside_a_prompt_of_the_setting(tmp_path):
    shown = [{"role": "user", "content": [{"type": "image"}]}]
    pq.write_table(pa.Table.from_pylist([{"prompt": shown, "screenshot": A}]), tmp_path / "a.parquet")
    (warning,) = load_tasks(Data(str(tmp_path / "a.parquet"), prompt="Describe.")).warnings
    assert warning.startswith("column 'screenshot' holds images")


@pytest.mark.parametrize(
    "cell", ['[{""role"": ""user"", ""content"": ""2+2?""}]', "[{'content': '2+2?', 'role': 'user'}]"]
)
def test_messages_that_are_written_as_a_text_are_warned_of(cell, tmp_path):
    """A cell of CSV cannot hold anything else: the model read the JSON, or what pandas writes, as the user's text, unsaid."""
    (path := tmp_path / "a.csv").write_text(f'prompt,answer\n"{cell}",4\n')
    (warning,) = load_tasks(Data(str(path))).warnings
    assert warning.startswith("column 'prompt' holds messages written as a text, which the model reads as one: ")
    path.write_text('prompt,answer\n"[{""a"": 1}]",4\n"[{",5\n')
    assert not load_tasks(Data(str(path))).warnings


def test_a_prompt_with_megabytes_of_blank_lines_is_looked_at_in_linear_time(tmp_path):
    """With its first 200,000 lines blank, the first prompt held up a run for a minute, and twice as many four times as long."""
    row = {"prompt": "\n" * 4_000_000 + '[{"role": "user", "content": "What?"}]', "answer": "x"}
    (warning,) = load_tasks(Data(str(jsonl(tmp_path / "a.jsonl", [row])))).warnings
    assert "messages written as a text" in warning
    row["prompt"] = row["prompt"].replace("[", "")
    (warning,) = load_tasks(Data(str(jsonl(tmp_path / "b.jsonl", [row])))).warnings
    assert "messages written as a text" in warning
    assert not load_tasks(
        Data(str(jsonl(tmp_path / "c.jsonl", [row | {"prompt": "\n" * 4_000_000 + "What?"}])))
    ).warnings


@pytest.mark.parametrize("missing", ["answer", "images"])
def test_rows_to_evaluate_on_need_the_columns_of_those_to_train_on(tmp_path, missing):
    """Under another name, all answers were None, or no task had an image, and the evaluation's reward was one of that."""
    row = {"prompt": "What?", "answer": "x", "images": []}
    path = str(jsonl(tmp_path / "a.jsonl", [row]))
    other = {{"answer": "label", "images": "image"}[missing] if name == missing else name: row[name] for name in row}
    held_out = str(jsonl(tmp_path / "b.jsonl", [other]))
    part = {"one": Part(data=Data(path), eval_data=EvalData(held_out))}
    match = rf"eval\.data\.path must be a dataset with a column '{missing}' for {missing}, .*b\.jsonl' has prompt, "
    with pytest.raises(ValueError, match=match):
        load_run_tasks(Config(data=Data(path), eval=Eval(data=EvalData(held_out)), reward=len))
    with pytest.raises(ValueError, match=r"mixture\.one\.eval_data\.path must be"):
        load_run_tasks(Config(mixture=part, reward=len))
    _, tasks = load_run_tasks(Config(data=Data(held_out), eval=Eval(data=EvalData(path)), reward=len))
    assert tasks is not None and len(tasks) == 1


def test_tasks_without_images_may_be_evaluated_beside_some_with_images(tmp_path):
    path = str(jsonl(tmp_path / "a.jsonl", [{"prompt": "What?", "answer": "x", "images": []}]))
    held_out = str(jsonl(tmp_path / "b.jsonl", [{"prompt": "What?", "answer": "x"}]))
    _, tasks = load_run_tasks(Config(data=Data(path), eval=Eval(data=EvalData(held_out)), reward=len))
    assert tasks is not None and len(tasks) == 1


def test_an_evaluation_of_what_is_trained_is_warned_of(tmp_path):
    def warned(data: Data, held_out: EvalData) -> bool:
        tasks, _ = load_run_tasks(Config(data=data, eval=Eval(data=held_out), reward=len))
        assert isinstance(tasks, TaskSource)
        return any("eval.data has the tasks that are trained on" in warning for warning in tasks.warnings)

    def made(index, seed):
        return {"prompt": f"{index} {seed}"}

    path = str(jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in "abcd"]))
    assert warned(Data(generator=made, size=8), EvalData(generator=made, size=4))
    assert not warned(Data(generator=made, size=8), EvalData(generator=made, size=4, seed=1))
    assert warned(Data(path), EvalData(path, size=2, seed=3))
    assert warned(Data(path), EvalData(path, split="train[:2]"))
    assert not warned(Data(path, split="train[:2]"), EvalData(path, split="train[2:]"))
    assert not warned(Data(path, size=2), EvalData(path, split="train[2:]"))


def test_the_content_of_a_folder_of_images_does_not_change_with_its_place(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / "train").mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / "train" / f"{number}.png")
    first, second = (
        contents("data", load_tasks(Data(path=str(tmp_path / name), prompt="<image>What?")))
        for name in ("first", "second")
    )
    assert first == second and first["data"].startswith("3 rows")


def test_the_content_of_a_dataset_changes_with_its_rows_and_not_with_its_place(tmp_path):
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(200)]

    def content(name: str, rows: list[dict[str, Any]]) -> dict[str, str]:
        (tmp_path / name).mkdir()
        path = jsonl(tmp_path / name / "rows.jsonl", rows)
        return contents("data", load_tasks(Data(path=str(path))))

    first = content("first", rows)
    assert re.fullmatch("200 rows, of content [0-9a-f]{8}", first["data"])
    assert content("copied", rows) == first
    assert (
        contents("data", load_tasks(Data(path=str(jsonl(tmp_path / "more.jsonl", [*rows, rows[0]])))), first) == first
    )
    edited = [rows[0] | {"answer": "x"}, *rows[1:]]
    for name, others in {"more": [*rows, rows[0]], "fewer": rows[1:], "turned": rows[::-1], "edited": edited}.items():
        assert content(name, others)["data"] != first["data"], name
    assert contents("data", load_tasks(Data(generator=lambda index, seed: {"prompt": "a"}, size=2))) == {}
    part = load_tasks(Data(path=str(tmp_path / "first/rows.jsonl")))
    assert contents("sft.data", TaskMixture({"mine": part}, {"mine": 1.0})) == {"sft.data.mine": first["data"]}
