"""Somebody else's dataset of the hub opens no file of this machine: neither by a link in an archive nor by a path in its README."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import datasets as hf
import pytest
from aiohttp import web
from PIL import Image
from testing.servers import answering

from vlmrl.data import files
from vlmrl.data.files import load_rows
from vlmrl.multimodal.images import load_image

ROW = {"prompt": "What?", "answer": "x"}
COMMIT = "a" * 40


@pytest.fixture
def from_hub(tmp_path, monkeypatch):
    """A folder that is read as a dataset of the hub is."""
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    monkeypatch.setattr(hf.config, "EXTRACTED_DATASETS_PATH", str(tmp_path / "unpacked"))
    monkeypatch.setattr(files, "local_data", lambda path: None)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def add(archive: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, to: str = "", content: bytes = b"") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.mode = kind, to, len(content), 0o755
    archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_link_in_an_archive_leads_to_no_file_of_this_machine(from_hub, tmp_path, suffix):
    """datasets checked where the link leads before `a/z` was a link, too: each `z` was a folder, and so `..` left it."""
    (tmp_path / f"private.{suffix}").write_text(json.dumps(ROW) if suffix == "jsonl" else "prompt,answer\nWhat?,x\n")
    with tarfile.open(from_hub / f"train.{suffix}", "w") as archive:
        up = "z/" * 30 + "../" * 30  # to the root, once `z` is a link
        add(archive, f"rows.{suffix}", tarfile.SYMTYPE, f"a/{up}{str(tmp_path)[1:]}/private.{suffix}")
        add(archive, "a", tarfile.DIRTYPE)
        add(archive, "a/z", tarfile.SYMTYPE, ".")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"archive .*train\.{suffix} must hold .* 'rows\.{suffix}' in it is a link"
        ):
            load_rows(str(from_hub), "train")


def test_a_hard_link_in_an_archive_leads_to_no_file_of_this_machine(from_hub, tmp_path):
    """datasets checks it from its own folder, and tarfile makes it from the root of the archive: the file was read as rows, and what
    had the link's name after it was written into the file."""
    (folder := tmp_path.joinpath(*"abcdefgh")).mkdir(parents=True)
    (private := folder / "private.jsonl").write_text(json.dumps(ROW))
    name, up = f"{str(folder)[1:]}/rows.jsonl", "../" * len(folder.parts[1:])
    with tarfile.open(from_hub / "train.jsonl", "w") as archive:
        add(archive, name, tarfile.LNKTYPE, f"{up}{str(private)[1:]}")
        add(archive, name, content=json.dumps(ROW | {"answer": "other"}).encode())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"archive .*train\.jsonl must hold .* in it is a link"):
            load_rows(str(from_hub), "train")
    assert private.read_text() == json.dumps(ROW)


def test_a_pipe_in_an_archive_is_not_read(from_hub):
    """Reading it waited for ever. What was unpacked before it does not count as the whole dataset the next time."""
    with tarfile.open(from_hub / "train.jsonl", "w") as archive:
        add(archive, "a.jsonl", content=json.dumps(ROW).encode())
        add(archive, "b.jsonl", tarfile.FIFOTYPE)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'b\.jsonl' in it is a link, a pipe or a device: unpack it yourself"):
            load_rows(str(from_hub), "train")


def test_an_archive_of_files_is_read(from_hub):
    with tarfile.open(from_hub / "train.jsonl", "w:gz") as archive:
        add(archive, "rows", tarfile.DIRTYPE)
        add(archive, "rows/a.jsonl", content=json.dumps(ROW).encode())
        add(archive, "rows/same.jsonl", tarfile.LNKTYPE, "rows/a.jsonl")
    assert list(load_rows(str(from_hub), "train")) == [ROW, ROW]


def png(number: int) -> bytes:
    Image.new("RGB", (8, 8), (number, 0, 0)).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def red(row: dict[str, Any]) -> int:
    return load_image(row["image"]).getpixel((0, 0))[0]


@pytest.mark.parametrize(
    ("suffix", "answers"), [("csv", ["007", "1e5"]), ("jsonl", ["2020-01-01", "2021-02-03"]), ("jsonl", [1, 1.5])]
)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_values_of_a_metadata_file_stay_as_they_are_written(from_hub, suffix, answers, is_zipped):
    """The reader of `imagefolder` made 7 of "007", and a time of "2020-01-01"; images in a ZIP file did not load."""
    for split in ("train", "test"):
        (folder := from_hub / split).mkdir()
        for number in range(len(answers)):
            (folder / f"{number}.png").write_bytes(png(number))
        rows = [{"file_name": f"{number}.png", "answer": answer} for number, answer in enumerate(answers)]
        lines = [f"{row['file_name']},{row['answer']}" if suffix == "csv" else json.dumps(row) for row in rows]
        header = ["file_name,answer"] if suffix == "csv" else []
        (folder / f"metadata.{suffix}").write_text("\n".join([*header, *lines]))
        if is_zipped:
            shutil.make_archive(str(folder), "zip", folder)
            shutil.rmtree(folder)
    for split, wanted in (("train", answers), ("test", answers), ("train[1:]+test[:1]", answers[::-1])):
        rows = list(load_rows(str(from_hub), split))
        assert [row["answer"] for row in rows] == wanted
        assert [red(row) for row in rows] == list(map(answers.index, wanted))


