"""The limit of open files, which a process with many episodes needs to be high."""

import os
import resource
import subprocess
import sys

import pytest

from vlmrl.utils.open_files import RESERVED, reserved_files

PROGRAM = """
import asyncio, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
from vlmrl.utils import http, http_server
{use}
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.slow
@pytest.mark.parametrize("use", ["http_server.open_port('127.0.0.1', 0).close()", "http.http_loop().wait(session())"])
@pytest.mark.parametrize("hard", [500, 2**16 + 1])
def test_a_server_and_a_client_raise_it_to_at_most_the_hard_limit(use, hard):
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < hard:
        hard = allowed
    session = "async def session():\n    await http.plain_session().close()\n"
    program = PROGRAM.format(hard=hard, use=session + use)
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [str(min(hard, 2**16)), str(hard)]


def test_reserved_files_are_given_back_though_an_env_has_closed_one(monkeypatch):
    """An error would keep the run from being saved."""
    opened, open_file = [], os.open
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(open_file(*arguments)) or opened[-1])
    with reserved_files() as reserve:
        os.close(opened[3])
        reserve.close()
    assert len(opened) == RESERVED
    for handle in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
