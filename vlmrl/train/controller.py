"""The trainer ranks of a run as one trainer, which the loop uses on rank 0.

Every rank is a process that runs the recipe, started by nothing, by ``torchrun`` or by Ray. Rank 0 plays the episodes and sends each
call of the trainer to the other ranks as a command; they receive it in :func:`run_commands`.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vlmrl.train.fsdp import COLLECTIVE
from vlmrl.train.rank import Rank, exhaust, gpu_bytes
from vlmrl.train.ranks import Ranks
from vlmrl.train.sample_messages import LAST_CALL, Images, SampleCache, SampleMessage
from vlmrl.train.trainer import StepOutput, TrainerSpec
from vlmrl.types import Sample
from vlmrl.weight_sync.base import IpcSender, TransferResult, WeightUpdate

BETWEEN_COMMANDS = timedelta(days=7)  # another rank's time limit for the next command: rollouts may take long
STOP = "stop"


class RunTrainer:
    """All ranks as one trainer; see :class:`~vlmrl.train.trainer.Trainer` for the methods. It is on rank 0.

    After an error of any rank, further calls raise RuntimeError: the other ranks may be at another collective.
    """

    def __init__(self, rank: Rank, commands: Commands | None = None) -> None:
        """``commands`` reach the other ranks. None: there is one rank."""
        self.rank = rank
        self.steps_done = 0
        self.has_trained = False
        """Whether this process has taken a step, in any stage."""
        self.is_ahead = False
        """Whether a step has begun that the loop's state does not count yet: a checkpoint of that state would train it twice."""
        self._commands = commands
        self._samples = SampleCache()
        self._failed = False
        self._lock = threading.RLock()  # one command at a time: a cancelled update still gathers

    @property
    def is_started(self) -> bool:
        """Whether a trainer was started, so that there is a state to save."""
        return self.rank.trainer is not None

    def start(self, spec: TrainerSpec) -> RunTrainer:
        """Start a new trainer: each supervised stage has one, then the run."""
        with self._command("start", spec):
            self._samples, self.steps_done, self.is_ahead = SampleCache(), 0, False
            self.rank.start(spec)
        return self

    @property
    def differs_from_start(self) -> bool:
        """Whether the weights are others than those that the run began with: a step was taken here, or before a resume."""
        return self.has_trained or self.steps_done > 0

    def step(self, samples: Sequence[Sample]) -> StepOutput:
        self.is_ahead = True
        output = self._call_on("step", samples)
        self.steps_done, self.has_trained = output.steps_done, True
        return output

    def end_schedule_at(self, position: int) -> None:
        self._call("end_schedule_at", position)

    def score(self, samples: Sequence[Sample], by_teacher: bool = False) -> list[np.ndarray]:
        return self._call_on("score", samples, *[True] * by_teacher)

    def token_kl(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self._call_on("token_kl", samples)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._command("named_weights"):
            yield from self.rank.named_weights()

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._command("named_adapters"):
            yield from self.rank.named_adapters()

    def save(self, checkpoint: Path) -> None:
        self._call("save", checkpoint)

    def restore(self, checkpoint: Path) -> None:
        self.steps_done = self._call("restore", checkpoint)

    def close(self) -> None:
        self._call("close")

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        """The policy's logprobs of each sample's response, in nats. No trainer is needed."""
        with self._command("logprobs", list(samples), temperature):
            return self.rank.logprobs(samples, temperature)

    def send(self, update: WeightUpdate, beside: Mapping[str, tuple[int, ...]] | None = None) -> TransferResult:
        """Send the policy's weights to servers. No trainer is needed.

        ``beside``: :attr:`~vlmrl.engine.server.Server.beside` of the server at a URL; by default rank 0.
        """
        updates = updates_by_rank(update, beside or {}, 1 if update.resend else self.rank.ranks.size)
        if update.resend:
            assert updates[0] is not None
            return self.rank.resend(updates[0])
        with self._command("send", updates):
            sent = [self.rank.send(updates)]
            if self._commands is not None:
                sent = self._commands.gather(sent[0])
        return reduce(add, [result for result in sent if result is not None])

    def offload(self) -> bool:
        """Move the memory of all ranks to the host, until the next call. False: a rank has failed, and the run cannot go on."""
        if not self._failed:
            with self._command("offload"):
                self.rank.offload()
        return not self._failed

    @property
    def gpu_bytes(self) -> float | None:
        """Memory of a rank's GPU; all ranks have the same. None: they compute on CPUs."""
        return gpu_bytes(self.rank.device)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call this method of the trainer on every rank. Returns rank 0's result."""
        with self._command("call", method, *arguments):
            return self.rank.call(method, *arguments)

    def _call_on(self, method: str, samples: Sequence[Sample], *more: Any) -> Any:
        """The same for a method that takes samples. Each row is sent once for all calls on a batch."""
        if self._commands is None:
            return self._call(method, samples, *more)
        assert self.rank.trainer is not None
        rows = self.rank.trainer.rows_by_rank(samples, in_steps=method == LAST_CALL)
        message, images = self._samples.pack(samples, rows)
        with self._command("call", method, message, *more):
            self._commands.send_images(images)
            if method == LAST_CALL:
                self._samples.forget()
            return self.rank.call(method, samples, *more)

    @contextmanager
    def _command(self, method: str, *arguments: Any) -> Iterator[None]:
        """The other ranks run this method of :class:`Rank` while this one runs it within the context."""
        with self._lock:
            if self._failed:
                raise RuntimeError("one of the trainer's ranks has failed: the others cannot continue.")
            try:
                if self._commands is not None:
                    self._commands.send(method, *arguments)
                yield
            except BaseException:
                self._failed = self._commands is not None
                raise


def updates_by_rank(
    update: WeightUpdate, beside: Mapping[str, tuple[int, ...]], ranks: int
) -> list[WeightUpdate | None]:
    """Each rank's part of an update.

    Handles of GPU memory come from the ranks beside a server: one handle from each, for the server's rank on the same GPU, or all of
    them from the only one. Everything else is sent by rank 0, which also keeps the weights for a resend.
    """
    by_handle = isinstance(update.sender, type) and issubclass(update.sender, IpcSender)
    wanted = {receiver.url: beside.get(receiver.url, (0,)) for receiver in update.receivers}
    sends = {url: own if by_handle and own and max(own) < ranks else (0,) for url, own in wanted.items()}
    updates: list[WeightUpdate | None] = []
    for rank in range(ranks):
        receivers = tuple(receiver for receiver in update.receivers if rank in sends[receiver.url])
        together = {sends[receiver.url] for receiver in receivers if len(sends[receiver.url]) > 1}
        part = replace(
            update,
            receivers=receivers,
            keep=rank == 0,
            by_value=by_handle and any(wanted[receiver.url] != sends[receiver.url] for receiver in receivers),
            beside=next(iter(together), ()),
        )
        updates.append(part if receivers or rank == 0 else None)
    return updates


def run_commands(rank: Rank, commands: Commands) -> None:
    """Run rank 0's commands on this rank, until it stops them."""
    received = SampleCache()
    while True:
        method, arguments = commands.receive()
        if method == STOP:
            return
        if method == "start":
            received = SampleCache()
        arguments = tuple(
            received.unpack(each, commands.receive_images()) if isinstance(each, SampleMessage) else each
            for each in arguments
        )
        if arguments[:1] == (LAST_CALL,):
            received.forget()
        result = getattr(rank, method)(*arguments)
        if isinstance(result, Iterator):  # each weight is gathered from all ranks when it is yielded
            exhaust(result)
        if method == "send":
            commands.gather(result)


class Commands:
    """The channel between rank 0 and the others: a process group in which only these wait longer than in a collective of a step.

    They receive a command as soon as they have done the last one, so that rank 0 notices a rank that hangs, or whose machine is gone.
    """

    def __init__(self) -> None:
        limit = COLLECTIVE if dist.get_rank() == 0 else BETWEEN_COMMANDS
        self._group: Any = dist.new_group(backend="gloo", timeout=limit)

    def send(self, method: str, *arguments: Any) -> None:
        try:
            dist.broadcast_object_list([(method, arguments)], src=0, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"a rank did not receive `{method}`: it hangs, or has ended. See its output.") from error

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]

    def send_images(self, parts: Sequence[Images]) -> None:
        """Send each rank its part, one after the other: only one part is pickled at a time."""
        for rank, images in enumerate(parts[1:], start=1):
            dist.send_object_list([images], dst=rank, group=self._group)

    def receive_images(self) -> Images:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=0, group=self._group)
        return received[0]

    def gather(self, result: Any) -> list[Any]:
        """The results of all ranks, on rank 0; an empty list on the others."""
        results: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(result, results, dst=0, group=self._group)
        return results or []

    def stop(self) -> None:
        """On rank 0: let :func:`run_commands` return on the other ranks."""
        self.send(STOP)

    def close(self) -> None:
        """Destroy the process groups after a barrier. If the interpreter's exit destroyed them, their threads would abort it."""
        dist.barrier(self._group)
        self._group = None
        dist.destroy_process_group()
        gc.collect()


def join_process_group(backend: str) -> Ranks:
    """Join the other processes that ``torchrun`` or Ray started; ``Ranks()`` for a single process."""
    if not dist.is_torchelastic_launched():
        return Ranks()
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] == "1":
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=COLLECTIVE)
    return Ranks(dist.get_rank(), dist.get_world_size())
