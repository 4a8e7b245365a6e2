"""What a file's reader makes of somebody else's file: texts stay texts, nothing that a row names is opened, a pipe is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from datetime import datetime
from pathlib import Path

import datasets as hf
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlmrl.config import Data
from vlmrl.data import load_tasks, text_rows
from vlmrl.data.dataset_rows import Rows
from vlmrl.data.files import load_rows
from vlmrl.data.hub_datasets import load_from_hub
from vlmrl.data.parquet_types import check_same_kinds
from vlmrl.utils import json_files


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


ROWS = [
    {"prompt": "When?", "answer": "2020-01-01", "more": {"since": "2019-05-06T07:08:09Z", "mixed": [1, "a"]}},
    {"prompt": "And then?", "answer": "2021-02-03 04:05:06", "more": {"since": "2019-05-06T07:08:09Z", "mixed": 5}},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_texts_that_look_like_dates_stay_texts(tmp_path, name):
    text = "".join(json.dumps(row) + "\n" for row in ROWS) if name == "rows.jsonl" else json.dumps(ROWS)
    (tmp_path / name).write_text(text)
    tasks = load_tasks(Data(str(tmp_path / name)))
    assert [task.answer for task in tasks] == ["2020-01-01", "2021-02-03 04:05:06"]
    assert tasks[0].data == {"more": ROWS[0]["more"]}
    assert load_tasks(Data(str(tmp_path / name), split="train[1:]"))[0].answer == "2021-02-03 04:05:06"
    (tmp_path / name).write_text(text.replace("2020-01-01", "2000-01-01"))
    assert load_tasks(Data(str(tmp_path / name)))[0].answer == "2000-01-01"


MIXED = ["4", "007", "1.50", "true", "null", '"a"', '["a"]', '{"x": 1}', 4, 57.29, 3.141592653589793, ["b"], None]
"""Texts that are also JSON, among values of other types."""


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_texts_beside_values_of_other_types_stay_texts_and_numbers_keep_their_digits(tmp_path, name):
    rows = [{"answer": value, "more": [{"x": value}, {"y": 57.29}]} for value in MIXED]
    text = "".join(json.dumps(row) + "\n" for row in rows) if name == "train.jsonl" else json.dumps(rows)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    assert list(load_rows(str(tmp_path / "data"), "train[2:]")) == rows[2:]
    assert list(Rows(load_from_hub(str(tmp_path / "data"), "train[2:]"))) == rows[2:]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (4, "007"),
        (1.5, "1.50"),
        (True, "True"),
        (True, 1),
        ("4", 4),
        ("x", {"y": 1}),
        ({"a": 4}, {"a": "007"}),
        ([1], ["1"]),
    ],
)
@pytest.mark.parametrize("several", [True, False])
def test_values_stay_what_they_are_beside_those_of_another_file_or_of_ten_megabytes_before(
    tmp_path, first, then, several
):
    """The reader takes the types of the first file's first 10 MiB, and made of all later values what has these types."""
    rows, folder = [{"answer": value, "more": "x"} for value in (first, then)], tmp_path / "data"
    folder.mkdir()
    if several:
        for name, row in zip("ab", rows, strict=True):
            (folder / f"train-{name}.jsonl").write_text(json.dumps(row))
    else:
        rows[0]["more"] = "x" * (10 * 2**20 + 1)
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for read in (load_rows(str(folder), "train"), Rows(load_from_hub(str(folder), "train"))):
        assert json.dumps([row["answer"] for row in read]) == json.dumps([first, then])


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_whole_numbers_in_lists_and_objects_stay_whole_beside_fractions(tmp_path, name):
    """`vlmrl sft` would train `{"box": [10.0, 20.0]}` where the response was `{"box": [10, 20]}`."""

    def row(arguments: dict, points: list) -> dict:
        call = [{"function": {"name": "zoom", "arguments": arguments}}]
        messages = [
            {"role": "user", "content": "q", "tool_calls": None},
            {"role": "assistant", "content": "", "tool_calls": call},
        ]
        return {"messages": messages, "points": points}

    rows = [
        row({"box": [10, 20], "scale": 1, "id": 12345678901234567890}, [[1, 2], []]),
        row({"box": [10.5, 20], "scale": 2.5, "id": 7}, [[0.1, 2.0]]),
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) if name == "train.jsonl" else json.dumps(rows)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    assert json.dumps(list(load_rows(str(tmp_path / "data"), "train"))) == json.dumps(rows)
    assert json.dumps(list(Rows(load_from_hub(str(tmp_path / "data"), "train")))) == json.dumps(rows)


