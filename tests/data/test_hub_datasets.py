"""Somebody else's dataset of the hub opens no file of this machine: neither by a link in an archive nor by a path in its README."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import datasets as hf
import pytest
from aiohttp import web
from testing.servers import answering

from vlmrl.data import files
from vlmrl.data.files import load_rows

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
