"""The actor that runs one program on its node, and calls of such actors with time limits."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from vlmrl.cluster import STOPPED, ClusterError
from vlmrl.engine.server import Launch, LocalProcess
from vlmrl.utils.http_server import free_ports

Ref = Any  # a reference to the result of a call
Actor = Any  # the handle of an actor


@dataclass(frozen=True)
class Node:
    """Where an actor is."""

    address: str
    id: str
    gpus: tuple[str, ...]
    """The GPUs that Ray gave the actor, as Ray numbers them on the node."""


class Launcher:
    """Runs one program of a run as a child process, a trainer rank or a server. The child ends with this actor."""

    def __init__(self, folder: str) -> None:
        """``folder``: the working directory of the run."""
        self._folder = folder
        self._process: LocalProcess | None = None
        self._read = 0  # bytes of the log

    def node(self) -> Node:
        """Raises ClusterError if this node has no such folder."""
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise ClusterError(
                f"cluster needs the folder {self._folder} on every node, but {address} has none: start the run in a folder that all "
                f"nodes see ({error.strerror})."
            ) from None
        return Node(address, context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ())))

    def free_port(self, host: str) -> int:
        return free_ports(1, host)[0]

    def log_file(self) -> Path:
        """A new file on this node."""
        return Path(tempfile.mkdtemp(prefix="vlmrl-rank-")) / "output.log"

    def start(self, launch: Launch) -> None:
        self._process = LocalProcess(launch)
        self._process.start()

    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def poll(self) -> tuple[int | None, bytes]:
        """The exit status of the program, None while it runs, and what it has written since the last call.

        The log of a program that ended well or was asked to end is deleted: this is the last call then.
        """
        status, path = self._started.status, self._started.launch.log  # what it wrote before its end is read after this
        with path.open("rb") as log:
            log.seek(self._read)
            written = log.read()
        self._read += len(written)
        if status in (0, *STOPPED):
            shutil.rmtree(path.parent, ignore_errors=True)
        return status, written

    def signal(self, number: int) -> None:
        self._started.send_signal(number)

    def stop(self, graceful: bool) -> None:
        if self._process is not None:
            self._process.stop(graceful)

    def log_tail(self) -> str:
        return "" if self._process is None else self._process.log_tail()

    @property
    def _started(self) -> LocalProcess:
        assert self._process is not None
        return self._process


def results(calls: Sequence[Ref], seconds: float, what: str) -> list[Any]:
    """The results of all calls. ``what`` names the call in errors. Raises ClusterError if an actor died or did not answer in time."""
    try:
        return ray.get(list(calls), timeout=seconds)
    except GetTimeoutError:
        raise ClusterError(f"a launcher did not return from `{what}` in {seconds:g} s.") from None
    except RayActorError as error:
        raise ClusterError(f"a launcher died during the call `{what}`: {error}") from error
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise
