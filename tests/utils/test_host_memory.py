"""Freed host memory is kept for the next allocation."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, torch
from vlmrl.utils.machine_memory import keep_freed_memory

PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a machine's huge pages would be counted as one
keep_freed_memory()

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(2**20) for _ in range(8)]  # 4 MiB each
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
@pytest.mark.parametrize("own_setting", [False, True])
def test_pages_are_not_taken_again(own_setting: bool):
    pages = 8 * 4 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    env = plain | ({"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"} if own_setting else {})
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert (int(run.stdout) > 19 * pages) == own_setting
    assert (int(run.stdout) < pages) == (not own_setting)
