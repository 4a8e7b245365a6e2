"""A rank of a training step, with FSDP and NCCL on simulated GPUs: one GPU for each rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from testing.gpu_sim import device_counts
from vlmrl.config import Algo, Model, Optim, Train
from vlmrl.model import tiny
from vlmrl.model.loading import pick_device, pick_dtype
from vlmrl.train.controller import Commands, join_process_group
from vlmrl.train.fsdp import backend_of
from vlmrl.train.sharded_loading import load_sharded
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample


def main(folder: str) -> None:
    """``folder`` is for the tiny model."""
    rank = int(os.environ["LOCAL_RANK"])
    if rank == 0:
        tiny.resolve("tiny:qwen3_vl", Path(folder))
    ranks = join_process_group(backend_of(torch.device("cuda")))
    commands = Commands()
    dist.barrier(dist.new_group(backend="gloo"))  # the model is built
    assert pick_device("auto") == torch.device("cuda", rank) and torch.cuda.current_device() == rank
    assert pick_dtype("auto", pick_device("auto")) == torch.bfloat16
    policy = load_sharded(Model(path="tiny:qwen3_vl"), Path(folder), 0, Train())
    assert {weight.device for weight in policy.parameters()} == {torch.device("cuda", rank)}
    samples = [
        Sample([5, 6], [7, 8, 9], [1] * 3, [-5.0] * 3, [0] * 3, "g", f"g/{row}", True, "stop", advantage=1.0)
        for row in range(4)
    ]
    spec = TrainerSpec(Algo(), Optim(), total_steps=9, tokens_per_micro_batch=8)
    torch.compiler.set_stance("force_eager")  # compiled kernels on another GPU than the first are in devices_script.py
    trainer = Trainer(policy, spec, ranks=ranks)
    assert [len(row) for row in trainer.step(samples).logprobs] == [3] * 4
    assert sum(1 for _ in trainer.named_weights()) > 50
    counts = [device_counts(device) for device in range(2)]
    assert counts[rank]["launches"] > 100
    assert counts[1 - rank]["contexts"] == counts[1 - rank]["mallocs"] == 0
    trainer.close()
    commands.close()
