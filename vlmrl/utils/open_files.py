"""The number of files and sockets that this process may have open."""

from __future__ import annotations

from contextlib import suppress

MOST = 2**16


def allow_many() -> None:
    """Raise this process's limit to :data:`MOST`, or to the system's hard limit: many systems set it to 1,024.

    256 episodes have a socket at each end of a connection of an agent, a server or an environment.
    """
    with suppress(ImportError, ValueError, OSError):  # not on Windows; macOS refuses more than its own limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
