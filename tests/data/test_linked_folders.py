"""Folders of data with links to other folders, as on clusters, and folders of which rows or images were left out without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl import Data
from vlmrl.data import TaskSource, load_tasks

LISTED = {"file_name": "images/1.png", "prompt": "What?", "answer": "cat"}


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A folder elsewhere, with an image."""
    (folder := tmp_path / "far").mkdir()
    Image.new("RGB", (64, 64)).save(folder / "1.png")
    return folder


@pytest.fixture
def near(tmp_path: Path) -> Path:
    (folder := tmp_path / "near").mkdir()
    return folder


def write(file: Path, *rows: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tasks(path: Path, **options: Any) -> TaskSource:
    return load_tasks(Data(str(path), seed=None, **options))


def texts(path: Path) -> list[Any]:
    return [task.prompt[0]["content"] for task in tasks(path)]


@pytest.mark.parametrize("prompt", ["What?", "<image>What?"])
def test_images_in_a_linked_folder_are_shown(near, far, prompt):
    """The folder was read as one without images: a mark was text, and the metadata's rows had none, unsaid."""
    (near / "images").symlink_to(far)
    write(near / "metadata.jsonl", LISTED | {"prompt": prompt})
    assert tasks(near)[0].images == [str(near / "images/1.png")]


def test_a_linked_folder_of_a_class_is_refused(near, far):
    """Its images were left out, unsaid."""
    (near / "cat").symlink_to(far)
    (near / "dog").mkdir()
    Image.new("RGB", (64, 64)).save(near / "dog/1.png")
    with pytest.raises(ValueError, match="cat is a link to a folder"):
        tasks(near, prompt="<image>Which?")


@pytest.mark.parametrize(("split", "folder"), [("train", "training"), ("validation", "val"), ("test", "test")])
def test_a_linked_folder_of_the_split_is_refused_under_each_of_its_names(near, far, split, folder):
    for name in ("train", "val", "test"):
        (near / name / "cat").mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(near / name / "cat/1.png")
    (near / folder).mkdir(exist_ok=True)
    (near / folder / "dog").symlink_to(far)
    with pytest.raises(ValueError, match="dog is a link to a folder"):
        tasks(near, prompt="<image>Which?", split=split)


def test_files_in_linked_folders_are_read_once(near, far):
    """They were left out, unsaid. Links to folders above are left out: one to `/` would take forever."""
    write(near.parent / "beside/train.jsonl", {"prompt": "c"})
    (near / "root").symlink_to("/")
    (near / "above").symlink_to(near.parent)
    write(near / "0/train.jsonl", {"prompt": "a"})
    write(far / "train.jsonl", {"prompt": "b"})
    (far / "up").symlink_to(near)
    for name in "12":
        (near / name).symlink_to(far)
    assert texts(near) == ["a", "b"]


def test_folders_that_are_called_as_files_are_read(near):
    """As Spark writes them: ``train.json`` is a folder of parts."""
    write(near / "train.json/part-0.json", {"prompt": "a"})
    write(near / "test.json/part-0.json", {"prompt": "b"})
    assert texts(near) == ["a"]


def test_a_cache_of_the_hub_with_several_revisions_is_refused(near):
    """The rows of all revisions were read, most of them twice, and those held out were trained on, too."""
    write(near / "blobs/0", {"prompt": "a"})
    for revision in ("old", "new"):
        folder = near / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "train.jsonl").symlink_to("../../blobs/0")
        if revision == "old":
            assert texts(near) == ["a"]
    with pytest.raises(ValueError, match=r"2 revisions of a dataset.*name one of them, such as .*/snapshots/old"):
        tasks(near)
    assert texts(near / "snapshots/new") == ["a"]


@pytest.mark.parametrize("column", ["file_name", "screenshot"])
@pytest.mark.parametrize("suffix", ["png", "TIFF"])
def test_paths_of_images_that_no_prompt_shows_are_warned_of(near, column, suffix):
    """As in a metadata file whose images are elsewhere, or in other formats. With a mark, the row is a bad one."""
    write(near / "metadata.jsonl", {column: f"images/1.{suffix}", "prompt": "What?"})
    assert f"column '{column}' holds images that no prompt shows" in tasks(near).warnings[0]
    write(near / "metadata.jsonl", {column: f"images/1.{suffix}", "prompt": "<image>What?"})
    with pytest.raises(ValueError, match=f"rename '{column}' to 'images'"):
        tasks(near)[0]


@pytest.mark.parametrize("column", ["id", "source", "ground_truth", "expected_output", "input_file", "page", "answer"])
@pytest.mark.parametrize("value", ["logo.png", "https://x.org/q.png", "/home/u/a.jpg", "请看图片a.png", "ls\na.png"])
def test_a_text_that_names_an_image_is_not_taken_for_one(near, column, value):
    row = {"answer": "a", "prompt": "Which file does <image> name?", column: value}
    write(near / "rows.jsonl", row, row | {"file_name": "intro.html"})
    assert not tasks(near).warnings
    assert texts(near) == [row["prompt"]] * 2


def test_a_link_to_a_folder_that_is_read_anyway_changes_nothing(near, far):
    for name in ("train-1", "train-2"):
        write(near / f"{name}/rows.jsonl", {"prompt": name})
    (near / "newest").symlink_to("train-2")
    (near / ".current").symlink_to("train-1")
    write(far / "rows.jsonl", {"prompt": "far"})
    (near / ".far").symlink_to(far)
    assert texts(near) == ["train-1", "train-2"]


def test_a_linked_folder_of_another_split_and_a_hidden_one_are_left_alone(near, far):
    for name in "ab":
        (near / f"train/{name}").mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(near / f"train/{name}/1.png")
    for link, target in {"test": far, ".thumbs": far, "train/alias": near / "train/a"}.items():
        (near / link).symlink_to(target)
    assert [task.answer for task in tasks(near, prompt="<image>Which?")] == ["a", "b"]
