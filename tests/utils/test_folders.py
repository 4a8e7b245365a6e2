"""Folders that appear whole or not at all."""

import pytest

from vlmrl.utils.folders import build_folder, cache_root


def write(folder):
    (folder / "a").write_text("new")


def test_a_folder_is_built_once_under_its_own_name(tmp_path):
    folder = tmp_path / "deep/model"
    assert build_folder(folder, lambda path: (path / "name").write_text(path.name)) == folder
    assert (folder / "name").read_text() == "model"
    build_folder(folder, write)
    assert [file.name for file in folder.iterdir()] == ["name"] and list(folder.parent.iterdir()) == [folder]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder):
        write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_folder(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_concurrent_builds_stays(tmp_path):
    def slow(folder):
        write(folder)
        build_folder(tmp_path / "model", lambda other: (other / "a").write_text("first"))

    assert (build_folder(tmp_path / "model", slow) / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_cache_moves_with_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("VLMRL_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_root()) == "/home/someone/.cache/vlmrl"
