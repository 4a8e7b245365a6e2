"""How much memory a process may take: the limits of its own control groups and of those around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.utils import machine_memory
from vlmrl.utils.machine_memory import is_in_memory, memory_bytes


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
