"""Finding files and objects by what a recipe says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlmrl.config.code import load_object, places, require, resolve_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_resolve_path_takes_the_base_dir_before_the_working_directory(tmp_path, monkeypatch):
    first = write(tmp_path / "recipes" / "a.txt", "recipe")
    second = write(tmp_path / "work" / "a.txt", "work")
    only = write(tmp_path / "work" / "b.txt", "work")
    monkeypatch.chdir(tmp_path / "work")
    assert resolve_path("a.txt", tmp_path / "recipes") == first
    assert resolve_path("a.txt") == second
    assert resolve_path("b.txt", tmp_path / "recipes") == only
    assert resolve_path(first, tmp_path / "nowhere") == first


def test_resolve_path_names_every_place_it_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Looked at: ") as error:
        resolve_path("c.txt", tmp_path / "recipes")
    assert str(tmp_path / "recipes" / "c.txt") in str(error.value)
    assert str(tmp_path / "c.txt") in str(error.value)


def test_places_names_one_place_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert places("c.txt", tmp_path) == [tmp_path / "c.txt"]
    assert places("/c.txt", tmp_path) == [Path("/c.txt")]


def test_load_object_from_a_module():
    assert load_object("pathlib:Path") is Path
    assert load_object("pathlib:Path.cwd")() == Path.cwd()


def test_load_object_from_a_file_runs_it_once(tmp_path):
    write(tmp_path / "thing.py", "class A:\n    pass\n\nb = 3\n")
    first = load_object("thing.py:A", tmp_path)
    assert load_object(f"{tmp_path}/thing.py:A") is first
    assert load_object("thing.py:b", tmp_path) == 3
    assert sys.modules[first.__module__].A is first
    assert "thing" not in sys.modules


def test_files_of_one_name_in_two_folders_do_not_meet(tmp_path):
    write(tmp_path / "x" / "env.py", "NAME = 'x'\n")
    write(tmp_path / "y" / "env.py", "NAME = 'y'\n")
    assert [load_object("env.py:NAME", tmp_path / folder) for folder in "xy"] == ["x", "y"]


def test_a_file_with_a_dataclass_under_postponed_annotations_loads(tmp_path):
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass D:\n    a: int = 4\n"
    write(tmp_path / "d.py", text)
    assert load_object("d.py:D", tmp_path)().a == 4


@pytest.mark.parametrize("spec", ["thing", "thing.py", ":A", "thing.py:", ""])
def test_a_spec_without_both_parts_is_refused(spec):
    with pytest.raises(ValueError, match="module:name"):
        load_object(spec)


def test_a_missing_file_names_the_places(tmp_path):
    with pytest.raises(ValueError, match=r"'gone.py' does not exist. Looked at: .*gone\.py"):
        load_object("gone.py:A", tmp_path)


def test_a_missing_name_lists_close_ones(tmp_path):
    write(tmp_path / "e.py", "class SearchEnv:\n    pass\n\nclass Other:\n    pass\n")
    with pytest.raises(ValueError, match=r"has no 'SerchEnv'. Close names: SearchEnv$"):
        load_object("e.py:SerchEnv", tmp_path)
    with pytest.raises(ValueError, match=r"It has: Other, SearchEnv$"):
        load_object("e.py:zzz", tmp_path)


def test_an_import_error_keeps_its_cause_and_leaves_no_module(tmp_path):
    path = write(tmp_path / "bad.py", "1 / 0\n")
    before = set(sys.modules)
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero") as error:
        load_object("bad.py:A", tmp_path)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert not {name for name in set(sys.modules) - before if name.startswith("vlmrl_file_")}
    path.write_text("A = 1\n")  # mended: the next load runs it again
    assert load_object("bad.py:A", tmp_path) == 1


def test_a_missing_module_keeps_its_cause():
    with pytest.raises(ValueError, match="no_such_module_here") as error:
        load_object("no_such_module_here:A")
    assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_a_path_without_py_is_told_so():
    with pytest.raises(ValueError, match=r"ends in \.py"):
        load_object("envs/geo3k:Geo3kEnv")


def test_our_datasets_folder_is_named_by_file():
    with pytest.raises(ValueError, match=r"Hugging Face's package.*datasets/geo3k\.py:make"):
        load_object("datasets.geo3k:make")


def test_a_missing_optional_package_names_its_extra():
    with pytest.raises(ValueError, match=r"no_such_package is not installed .* pip install 'vlmrl\[games\]'"):
        require("no_such_package", "games")