def test_the_parts_of_a_saved_dataset_are_those_that_the_split_names(tmp_path):
    rows = hf.Dataset.from_dict({"prompt": list("abcdefg")})
    rows.save_to_disk(tmp_path / "one")
    hf.DatasetDict(train=rows, test=rows.select([0, 1])).save_to_disk(tmp_path / "many")

    def prompts(name: str, split: str) -> str:
        return "".join(load_rows(str(tmp_path / name), split).column("prompt"))

    for name in ("one", "many"):
        assert (prompts(name, "train"), prompts(name, "train[:3]"), prompts(name, "train[3:]")) == (
            "abcdefg",
            "abc",
            "defg",
        )
    assert prompts("many", "train[5:]+test") == "fgab"
    with pytest.raises(ValueError, match=r"'valid\[:3\]' is not in .*many, which has: train, test"):
        prompts("many", "valid[:3]")


@pytest.mark.parametrize("name", ["../other/data-00000-of-00001.arrow", "{other}/data-00000-of-00001.arrow", "pipe", 5])
def test_a_saved_dataset_names_no_file_elsewhere(tmp_path, name):
    """datasets opens what it names: another dataset's rows, or a pipe, which it waits for."""
    rows, saved, other = hf.Dataset.from_dict({"prompt": ["own"]}), tmp_path / "saved", tmp_path / "other"
    rows.save_to_disk(other)
    rows.save_to_disk(saved)
    os.mkfifo(saved / "pipe")
    reader = os.open(saved / "pipe", os.O_RDWR)  # or opening it would never return
    os.write(reader, b"no arrow file" * 100)
    state = json.loads((saved / "state.json").read_text())
    shard = name.format(other=other) if isinstance(name, str) else name
    (saved / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": shard}]}))
    with pytest.raises(ValueError, match=r"data\.path .*saved' cannot be read as a saved dataset: "):
        load_rows(str(saved), "train")
    os.close(reader)


@pytest.mark.parametrize("split", ["../other", "{other}"])
def test_a_saved_dataset_names_no_split_elsewhere(tmp_path, split):
    hf.Dataset.from_dict({"prompt": ["other's"]}).save_to_disk(tmp_path / "other")
    hf.DatasetDict(train=hf.Dataset.from_dict({"prompt": ["own"]})).save_to_disk(tmp_path / "saved")
    splits = ["train", split.format(other=tmp_path / "other")]
    (tmp_path / "saved/dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(ValueError, match=r"it names .*other/dataset_info\.json', which is no regular file in it"):
        load_rows(str(tmp_path / "saved"), "train")


@pytest.mark.parametrize("place", ["beside the splits", "beside no splits", "a split", "a split with another's name"])
def test_a_description_of_a_saved_dataset_that_datasets_reads_is_checked(tmp_path, monkeypatch, place):
    """datasets takes a `state.json` before a `dataset_dict.json`, has no limit for its size, and reads a split `a::b` as `a`."""
    saved, rows = tmp_path / "saved", hf.Dataset.from_dict({"prompt": ["own"]})
    hf.Dataset.from_dict({"prompt": ["other's"]}).save_to_disk(tmp_path / "other")
    hf.DatasetDict({"train": rows, "a": rows}).save_to_disk(saved)
    shutil.copytree(saved / "a", saved / "a::b")
    folder = {"a split": saved / "train", "a split with another's name": saved / "a"}.get(place, saved)
    for name in ("state.json", "dataset_info.json"):
        shutil.copy(tmp_path / "other" / name, folder / name)
    state = json.loads((folder / "state.json").read_text())
    (shard,) = (tmp_path / "other").glob("*.arrow")
    monkeypatch.setattr(json_files, "MOST_BYTES", 10_000)
    spaces = " " * (10_000 if place == "a split" else 0)
    (folder / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": str(shard)}]}) + spaces)
    splits = {"beside no splits": [], "a split with another's name": ["train", "a::b"]}.get(place, ["train"])
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(ValueError, match=r"data\.path .*saved' cannot be read as a saved dataset: "):
        load_rows(str(saved), "train")


def test_a_stray_description_without_the_other_is_not_read(tmp_path):
    hf.DatasetDict({"train": hf.Dataset.from_dict({"prompt": ["own"]})}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text("{}")
    assert list(load_rows(str(tmp_path / "saved"), "train")) == [{"prompt": "own"}]


def test_a_path_with_two_colons_is_refused(tmp_path):
    """`datasets` opened what stands before them."""
    rows = hf.Dataset.from_dict({"prompt": ["own"]})
    rows.save_to_disk(tmp_path / "geo")
    shutil.copytree(tmp_path / "geo", tmp_path / "geo::v2")
    pq.write_table(pa.table({"prompt": ["own"]}), tmp_path / "a::b.parquet")
    for name in ("geo::v2", "a::b.parquet"):
        with pytest.raises(ValueError, match=r"must not have '::' in it: rename"):
            load_rows(str(tmp_path / name), "train")


def test_a_saved_dataset_with_a_wrong_offset_is_refused(tmp_path):
    """Reading the row ended the process without a word (SIGBUS), or showed other memory of it as the prompt."""
    hf.Dataset.from_dict({"prompt": ["three", "words", "here"]}).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    content, offsets = path.read_bytes(), struct.pack("<4i", 0, 5, 10, 14)
    assert content.count(offsets) == 1 and len(load_rows(str(tmp_path / "saved"), "train")) == 3
    path.unlink()  # it is mapped
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 5, 2**31 - 100, 14)))
    with pytest.raises(ValueError, match=r"cannot be read as a saved dataset: .*offset for slot 2 out of bounds"):
        load_rows(str(tmp_path / "saved"), "train")


def test_a_file_and_a_saved_dataset_have_no_split_of_another_name(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    load_rows(str(tmp_path / "rows.jsonl"), "train[1:]")._table.save_to_disk(tmp_path / "saved")
    for name in ("rows.jsonl", "saved"):
        with pytest.raises(ValueError, match=rf"data.split 'test\[:1\]': .*{name} has one split, whose name is train"):
            load_rows(str(tmp_path / name), "test[:1]")
    (tmp_path / "rows.jsonl").rename(tmp_path / "geo_test.jsonl")
    assert len(load_rows(str(tmp_path / "geo_test.jsonl"), "test[:1]")) == 1


def test_a_copy_in_a_hidden_folder_is_not_read(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "new"}\n')
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/train-checkpoint.jsonl").write_text('{"prompt": "old"}\n')
    assert list(load_rows(str(tmp_path), "train")) == [{"prompt": "new"}]


def test_a_path_is_no_pattern(tmp_path):
    """`datasets` takes each for one: in place of a file or a folder that is called `geo[12]` it read `geo1`."""
    for name in ("geo[12]", "geo1"):
        (tmp_path / name / "images").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / name / f"images/{name}.png")
        for path in (tmp_path / f"{name}.parquet", tmp_path / name / "rows.parquet"):
            pq.write_table(pa.table({"prompt": [name]}), path)
    for path in ("geo[12].parquet", "geo[12]/rows.parquet", "geo[12]"):
        assert list(load_rows(str(tmp_path / path), "train")) == [{"prompt": "geo[12]"}]
    (image,) = load_rows(str(tmp_path / "geo[12]/images"), "train").column("images")
    assert Path(image["path"]).name == "geo[12].png"


@pytest.mark.parametrize("kind", ["Audio", "Video", "Pdf", "Nifti"])
def test_a_column_that_calls_itself_audio_or_a_pdf_opens_no_file(tmp_path, kind):
    named = {"bytes": None, "path": "http://127.0.0.1:9/a"}
    column = pa.array([named], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    features = {"prompt": {"dtype": "string", "_type": "Value"}, "x": {"_type": kind}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"prompt": ["Which?"], "x": column}).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.parquet"), "train")[0] == {"prompt": "Which?", "x": named}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_neither_a_pipe_nor_a_device_is_read_as_rows(tmp_path, put, suffix):
    put(tmp_path / f"train.{suffix}")
    with pytest.raises(ValueError, match=rf"train\.{suffix} is empty, or it is no regular file"):
        load_rows(str(tmp_path), "train")


@pytest.mark.parametrize(
    "end", [b'caf\xe9"}', b'\\ud83d"}', b'x", "answer": NaN}', b'x", "answer": 1e999}', b'x"}]', b'x"} 5']
)
def test_a_line_that_is_not_json_in_utf_8_is_named(tmp_path, end):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n\n{"prompt": "' + end)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3 is not JSON \(.*\{\"prompt\": "):
        load_rows(str(tmp_path / "a.jsonl"), "train")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "written", ['{"text": "a"}\n\n{"text": "b"}', ' \n[{"text": "a"},\n{"text": "b"}]', '["a", "b"]']
)
def test_rows_are_objects_or_texts_in_lines_or_in_a_list(tmp_path, written, mark):
    (tmp_path / "a.json").write_text(mark + written, encoding="utf-8")
    assert list(load_rows(str(tmp_path / "a.json"), "train")) == [{"text": "a"}, {"text": "b"}]
    (tmp_path / "a.json").write_text("[5]")
    with pytest.raises(ValueError, match=r"a\.json is not JSON \(a row must be an object, but it is 5\)"):
        load_rows(str(tmp_path / "a.json"), "train")


