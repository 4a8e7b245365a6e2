"""The trainer's memory is on the GPU during its calls, and on the host when its run offloads it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from vlmrl.train.offload import HOST, OffloadedTrainers, TrainerMemory, gpu_bytes

GPU = torch.device("cuda", 0)


class Movable:
    """A policy or a trainer that notes where it is."""

    def __init__(self, device: torch.device = GPU) -> None:
        self.device = device
        self.moves: list[torch.device] = []

    def to(self, device: torch.device) -> None:
        self.device = device
        self.moves.append(device)

    def step(self, samples: str) -> tuple[str, torch.device]:
        return samples, self.device


class Trainers:
    def __init__(self, policy: Movable) -> None:
        self.policy, self.made, self.alive = policy, [], []

    def make(self, spec: str) -> Movable:
        gc.collect()
        self.alive.append([each() is not None for each in self.made])
        assert self.policy.device == GPU
        trainer = Movable()
        self.made.append(weakref.ref(trainer))
        return trainer


def test_the_policy_moves_once_each_way_until_there_is_a_trainer():
    policy = Movable()
    memory = TrainerMemory(policy)
    memory.onload()
    assert policy.moves == []
    memory.offload()
    memory.offload()
    assert (policy.moves, memory.offloaded) == ([HOST], True)
    memory.onload()
    memory.onload()
    assert policy.moves == [HOST, GPU]


def test_a_call_finds_the_trainer_on_the_gpu_and_the_last_trainer_makes_room_for_the_next():
    policy = Movable()
    memory, trainers = TrainerMemory(policy), Trainers(policy)
    factory = OffloadedTrainers(trainers, memory)
    memory.offload()
    first = factory.start("warm start")
    memory.offload()
    assert memory.trainer.moves == [HOST]
    assert first.call("step", "samples") == ("samples", GPU)
    assert not memory.offloaded
    del first
    second = factory.start("run")
    assert trainers.alive == [[], [False]]
    assert second.call("step", "more") == ("more", GPU)


def test_a_failed_move_to_the_gpu_is_tried_again():
    policy = Movable()
    memory = TrainerMemory(policy)
    memory.offload()
    policy.to = lambda device: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        memory.onload()
    assert memory.offloaded
    del policy.to
    memory.onload()
    assert policy.device == GPU and not memory.offloaded


def test_a_module_keeps_its_parameters_over_the_moves():
    """The optimizer holds the parameters themselves."""
    module = nn.Linear(2, 2)
    module.device = HOST
    memory = TrainerMemory(module)
    before = list(map(id, module.parameters()))
    memory.offload()
    memory.onload()
    assert list(map(id, module.parameters())) == before
    assert gpu_bytes(HOST) is None
