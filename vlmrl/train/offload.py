"""One trainer rank's memory on a GPU that it shares with an engine: on the host while the engine samples, on the GPU otherwise."""

from __future__ import annotations

import torch

from vlmrl.model.policy import Policy
from vlmrl.train.controller import LocalTrainer, RunTrainer
from vlmrl.train.fsdp import forget_unused
from vlmrl.train.make_trainer import Trainers
from vlmrl.train.trainer import Trainer, TrainerSpec

HOST = torch.device("cpu")


class TrainerMemory:
    """Moves one rank's memory between the device that ``policy`` was loaded on and the host.

    That is the policy, and once ``trainer`` is set also its reference, master weights and optimizer state.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.device = policy.device
        self.trainer: Trainer | None = None
        self.offloaded = False

    def offload(self) -> None:
        """Move everything to the host, until the next :meth:`onload`. A second call changes nothing."""
        if not self.offloaded:
            self.move(HOST)
            self.offloaded = True

    def onload(self) -> None:
        """Move everything back to the GPU. An engine that shares it must be asleep."""
        if self.offloaded:
            self.move(self.device)
            self.offloaded = False

    def make(self, trainers: Trainers, spec: TrainerSpec) -> Trainer:
        """A new trainer on the GPU. The last one is released first: both would not fit."""
        self.trainer = None
        self.onload()
        self.trainer = trainers.make(spec)
        return self.trainer

    def move(self, device: torch.device) -> None:
        (self.trainer or self.policy).to(device)
        forget_unused()


class OffloadedTrainers:
    """The :class:`~vlmrl.train.controller.TrainerFactory` of a run without Ray whose servers use the trainer's GPU."""

    def __init__(self, trainers: Trainers, memory: TrainerMemory) -> None:
        self.policy = trainers.policy
        self._trainers = trainers
        self._memory = memory

    def start(self, spec: TrainerSpec) -> RunTrainer:
        return OffloadedTrainer(self._memory.make(self._trainers, spec), self._memory)


class OffloadedTrainer(LocalTrainer):
    """A trainer that each call moves to the GPU. The servers are asleep during calls, and the run offloads it before they wake."""

    def __init__(self, trainer: Trainer, memory: TrainerMemory) -> None:
        super().__init__(trainer)
        self._memory = memory

    def call(self, method: str, *arguments: object) -> object:
        self._memory.onload()
        return super().call(method, *arguments)


def gpu_bytes(device: torch.device) -> float | None:
    """Memory of a GPU. None for another device."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
