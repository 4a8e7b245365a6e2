"""Files and folders appear whole or not at all, and the disk's errors name the path and the option."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vlmrl.utils.output_files import (
    OutputError,
    atomic_folder,
    atomic_write,
    check_writable,
    open_regular,
    output_errors,
    remove_folder,
    whole_file,
)


def test_a_file_appears_when_it_is_complete(tmp_path):
    with whole_file(tmp_path / "a.json") as part:
        part.write_text("half")
        assert not (tmp_path / "a.json").exists()
    assert (tmp_path / "a.json").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def interrupt_writing(path) -> None:
    with whole_file(path) as part:
        part.write_text("half")
        raise ZeroDivisionError


def test_an_error_keeps_the_earlier_file_and_leaves_no_other(tmp_path):
    atomic_write(tmp_path / "a.json", "old")
    with pytest.raises(ZeroDivisionError):
        interrupt_writing(tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_two_may_write_the_same_file(tmp_path):
    with whole_file(tmp_path / "a.png") as first, whole_file(tmp_path / "a.png") as second:
        first.write_text("first")
        second.write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def fail_in(folder, error: BaseException) -> None:
    with atomic_folder(folder) as part:
        (part / "half").write_text("x")
        raise error


def test_a_folder_appears_when_it_is_complete_and_replaces_the_earlier_one(tmp_path):
    for number in (1, 2):
        with atomic_folder(tmp_path / "model") as part:
            (part / f"file{number}").write_text("x")
    with pytest.raises(ZeroDivisionError):
        fail_in(tmp_path / "model", ZeroDivisionError())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["file2"]


def test_the_new_folder_has_its_name_before_the_earlier_one_is_deleted(tmp_path, monkeypatch):
    delete, seen = shutil.rmtree, []

    def noted(path, **options) -> None:
        if path.exists():
            seen.append(sorted(each.name for each in (tmp_path / "model").iterdir()))
        delete(path, **options)

    with atomic_folder(tmp_path / "model") as part:
        (part / "old").touch()
    with atomic_folder(tmp_path / "model") as part:
        (part / "new").touch()
        monkeypatch.setattr(shutil, "rmtree", noted)
    assert seen == [["new"]]


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_folder_that_was_moved_the_link_alone_is_replaced(is_there, tmp_path):
    """To a disk with more room: the run ended with "Cannot call rmtree on a symbolic link" when its checkpoint was the oldest one."""
    (tmp_path / "disk").mkdir()
    if is_there:
        (tmp_path / "disk/old.txt").write_text("old")
    for name in ("model", "step000001"):
        (tmp_path / name).symlink_to("disk" if is_there else "gone")
    for text in ("new", "newer"):
        with atomic_folder(tmp_path / "model") as part:
            (part / "new.txt").write_text(text)
    remove_folder(tmp_path / "step000001")
    assert (tmp_path / "model/new.txt").read_text() == "newer" and not (tmp_path / "model").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "model"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["old.txt"] * is_there


def test_weights_have_the_mode_that_the_umask_gives(tmp_path):
    with atomic_folder(tmp_path / "model") as part:
        save_file({"a": torch.zeros(2)}, part / "model.safetensors")
        (part / "config.json").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "model/config.json").stat().st_mode)}


def test_a_file_system_without_modes_and_without_flushes_of_folders_is_written_to(tmp_path, monkeypatch):
    """On a disk of Windows that belongs to somebody else, chmod is refused; VirtualBox's shared folders flush no folder."""
    flush = os.fsync

    def flush_files_alone(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(handle)

    def refuse(path, mode, **options) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(os, "fsync", flush_files_alone)
    monkeypatch.setattr(os, "chmod", refuse)
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "model") as part:
            (part / "config.json").write_text(text)
    assert (tmp_path / "model/config.json").read_text() == "new"


def test_an_error_of_a_folders_flush_is_raised(tmp_path, monkeypatch):
    def fail(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="Input/output error"), atomic_folder(tmp_path / "model"):
        pass


def test_a_replaced_folder_of_which_another_program_has_a_file_open_is_deleted_later(tmp_path, monkeypatch):
    """NFS and sshfs rename such a file, which then keeps its folder, until it is closed."""
    remove, is_open = os.unlink, True

    def unlink(path, **options) -> None:
        if is_open and Path(path).name == "open":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        remove(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    for text in ("first", "second", "third"):
        with atomic_folder(tmp_path / "model") as part:
            (part / "open").write_text(text)
        assert (tmp_path / "model/open").read_text() == text
    (tmp_path / "step000001").mkdir()
    (tmp_path / "step000001/open").touch()
    remove_folder(tmp_path / "step000001")
    assert not (tmp_path / "step000001").exists()
    is_open = False
    with atomic_folder(tmp_path / "model") as part:
        (part / "last").touch()
    assert [path.name for path in tmp_path.glob("*model*")] == ["model"]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FULL, "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598"), "its disk is full"),
        (PermissionError(errno.EACCES, "x", "elsewhere"), "Permission denied"),
        (Exception("No space left on device (os error 28)"), "No space left on device"),  # of tokenizers
    ],
)
def test_a_full_disk_is_one_line_with_the_path_and_the_option(tmp_path, error, reason):
    with pytest.raises(
        OutputError, match=f"{tmp_path}/model cannot be written: {reason}.* set output_dir to another folder"
    ):
        fail_in(tmp_path / "model", error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "x"),
        RuntimeError("shapes differ"),
        ValueError("no file (os error 2)"),
    ],
)
def test_other_errors_stay_what_they_are(tmp_path, error):
    with pytest.raises(type(error)) as raised, output_errors(tmp_path):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("name", ["", "file/below", "file/two/below"])
def test_what_cannot_be_written_is_said_before_the_work(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"set --out to another"):
        check_writable(tmp_path / name, "--out")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")  # what has the name is replaced, and not opened
    os.mkfifo(tmp_path / "pipe")
    for other in ("link", "pipe"):
        check_writable(tmp_path / other, "--out")
        (tmp_path / other).unlink()
    check_writable(tmp_path / "new/file", "--out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "new"] and not any((tmp_path / "new").iterdir())


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(OutputError, match="Not a directory"):
        atomic_write(tmp_path / "runs/x/config.json", "{}")


@pytest.mark.parametrize("path", ["own", "own/../outside", "own/link", "own/folder/inside", "own/pipe"])
def test_nothing_but_a_regular_file_below_the_folder_is_opened(path, tmp_path):
    """Also if a look at it said otherwise a moment before."""
    own = tmp_path / "own"
    (tmp_path / "elsewhere").mkdir()
    (own / "inner").mkdir(parents=True)
    for file in (tmp_path / "outside", tmp_path / "elsewhere/inside", own / "inner/file"):
        file.write_text("content")
    (own / "link").symlink_to(tmp_path / "outside")
    (own / "folder").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(own / "pipe")
    with pytest.raises(ValueError, match=r"it must be a (regular )?file"):
        open_regular(tmp_path / path, own)
    with open_regular(own / "inner/file", own) as file:
        assert file.read() == b"content"
