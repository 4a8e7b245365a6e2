"""A trainer on a shared GPU: it is offloaded and onloaded, and its weights are sent to another process by CUDA IPC."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from acceptance.models import random_model, sampled
from acceptance.report import CPU, Report, free, gib, mismatch, require, synchronize, within

from vlmrl.config import Algo, Optim
from vlmrl.engine.sglang.receiver import serialized
from vlmrl.model.loading import as_saved
from vlmrl.model.lora import named_weights
from vlmrl.train.fsdp import forget_unused
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.utils.host_memory import HostMemory
from vlmrl.weight_sync.base import BUCKET_BYTES, Bucket, buckets

LEFT = 256 * 2**20  # of an offloaded trainer, in bytes
# Reads a line with a bucket, as a server would, and answers with the sums of its tensors. A handle names its GPU by UUID.
RECEIVER = """
import base64, json, pickle, sys
import torch
from torch.multiprocessing import reductions
rebuild = reductions.rebuild_cuda_tensor
def on_own_index(*arguments):
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])
reductions.rebuild_cuda_tensor = on_own_index
for line in sys.stdin:
    tensors = pickle.loads(base64.b64decode(line))
    print(json.dumps([[name, str(tensor.device), float(tensor.double().sum())] for name, tensor in tensors]), flush=True)
    del tensors
"""


def run(report: Report) -> None:
    report.check("offload and onload", lambda: offload(report))
    report.check("weights to another process", lambda: transfer(report))


def offload(report: Report) -> str:
    """Offload a trainer with optimizer state, and onload it: it computes the same logprobs as before."""
    loaded = random_model(report)
    loaded.policy.enable_gradient_checkpointing()
    rows = sampled(loaded)
    trainer = Trainer(loaded.policy, TrainerSpec(Algo(), Optim(), total_steps=2, tokens_per_micro_batch=16384))
    trainer.step(rows)
    scores, held, memory = trainer.score(rows), allocated(), HostMemory()
    away = seconds(lambda: (trainer.to(CPU, memory), free(), forget_unused()))
    left = allocated()
    trainer.to(report.device, memory)
    apart, _ = mismatch(trainer.score(rows), scores)
    trainer.step(rows)
    text = f"{gib(held)} on the GPU, {gib(left)} while offloaded; {away:.1f} s to the host at first; "
    again, returned = (
        seconds(lambda d=device: (trainer.to(d, memory), synchronize(report.device))) for device in (CPU, report.device)
    )
    text += f"then {held / again / 1e9:.1f} GB/s to the host and {held / returned / 1e9:.1f} back; "
    require(left <= LEFT, f"an offloaded trainer must leave less than {gib(LEFT)} on the GPU: {text}")
    return text + within(logprobs=(apart, 1e-6))


def transfer(report: Report) -> str:
    """All weights, in the buckets and the form in which SGLang gets them. Without a GPU the values are sent."""
    loaded = random_model(report)
    command = [sys.executable, "-c", RECEIVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin is not None and receiver.stdout is not None
        sent, devices, began = 0, set(), time.perf_counter()
        for bucket in weights_of(loaded.policy.model):
            values = [(name, tensor if tensor.is_cuda else tensor.clone()) for name, tensor in bucket.tensors()]
            print(serialized(values), file=receiver.stdin, flush=True)
            answer = json.loads(receiver.stdout.readline() or "null")
            require(answer is not None, "the receiving process ended; its error is in the log")
            wanted = [[name, float(tensor.double().sum())] for name, tensor in values]
            require([[name, total] for name, _, total in answer] == wanted, "the sums of the received weights differ")
            sent, devices = sent + bucket.flat.nbytes, devices | {device for _, device, _ in answer}
        spent = time.perf_counter() - began
        receiver.stdin.close()
    require(
        devices == {str(report.device)}, f"the weights must arrive on {report.device}, but are on {sorted(devices)}"
    )
    return f"{gib(sent)} on {', '.join(devices)} in {spent:.1f} s, equal"


def weights_of(model: torch.nn.Module) -> Iterator[Bucket]:
    return buckets(as_saved(model, named_weights(model)), BUCKET_BYTES)


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def seconds(call: object) -> float:
    began = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - began