def test_a_row_of_parquet_that_is_not_utf_8_is_a_bad_row(tmp_path):
    texts = pa.array([b"caf\xe9", b"b"]).view(pa.string())
    pq.write_table(pa.table({"prompt": texts, "answer": texts, "image": texts}), tmp_path / "a.parquet")
    tasks = load_tasks(Data(str(tmp_path / "a.parquet")))
    with pytest.raises(ValueError, match=r"row 0 of .*a\.parquet.*UnicodeDecodeError"):
        tasks[0]
    assert tasks[1].prompt == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("suffix", "answers"),
    [
        ("jsonl", ["2020-01-01", "12:30"]),
        ("jsonl", [[10, 20], [10.5, 20]]),
        ("jsonl", [{"city": "Rome"}, {"n": 1}]),
        ("jsonl", ["7", 7]),
        ("csv", ["None", "NA"]),
    ],
)
def test_values_of_a_metadata_file_stay_as_they_are_written(tmp_path, suffix, answers):
    """Those of a plain file did. Here 10 was 10.0, objects had each other's keys, and the texts None and NA were empty."""
    file = tmp_path / "photos" / f"metadata.{suffix}"
    file.parent.mkdir()
    for name in "ab":
        Image.new("RGB", (8, 8)).save(file.parent / f"{name}.png")
    rows = [{"file_name": f"{name}.png", "answer": answer} for name, answer in zip("ab", answers, strict=True)]
    csv = ["file_name,answer", *(",".join(row.values()) for row in rows)] if suffix == "csv" else []
    file.write_text("\n".join(csv or map(json.dumps, rows)))
    tasks = load_tasks(Data(str(file.parent), prompt="<image>?", seed=None))
    assert repr([task.answer for task in tasks]) == repr(answers)
    assert [task.images for task in tasks] == [[str(file.parent / f"{name}.png")] for name in "ab"]
    assert len(load_rows(str(file.parent), "train[1:]")) == 1


