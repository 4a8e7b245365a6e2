"""Starts the command line of a run on each trainer rank, with ``torchrun``'s variables, and watches the ranks.

launch(config, ["-m", "vlmrl", "train", "recipe.py", "--cluster.ranks", "2"])
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from vlmrl.cluster import RANK_VARIABLE, STOPPED, ClusterError
from vlmrl.cluster.launcher import Actor, Node, Ref, results
from vlmrl.cluster.placement import START_SECONDS, Placement
from vlmrl.config import Config
from vlmrl.engine.server import Launch
from vlmrl.utils.terminal import drop_output, signals_handled, stop_signals

POLL_SECONDS = 0.2
ANSWER_SECONDS = 1.0  # for a launcher's answer to a poll; one that is slower is asked again
END_SECONDS = 40.0  # for the other ranks to end after one has failed: rank 0 still saves what it can
OWN_VARIABLES = ("RAY_", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")  # beginnings of those that a node has itself


@dataclass
class RankProcess:
    """One trainer rank, as the driver sees it."""

    number: int
    actor: Actor
    node: Node
    status: int | None = None
    """Its exit status; negative: the signal that killed it."""
    lost: str = ""
    """Why its launcher does not answer any more."""
    _call: Ref | None = field(default=None, init=False)

    @property
    def running(self) -> bool:
        return self.status is None and not self.lost

    @property
    def failed(self) -> bool:
        return bool(self.status or self.lost)

    def poll(self) -> bytes:
        """Update its state. Returns what it has written since the last call."""
        if not self.running:
            return b""
        if self._call is None:
            self._call = self.actor.poll.remote()
        if not ray.wait([self._call], timeout=ANSWER_SECONDS)[0]:
            return b""
        call, self._call = self._call, None
        try:
            answer: Any = ray.get(call)
        except RayError as error:
            self.lost = str(error).strip().splitlines()[0]
            return b""
        self.status = answer[0]
        return bytes(answer[1])

    def describe(self) -> str:
        """How it ended, with the end of its log. Rank 0's output has been printed already."""
        name = f"rank {self.number} on node {self.node.address}"
        if self.lost:
            return f"{name} is gone with its node or its launcher: {self.lost}"
        if self.status is None:
            return f"{name} did not end"
        how = f"ended with status {self.status}"
        if self.status < 0:
            how = f"was killed by {signal.Signals(-self.status).name}"
        if self.number == 0:
            return f"{name} {how}; its output is above"
        try:
            [tail] = results([self.actor.log_tail.remote()], ANSWER_SECONDS * 10, "log_tail")
        except ClusterError:
            tail = ""
        return f"{name} {how}{tail}"


def launch(config: Config, arguments: Sequence[str]) -> None:
    """Run Python with these arguments as each rank, and print rank 0's output. Returns when all ranks have ended well.

    Ctrl-C, SIGTERM and SIGHUP go to rank 0, which saves the last finished step.

    Raises:
        ClusterError: a rank failed, which is named with its node and the end of its log; or there is no room on the cluster.
        SystemExit: with the status of rank 0, if it alone did not end well: its output has said why.
    """
    placement = Placement(config)
    try:
        ranks = _start(placement, arguments)
        received: list[int] = []
        with signals_handled(stop_signals(), lambda number, _: received.append(number)):
            failed = _watch(ranks, received)
        if not failed:
            return
        status = ranks[0].status or 0
        if status > 0 and (failed == ranks[:1] or (received and status in STOPPED)):
            raise SystemExit(status)
        raise ClusterError("\n".join(rank.describe() for rank in failed))
    finally:
        placement.close()


def _start(placement: Placement, arguments: Sequence[str]) -> list[RankProcess]:
    """Start all ranks, each with the variables that ``torchrun`` would set on its node."""
    ranks, nodes = placement.ranks, placement.nodes
    [port] = results([ranks[0].free_port.remote(nodes[0].address)], START_SECONDS, "free_port")
    logs = results([actor.log_file.remote() for actor in ranks], START_SECONDS, "log_file")
    common = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    common |= {
        RANK_VARIABLE: f"{placement.address} {placement.namespace}",
        "TORCHELASTIC_RUN_ID": placement.namespace,
        "MASTER_ADDR": nodes[0].address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(ranks)),
        "PYTHONUNBUFFERED": "1",
    }
    starts = []
    for number, (actor, node, log) in enumerate(zip(ranks, nodes, logs, strict=True)):
        here = [rank for rank, other in enumerate(nodes) if other.id == node.id]
        own = {
            "RANK": str(number),
            "LOCAL_RANK": str(here.index(number)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for rank in here for gpu in nodes[rank].gpus),
        }
        starts.append(actor.start.remote(Launch([sys.executable, *arguments], common | own, log)))
    results(starts, START_SECONDS, "start")
    return [RankProcess(number, actor, node) for number, (actor, node) in enumerate(zip(ranks, nodes, strict=True))]


def _watch(ranks: Sequence[RankProcess], received: list[int]) -> list[RankProcess]:
    """Print rank 0's output until all ranks have ended. Returns those that failed, the first failure first.

    ``received``: signals, which are passed on to rank 0. After a first failure the other ranks get :data:`END_SECONDS`.
    """
    failed: list[RankProcess] = []
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    passed_on, until = 0, float("inf")
    while any(rank.running for rank in ranks) and time.monotonic() < until:
        for rank in ranks:
            written = rank.poll()
            if rank.number == 0 and written:
                _print(decode(written))
        new = [rank for rank in ranks if rank.failed and rank not in failed]
        # Ranks that lose their connection to one that died end soon after it, often before the driver looks again.
        failed += sorted(new, key=lambda rank: (not rank.lost, (rank.status or 0) > 0, rank.number == 0))
        if failed and until == float("inf"):
            until = time.monotonic() + END_SECONDS
        for number in received[passed_on:]:
            ranks[0].actor.signal.remote(number)
            passed_on += 1
        time.sleep(POLL_SECONDS)
    return failed


def _print(text: str) -> None:
    """Print rank 0's output, if anybody reads it: the ranks go on."""
    try:
        print(text, end="", flush=True)
    except OSError:
        drop_output(sys.stdout)
