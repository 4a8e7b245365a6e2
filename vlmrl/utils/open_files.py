"""The number of files and sockets that this process may have open."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

MOST = 2**16
RESERVED = 32


def allow_many() -> None:
    """Raise this process's limit to :data:`MOST`, or to the system's hard limit: many systems set it to 1,024.

    256 concurrent episodes need hundreds of sockets: both ends of an agent's connection are in this process.
    """
    with suppress(ImportError, ValueError, OSError):  # not on Windows; macOS refuses more than its own limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def reserved_files() -> ExitStack:
    """:data:`RESERVED` open files. ``close()`` gives them back: a run can save its state also if its env has opened all that the
    process may open."""
    reserve = ExitStack()
    with suppress(OSError):  # all are used up already
        for _ in range(RESERVED):
            reserve.callback(_close, os.open(os.devnull, os.O_RDONLY))
    return reserve


def _close(handle: int) -> None:
    with suppress(OSError):  # an env has closed it
        os.close(handle)