def test_a_metadata_file_names_images_of_its_folder_alone(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for folder in ("train", "test"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        (tmp_path / "photos" / folder / "metadata.jsonl").write_text('{"left_file_name": "a.png", "answer": "x"}\n')
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / folder / "a.png")
    assert load_rows(str(tmp_path / "photos"), "test")[0]["left"] == str(tmp_path / "photos" / "test" / "a.png")
    (tmp_path / "photos" / "test" / "metadata.jsonl").write_text('{"file_name": "../../a.png"}\n')
    with pytest.raises(ValueError, match=r"names '\.\./\.\./a\.png', which is not in its folder"):
        load_rows(str(tmp_path / "photos"), "test")


def test_a_metadata_file_may_list_several_images_of_a_row(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    row = '{"file_names": ["b.png", "a.png"], "prompt": "<image> or <image>?"}\n'
    (tmp_path / "photos" / "metadata.jsonl").write_text(row)
    task = load_tasks(Data(str(tmp_path / "photos")))[0]
    assert [str(image).rpartition("/")[2] for image in task.images] == ["b.png", "a.png"]


def photos(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "1.png")


@pytest.mark.parametrize(("train", "other"), [("Train", "Test"), ("Train", "VAL"), ("Train_images", "Test_images")])
def test_images_to_evaluate_on_are_not_trained_on(tmp_path, train, other):
    """The reader knows no splits in upper case: the images of both folders were the split train."""
    photos(tmp_path, f"{train}/cat", f"{other}/cat")
    with pytest.raises(ValueError, match=rf"has images of other splits in {other}/cat, which would be trained on"):
        load_rows(str(tmp_path), "train")
    assert len(load_rows(str(tmp_path / train), "train")) == len(load_rows(str(tmp_path / other), "train")) == 1


def test_a_class_of_images_may_be_called_as_a_split(tmp_path):
    photos(tmp_path, "train/Dev", "train/Sales", "test/Dev")
    assert load_rows(str(tmp_path), "train").column("answer") == ["Dev", "Sales"]


@pytest.mark.parametrize("classes", ["", "/bar", "/pie"])
@pytest.mark.parametrize("splits", [["train"], ["train", "test"]])
def test_metadata_above_the_folders_of_splits_is_not_left_out_unsaid(tmp_path, splits, classes):
    """The reader of `imagefolder` leaves it out: answers were the folders' names, or None."""
    photos(tmp_path, *(f"{split}{classes}" for split in splits))
    lines = [f"{split}{classes}/1.png,7\n" for split in splits]
    (tmp_path / "metadata.csv").write_text("file_name,answer\n" + "".join(lines))
    for split in splits:
        with pytest.raises(
            ValueError, match=r"metadata\.csv is in the folder of no split, and would not be read: put a metadata"
        ):
            load_rows(str(tmp_path), split)
    (tmp_path / "metadata.csv").rename(tmp_path / "train/metadata.csv")
    (tmp_path / "train/metadata.csv").write_text(f"file_name,answer\n{classes[1:]}/1.png,7\n".replace("\n/", "\n"))
    assert load_rows(str(tmp_path), "train").column("answer") == ["7"]


def test_metadata_above_splits_that_have_their_own_are_ignored(tmp_path):
    photos(tmp_path, "train", "test")
    (tmp_path / "metadata.csv").write_text("field,meaning\nanswer,a number\n")
    for split, answer in (("train", "7"), ("test", "8")):
        (tmp_path / split / "metadata.csv").write_text(f"file_name,answer\n1.png,{answer}\n")
        assert load_rows(str(tmp_path), split).column("answer") == [answer]


def test_splits_of_images_without_classes_have_no_answers(tmp_path):
    photos(tmp_path, "train", "test")
    assert load_rows(str(tmp_path), "train").columns == ["images"]


def test_empty_columns_and_lines_of_csv_are_left_out(tmp_path):
    """Spreadsheets write them."""
    (tmp_path / "a.csv").write_text("\n,,\nprompt,answer,,\na,1,,\n\nb,,\nc,3,,,\n")
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": "3"}]
    assert list(load_rows(str(tmp_path / "a.csv"), "train")) == rows


def test_a_log_has_no_progress_bar_of_the_reader(tmp_path, capfd):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say a.", "answer": "a"}\n')
    assert len(load_rows(str(tmp_path / "rows.jsonl"), "train")) == 1
    assert capfd.readouterr().err == ""


def test_a_text_of_csv_that_means_nothing_to_pandas_stays_a_text(tmp_path):
    """The answers NA, None and null were empty cells, which are bad rows."""
    (tmp_path / "rows.csv").write_text("prompt,answer,level\nA?,NA,1\nB?,None,\nC?,null,3\n")
    tasks = load_tasks(Data(str(tmp_path / "rows.csv")))
    assert [task.answer for task in tasks] == ["NA", "None", "null"]
    assert [task.data["level"] for task in tasks] == ["1", None, "3"]


@pytest.mark.parametrize("rows", [["x"] * 10_000 + ["007", "1.50", "True", ""], ["007", "2.0", "1e3", "false", ""]])
def test_values_of_csv_stay_as_they_are_written(tmp_path, rows):
    """The reader of `datasets` gives each 10,000 rows types of their own: "007" among later rows of a column of texts was "7"."""
    (folder := tmp_path / "data").mkdir()
    (folder / "rows.csv").write_text(
        "prompt,answer\n" + "".join(f"{number},{row}\n" for number, row in enumerate(rows))
    )
    for found in (load_rows(str(folder), "train"), Rows(load_from_hub(str(folder), "train"))):
        assert found.column("answer") == [row or None for row in rows] and found.column("prompt")[:2] == ["0", "1"]


def test_the_files_of_a_csv_folder_give_each_other_no_types(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\na,x\n")
    (tmp_path / "b.csv").write_text('answer,prompt\n007,"b, or\nc"\n')
    assert list(load_rows(str(tmp_path), "train")) == [
        {"prompt": "a", "answer": "x"},
        {"prompt": "b, or\nc", "answer": "007"},
    ]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"prompt,answer\na,1\nb,1,000\n", r"line 3 is not CSV \(it has 3 cells for 2 columns"),
        (b"prompt,prompt\na,1\n", r"line 1 is not CSV \(several columns are called prompt\)"),
        (b'prompt\na\n"b\nc\n', r"line 3 is not CSV \(unexpected end of data"),
        (b"prompt\ncaf\xe9\n", r"is not UTF-8 \('utf-8'.*: save it as UTF-8"),
        (b"prompt\n", r"is empty"),
    ],
)
def test_a_line_that_is_not_csv_is_named(tmp_path, written, message):
    (tmp_path / "a.csv").write_bytes(written)
    with pytest.raises(ValueError, match=rf"a\.csv.* {message}"):
        load_rows(str(tmp_path / "a.csv"), "train")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_that_another_one_of_the_same_time_replaced_is_read(tmp_path, suffix):
    """The rows of the first one came from the cache of `datasets`."""
    file = tmp_path / f"rows.{suffix}"
    for text in ("first", "other"):
        file.unlink(missing_ok=True)
        file.write_text(json.dumps({"prompt": text}))
        if suffix == "parquet":
            pq.write_table(pa.table({"prompt": [text]}), file)
        os.utime(file, ns=(10**18, 10**18))
        assert load_rows(str(file), "train").column("prompt") == [text]


