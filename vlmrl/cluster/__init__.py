"""Ray places a run's programs on many machines, starts them and watches them. No data passes through it.

``launch.py`` starts the recipe's command line on each trainer rank, with ``torchrun``'s variables: from there on, the run is the
same as under ``torchrun``. Rank 0 starts servers on the other machines by the actors of ``launcher.py`` (``server_host.py``).
"""

from __future__ import annotations

import os
import signal

RANK_VARIABLE = "VLMRL_CLUSTER"
"""In the environment of the ranks that Ray starts: the address of Ray, and the namespace of the run's actors after a space."""


STOPPED = (129, 130, 143)
"""The exit statuses of a rank that SIGHUP, SIGINT or SIGTERM has stopped in order."""


class ClusterError(RuntimeError):
    """A program of the run died, a node was lost, or there was no room for the run."""


def is_rank() -> bool:
    """Whether this process is a trainer rank that Ray has started."""
    return RANK_VARIABLE in os.environ


def receive_signals() -> None:
    """Let this process receive Ctrl-C and SIGHUP. Ray's processes are started with both blocked, and theirs inherit that."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