DECLARED = (
    "---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: answer\n    dtype: string\n---\n"
)


@pytest.mark.parametrize("has_types", [False, True])
def test_images_in_archives_are_shown_without_metadata_and_with_declared_types(from_hub, has_types):
    """Their paths, `zip://0.png::train.zip`, were taken for addresses, which no image could be loaded from."""
    for number in range(2):
        with zipfile.ZipFile(from_hub / f"train-{number}.zip", "w") as archive:
            archive.writestr("a/0.png", png(number))
            if has_types:
                archive.writestr("a/metadata.csv", f"file_name,answer\n0.png,n{number}")
    if has_types:
        (from_hub / "README.md").write_text(DECLARED)
    rows = list(load_rows(str(from_hub), "train"))
    assert {red(row) for row in rows} == {0, 1}
    assert not has_types or all(row["answer"] == f"n{red(row)}" for row in rows)


def test_a_metadata_file_may_have_a_column_called_image(from_hub):
    (from_hub / "train").mkdir()
    (from_hub / "train/0.png").write_bytes(png(0))
    (from_hub / "train/metadata.csv").write_text("file_name,image\n0.png,a photo\n")
    (row,) = load_rows(str(from_hub), "train")
    assert row["image"] == "a photo" and "images" in row


@pytest.mark.parametrize("answers", [[1] * 5 + [1.5], [True] * 5 + ["false"], ["7"] * 5 + [7]])
def test_values_of_the_json_of_a_webdataset_stay_as_they_are_written(from_hub, answers):
    """Each sample got the types of the first five: 1.5 became 1, "false" True, and 7 "7"."""
    with tarfile.open(from_hub / "train-0.tar", "w") as archive:
        for number, answer in enumerate(answers):
            add(archive, f"{number}.png", content=png(number))
            add(archive, f"{number}.meta.json", content=json.dumps({"answer": answer}).encode())
    rows = list(load_rows(str(from_hub), "train"))
    assert [row["meta.json"] for row in rows] == [{"answer": answer} for answer in answers]
    assert len(load_rows(str(from_hub), "train[:2]")) == 2


@pytest.mark.parametrize("has_types", [False, True])
def test_a_file_of_the_working_directory_takes_the_place_of_no_image_in_a_webdataset(
    from_hub, tmp_path, monkeypatch, has_types
):
    """datasets wrote the name into its cache in place of the image: another run read what was there, or found nothing."""
    (here := tmp_path / "here").mkdir()
    (here / "0.png").write_bytes(png(99))
    with tarfile.open(from_hub / "train-0.tar", "w") as archive:
        add(archive, "0.png", content=png(7))
        add(archive, "0.answer.txt", content=b"x")
    if has_types:
        (from_hub / "README.md").write_text(
            DECLARED.replace("name: image", "name: png").replace("name: answer", "name: answer.txt")
        )
    for folder in (here, tmp_path):
        monkeypatch.chdir(folder)
        (row,) = rows = load_rows(str(from_hub), "train")
        assert red(row | {"image": row["png"]}) == 7
        assert row["answer.txt"] == "x" and rows.declares_images("png")


LOAD = """
from vlmrl.data.files import load_rows
try:
    print("read", list(load_rows("somebody/data", "train")))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_readme_of_a_dataset_names_no_file_of_this_machine(tmp_path):
    """datasets before 5.0.1 read it as the dataset's rows."""
    private = tmp_path / "private.jsonl"
    private.write_text(json.dumps(ROW))
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: {private}\n---\n"

    async def hub(request: web.Request) -> web.Response:
        if request.path.startswith("/api/datasets/somebody/data"):
            return web.json_response({"_id": "1", "id": "somebody/data", "sha": COMMIT, "siblings": [], "tags": []})
        if request.path.endswith("/README.md"):
            return web.Response(text=readme, headers={"ETag": '"a"', "X-Repo-Commit": COMMIT})
        return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})

    with answering(hub) as url:
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", LOAD]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=Path(tmp_path))
    assert "Data files don't belong to somebody/data" in done.stdout, done.stdout + done.stderr


LOAD_AGAIN = """
import json, sys
import datasets
from vlmrl.data.files import load_rows
if sys.argv[1] == "first":
    datasets.load_dataset("somebody/data")
print(json.dumps(load_rows("somebody/data", "train").column("answer")))
"""