@pytest.mark.parametrize("names", [("training", "testing"), ("data", "eval"), ("Data", "Test"), ("a", "test1")])
def test_a_file_to_evaluate_on_is_not_trained_on(tmp_path, names):
    """The rows of both files were the split train, as no name has one of our words for splits in our spelling."""
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    with pytest.raises(ValueError, match=r"data\.split 'train' names no file in .*, which has: "):
        load_rows(str(tmp_path), "train")
    (tmp_path / "Train.jsonl").write_text(json.dumps({"prompt": "x"}))
    assert load_rows(str(tmp_path), "train").column("prompt") == ["x"]


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("train2014.jsonl", "val2014.jsonl"),
        ("my train.jsonl", "my test.jsonl"),
        ("split=train/a.jsonl", "split=test/b.jsonl"),
        ("geoTrain.jsonl", "geoTest.jsonl"),
        ("trainset.jsonl", "testset.jsonl"),
        ("VQA_TRAIN2.jsonl", "VQA_TESTSet2.jsonl"),
        ("TRAINset.jsonl", "TESTset.jsonl"),
    ],
)
def test_words_for_splits_are_found_beside_digits_and_in_compounds(tmp_path, train, other):
    """Both files were trained on, unsaid: only between `-`, `_`, `.` and `/` was a word one."""
    for name in (train, other):
        (file := tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": name}))
    assert load_rows(str(tmp_path / "data"), "train").column("prompt") == [train]


def test_a_split_may_have_a_name_with_digits_or_of_several_words(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("geo3k", "geo_sft-0", "trial"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    for split, names in (("geo3k", ["geo3k"]), ("geo_sft", ["geo_sft-0"]), ("train", ["geo3k", "geo_sft-0", "trial"])):
        assert load_rows(str(tmp_path / "data"), split).column("prompt") == names


@pytest.mark.parametrize(
    ("first", "then", "field"),
    [
        (7, "007", "answer"),
        ("yes", True, "answer"),
        (0.5, "1e5", "answer"),
        ("a", datetime(2020, 1, 1), "answer"),
        (datetime(2020, 1, 1).date(), datetime(2020, 1, 2, 5, 6), "answer"),
        (True, 7, "answer"),
        ([7], ["007"], "answer[]"),
        ({"truth": [{"x": 7}]}, {"truth": [{"x": "007"}]}, "answer.truth[].x"),
        ("a.png", b"a.png", "answer"),
    ],
)
def test_parquet_files_whose_column_has_values_of_other_types_are_refused(tmp_path, first, then, field):
    """`datasets` gives all files the types of the first one: 7 instead of "007", "true" instead of True, unsaid."""
    (folder := tmp_path / "data").mkdir()
    for name, value in (("a", first), ("b", then)):
        pq.write_table(pa.table({"prompt": ["What?"], "answer": [value]}), folder / f"train-{name}.parquet")
    for load in (load_rows, load_from_hub):
        with pytest.raises(
            ValueError, match=rf"column '{re.escape(field)}' .* in .*a\.parquet, and .* in .*b\.parquet"
        ):
            load(str(folder), "train")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_dataset_of_the_hub_that_datasets_has_loaded_before_is_read_as_it_is_written(tmp_path, suffix):
    """The types that `datasets` had found, as in a notebook, counted as the dataset's own: its texts became times and numbers."""
    (folder := tmp_path / "data").mkdir()
    text = '{"prompt": "When?", "answer": "2020-01-01"}\n' if suffix == "jsonl" else "prompt,answer\nWhen?,007\n"
    (folder / f"train.{suffix}").write_text(text)
    before = list(Rows(load_from_hub(str(folder), "train")))
    assert hf.load_dataset(str(folder), split="train")[0] != before[0]
    assert list(Rows(load_from_hub(str(folder), "train"))) == before
    declared = (
        "dataset_info:\n  features:\n  - name: prompt\n    dtype: string\n  - name: answer\n    dtype: large_string"
    )
    (folder / "README.md").write_text(f"---\n{declared}\n---\n")
    assert load_from_hub(str(folder), "train").features["answer"] == hf.Value("large_string")


def test_a_dotted_column_beside_a_field_of_that_path_is_another_one(tmp_path):
    table = pa.table({"prompt": ["a"], "answer": [{"truth": "x"}], "answer.truth": [7]})
    pq.write_table(table, tmp_path / "train.parquet")
    check_same_kinds([tmp_path / "train.parquet"])


def test_texts_that_are_written_as_a_dictionary_are_compared_too(tmp_path):
    for name, values in (("a", pa.array(["007"]).dictionary_encode()), ("b", pa.array([7]))):
        pq.write_table(pa.table({"answer": values}), tmp_path / name)
    with pytest.raises(ValueError, match=r"it has texts in .*a, and numbers in .*b"):
        check_same_kinds([tmp_path / "a", tmp_path / "b"])


def test_a_split_of_the_hub_has_the_types_of_its_own_files(tmp_path):
    """It got those of the first split: answers to evaluate on were 7 instead of "007"."""
    (folder := tmp_path / "data").mkdir()
    for name, value in (("train", 7), ("test", "007")):
        pq.write_table(pa.table({"prompt": ["What?"], "answer": [value]}), folder / f"{name}.parquet")
    assert Rows(load_from_hub(str(folder), "train[:1]")).column("answer") == [7]
    with pytest.raises(ValueError, match=r"column 'answer' must have one type in all files, but it has numbers in "):
        load_from_hub(str(folder), "test")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (pa.array(["a"]), pa.array(["b"], pa.large_string())),
        (pa.array(["a"]), pa.array(["b"]).dictionary_encode()),
        (pa.array([1], pa.int8()), pa.array([2])),
        (pa.array([1.5]), pa.array([2])),
        (pa.array([[1]]), pa.array([[2]], pa.large_list(pa.int64()))),
        (pa.array(["a"]), pa.array([None])),
        (pa.array([{"x": 1, "y": "a"}]), pa.array([{"x": 2}])),
    ],
)
def test_parquet_files_of_the_same_kinds_of_values_are_read(tmp_path, first, then):
    (folder := tmp_path / "data").mkdir()
    for name, values in (("a", first), ("b", then)):
        pq.write_table(pa.table({"prompt": ["What?"], "answer": values}), folder / f"train-{name}.parquet")
    expected = [*first.to_pylist(), *then.to_pylist()]
    for read in (load_rows(str(folder), "train"), Rows(load_from_hub(str(folder), "train"))):
        found = read.column("answer")
        assert [{k: v for k, v in each.items() if v} if isinstance(each, dict) else each for each in found] == expected


def test_files_of_several_formats_are_refused(tmp_path):
    """Those of the first format that the folder has were read, and the others left out unsaid."""
    (tmp_path / "a.json").write_text('{"prompt": "a"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}')
    with pytest.raises(
        ValueError, match=r"has files of several formats for the split 'train', such as b\.jsonl, a\.json: move"
    ):
        load_rows(str(tmp_path), "train")


def test_a_field_of_a_column_whose_numbers_are_of_two_types_is_found(tmp_path):
    """It was said not to exist where 3 stands beside 3.5, and an id such as "x" had quotation marks in its task's."""
    rows = [
        {"prompt": "a", "uid": "x", "reward_model": {"style": "rule", "ground_truth": 3}},
        {"prompt": "b", "uid": 7, "reward_model": {"style": "rule", "ground_truth": 3.5}},
        {"prompt": "c", "uid": 8, "reward_model": {"ground_truth": " "}},
        {"prompt": "d", "uid": 9, "reward_model": {}},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    columns = {"answer": "reward_model.ground_truth", "id": "uid"}
    tasks = load_tasks(Data(str(file), columns=columns, seed=None))
    assert [repr(tasks[number].answer) for number in range(3)] == ["3", "3.5", "' '"]
    assert [tasks[number].id.rpartition("/")[2] for number in range(3)] == ["x", "7", "8"]
    assert list(tasks.warnings) == [
        "column 'reward_model.ground_truth' is empty in row 2: any response contains the answer"
    ]
    with pytest.raises(ValueError, match=r"row 3 of .*: column 'reward_model\.ground_truth' is empty"):
        tasks[3]
    with pytest.raises(ValueError, match=r"maps 'answer' to 'reward_model\.truth', which .* does not have"):
        load_tasks(Data(str(file), columns={"answer": "reward_model.truth"}))


def test_rows_that_an_earlier_version_read_are_read_again(tmp_path, monkeypatch):
    """They came from the cache of `datasets`, so that a mend of the reader changed nothing for the same file."""
    (path := tmp_path / "rows.csv").write_text("prompt,answer\nq,007\n")
    with monkeypatch.context() as earlier:
        earlier.setattr(text_rows, "THIS_READER", "of an earlier version")
        earlier.setitem(text_rows._READERS, "csv", lambda path: iter([{"prompt": "q", "answer": "7"}]))
        assert load_rows(str(path), "train").column("answer") == ["7"]
    assert load_rows(str(path), "train").column("answer") == ["007"]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_the_value_of_a_class_label_is_the_name_of_the_class(tmp_path, form):
    """As "answer" is in MMLU: the right letter earned nothing where its number was the answer."""
    letter = hf.ClassLabel(names=["A", "B", "C", "D"])
    features = hf.Features(
        {"prompt": hf.Value("string"), "answer": letter, "of": hf.List(letter), "in": {"it": letter}}
    )
    rows = [
        {"prompt": "q", "answer": 1, "of": [3, 0], "in": {"it": 2}},
        {"prompt": "q", "answer": -1, "of": [-1, 1], "in": None},  # -1: no class
    ]
    dataset = hf.Dataset.from_list(rows, features=features)
    path = tmp_path / "rows.parquet" if form == "parquet" else tmp_path / "rows"
    dataset.to_parquet(path) if form == "parquet" else dataset.save_to_disk(path)
    loaded = load_rows(str(path), "train")
    assert loaded.column("answer") == ["B", None]
    expected = [
        {"prompt": "q", "answer": "B", "of": ["D", "A"], "in": {"it": "C"}},
        {"prompt": "q", "answer": None, "of": [None, "B"], "in": None},
    ]
    assert list(loaded) == [loaded[0], loaded[1]] == loaded.take([0, 1]) == expected
