"""Starts vLLM's HTTP server, with the arguments of `vllm serve`.

However its processes end, their shared memory is freed: up to 400 MB of /dev/shm, which stays occupied if a process is killed before
it removes its files there.
"""

from __future__ import annotations

import os
from functools import partialmethod
from multiprocessing import resource_tracker

SHUTDOWN_SECONDS = 5  # for requests in flight


def free_shared_memory_after_the_last_process() -> None:
    """Start Python's resource tracker, which frees what its clients leave once all have ended, where no kill of the group reaches it.

    This process and its children are the clients. Otherwise the first one starts a tracker inside the group.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        resource_tracker._resource_tracker._fd = write  # type: ignore[attr-defined]  # as in children that Python spawns
        return
    os.close(write)
    os.setsid()
    resource_tracker.main(read)
    os._exit(0)


def bound_shutdown() -> None:
    """When its engine process has died, vLLM shuts down; uvicorn would wait without end for the requests that were sent to it."""
    import uvicorn

    limited = partialmethod(uvicorn.Config.__init__, timeout_graceful_shutdown=SHUTDOWN_SECONDS)
    uvicorn.Config.__init__ = limited  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    free_shared_memory_after_the_last_process()
    bound_shutdown()
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