def hub_of(folder: Path) -> Any:
    """Answers as the hub does for a dataset of these files."""

    def entry(path: Path) -> dict[str, Any]:
        kind = "file" if path.is_file() else "directory"
        return {"type": kind, "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": COMMIT}

    async def hub(request: web.Request) -> web.Response:
        _, is_api, tree = request.path.partition(f"/tree/{COMMIT}")
        if is_api and (folder / tree.strip("/")).is_dir():
            inside = (folder / tree.strip("/")).glob("**/*" if request.query["recursive"] == "true" else "*")
            return web.json_response(list(map(entry, sorted(inside))))
        if request.path.startswith("/api/datasets/somebody/data") and not is_api:
            return web.json_response({"_id": "1", "id": "somebody/data", "sha": COMMIT, "siblings": [], "tags": []})
        file = folder / request.path.rpartition(f"/resolve/{COMMIT}/")[2]
        if request.path.startswith("/datasets/") and file.is_file() and not file.samefile(folder):
            name = file.name.replace(".", "-") + str(file.stat().st_size)
            return web.Response(body=file.read_bytes(), headers={"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})

    return hub


@pytest.mark.slow
@pytest.mark.parametrize("has_images", [True, False])
def test_answers_are_the_same_where_the_hub_is_out_of_reach(tmp_path, has_images):
    """The cache of `datasets` was read then, in which 7.0 is the "007" of the file, and None its "NA"."""
    answers = ["007", "1e5", "012"] if has_images else ["007", "1e5", "NA"]
    (files := tmp_path / "hub/train").mkdir(parents=True)
    if has_images:
        for number in range(3):
            (files / f"{number}.png").write_bytes(png(number))
    rows = [f"{number}.png,{answer}" for number, answer in enumerate(answers)]
    (files / ("metadata.csv" if has_images else "rows.csv")).write_text("\n".join(["file_name,answer", *rows]))
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "home/datasets")}
    environment = os.environ | caches | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def read(when: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_AGAIN, when], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        return done.stdout or done.stderr

    with answering(hub_of(tmp_path / "hub")) as url:
        environment["HF_ENDPOINT"] = url
        assert json.loads(read("first")) == answers
    environment["HF_HUB_OFFLINE"] = "1"
    assert json.loads(read("again")) == answers
    if not has_images:
        shutil.rmtree(tmp_path / "home/hub")
        assert "run `hf download --repo-type dataset somebody/data` where the hub is in reach" in read("again")


LOAD_VIEWED = """
import json
from datasets.utils import _dataset_viewer
from vlmrl.data.files import load_rows
features = {"answer": {"dtype": "float64", "_type": "Value"}}
_dataset_viewer.get_exported_dataset_infos = lambda **given: {"default": {"features": features}}
print(json.dumps(load_rows("somebody/data", "train").column("answer")))
"""


@pytest.mark.slow
def test_types_that_the_viewer_of_the_hub_found_in_the_files_are_not_those_of_the_dataset(tmp_path):
    """The hub has them for nearly all datasets, which seemed to declare them: 7.0 was read for the "007" of the file."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/train.csv").write_text("answer\n007\n1e5\n")
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "home/datasets")}
    with answering(hub_of(tmp_path / "hub")) as url:
        reached = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", LOAD_VIEWED]
        done = subprocess.run(command, env=os.environ | caches | reached, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout and json.loads(done.stdout) == ["007", "1e5"], done.stdout + done.stderr


def test_errors_of_a_dataset_with_a_default_configuration_are_its_own(from_hub):
    """They said that it has several configurations."""
    (from_hub / "README.md").write_text(
        TWO_CONFIGURATIONS.replace("name: main", "name: main\n  default: true").replace(".csv", ".jsonl")
    )
    for name in ("main", "hard"):
        (from_hub / name).mkdir()
        (from_hub / name / "train.jsonl").write_text('{"answer": 1}\n{]\n')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2 is not JSON"):
        load_rows(str(from_hub), "train")


LOAD_CONFIGURATIONS = """
import json
from vlmrl.data.files import load_rows
for name in ("somebody/data:main", "somebody/data:hard", "somebody/data:none", "somebody/data"):
    try:
        print(json.dumps(load_rows(name, "train").column("answer")))
    except ValueError as error:
        print(error)
"""
TWO_CONFIGURATIONS = """---
configs:
- config_name: main
  data_files: main/train.csv
- config_name: hard
  data_files: hard/train.csv
---
"""


@pytest.mark.slow
def test_one_of_several_configurations_is_named_behind_the_dataset(tmp_path):
    """As of GSM8K and MMLU, which could not be read by their names."""
    (hub := tmp_path / "hub").mkdir()
    (hub / "README.md").write_text(TWO_CONFIGURATIONS)
    for name, answer in (("main", "007"), ("hard", "hard")):
        (hub / name).mkdir()
        (hub / name / "train.csv").write_text(f"answer\n{answer}\n")
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "home/datasets")}
    command = [sys.executable, "-c", LOAD_CONFIGURATIONS]
    with answering(hub_of(hub)) as url:
        reached = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(command, env=os.environ | caches | reached, capture_output=True, text=True, cwd=tmp_path)
    main, hard, none, several = done.stdout.splitlines()
    assert (json.loads(main), json.loads(hard)) == (["007"], ["hard"]), done.stderr
    assert "'none' not found" in none
    assert several == (
        "data.path 'somebody/data' has several configurations (main, hard): add the name of one, such as somebody/data:main."
    )
