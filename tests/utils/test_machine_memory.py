"""How much memory a process may take: the limits of its own control groups and of those around them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from vlmrl.utils import machine_memory
from vlmrl.utils.machine_memory import is_in_memory, memory_bytes, spill_folder


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": "4000", "job/step/memory.max": "max"}, 4000),
        ("0::/\n", {"memory.max": "5000"}, 5000),
        ("4:memory:/job\n1:cpu:/other\n", {"memory/job/memory.limit_in_bytes": "3000"}, 3000),
        ("4:cpu,memory:/job\n0::/\n", {"memory/memory.limit_in_bytes": "2000"}, 2000),
    ],
)
def test_the_lowest_limit_counts(membership, files, expected, tmp_path: Path, monkeypatch):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(machine_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(machine_memory, "MEMBERSHIP", tmp_path / "membership")
    assert memory_bytes() == expected


def test_without_limits_it_is_the_machine(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(machine_memory, "MEMBERSHIP", tmp_path / "none")
    assert memory_bytes() > 2**28


def test_folders_of_file_systems_in_memory_are_told():
    mounts = "/dev/sda1 / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/sdb1 /tmp/disk xfs rw 0 0\n"
    assert [is_in_memory(Path(folder), mounts) for folder in ("/home/me", "/tmp/x", "/tmp/disk/x")] == [
        False,
        True,
        False,
    ]
    assert not is_in_memory(Path("/tmp"), "")


@pytest.mark.parametrize(
    ("in_memory", "is_set", "expected"),
    [
        (["tmp"], False, "var/tmp"),
        ([], False, "tmp"),
        (["tmp", "var/tmp"], False, "tmp"),
        (["tmp"], True, "tmp"),  # the user's own TMPDIR
    ],
)
def test_what_does_not_fit_into_memory_goes_to_a_disk(in_memory, is_set, expected, tmp_path: Path, monkeypatch):
    (tmp_path / "var/tmp").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\n" + "".join(f"tmpfs {tmp_path / each} tmpfs rw 0 0\n" for each in in_memory)
    )
    monkeypatch.setattr(machine_memory, "MOUNTS", mounts)
    monkeypatch.setattr(machine_memory, "VAR_TMP", tmp_path / "var/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    if is_set:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert spill_folder() == tmp_path / expected
