"""The GPU code of weight updates, of the trainer's offload and of the embedded engine, on simulated GPUs."""

from __future__ import annotations

import pytest

BROADCAST = """
import sys, threading, time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import SenderState, WeightUpdate

LIMIT, DIES = 1.5, sys.argv[1] == "dies"

@dataclass
class Server:
    url: str = "http://127.0.0.1:1"
    ranks: int = 1
    device: str = "cuda"
    dtype: torch.dtype | None = None
    timeout: float = LIMIT
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self): pass
    def receive(self, bucket, version): pass
    def end(self): raise ConnectionResetError("gone")
    def abort(self): self.ended.set()

    def join_group(self, group):
        assert group.backend == "nccl"
        self.store = dist.TCPStore(group.host, group.port, group.size, False, timedelta(seconds=60))

    def receive_broadcast(self, bucket, version, group):
        if not DIES:
            self.ended.wait(LIMIT + 8)  # so its HTTP call ends later than the group's time limit
        raise ConnectionResetError("gone")

weights = [("w", torch.zeros(1024, device="cuda"))]
update = WeightUpdate((Server(),), SENDERS["group"], "v1", bucket_bytes=2**20)
state = SenderState()
result = update.send(iter(weights), state)
print("failed", sorted(result.failed))
time.sleep(LIMIT + 3)  # torch's watchdog looks about every second
update = WeightUpdate((), SENDERS["group"], "v2", bucket_bytes=2**20)
print("sent again", update.send(iter(weights), state).bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_process_outlives_a_server_that_takes_no_part_in_an_nccl_broadcast(simulated_gpu, how):
    """With torch's own NCCL groups. A collective ends only when its group is aborted."""
    soon = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"}  # from the watchdog's finding to the process's end
    done = simulated_gpu.run(BROADCAST, how, nccl_hangs=True, timeout=900, env=soon)
    assert "failed ['http://127.0.0.1:1']" in done.stdout and "sent again 4096" in done.stdout


OTHER_GPU = """
import threading

import torch

from testing.gpu_sim import device_counts
from vlmrl.engine.sglang.receiver import serialized
from vlmrl.train.fsdp import forget_unused
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import SenderState, WeightUpdate

class Server:
    url, ranks, device, dtype, timeout = "http://127.0.0.1:1", 1, "cuda", None, 60.0
    devices = []

    def begin(self): pass
    def end(self): pass
    def abort(self): pass

    def receive(self, bucket, version):
        self.devices.append(bucket.flat.device)
        assert str(torch.cuda.get_device_properties(1).uuid).encode() in __import__("base64").b64decode(
            serialized(bucket.tensors())
        )

torch.cuda.set_device(1)
weights = [("w", torch.zeros(1024, device="cuda:1"))]
state, thread = SenderState(), DaemonPool("weights")  # a new thread, whose current device is GPU 0
for resend in (False, True):
    update = WeightUpdate((Server(),), SENDERS["tensor"], "v1", bucket_bytes=2**20, resend=resend)
    result = thread.submit(update.send, iter(weights), state).result(60)
    assert not result.failed, result.failed
thread.submit(forget_unused).result(60)  # as an offload does
assert Server.devices == [torch.device("cuda", 1)] * 2, Server.devices
assert device_counts(0)["contexts"] == 0, device_counts(0)
assert device_counts(1)["contexts"] == 1
"""


@pytest.mark.slow
def test_weight_updates_of_a_trainer_on_gpu_1_leave_gpu_0_alone(simulated_gpu):
    simulated_gpu.run(OTHER_GPU, devices=2, contents=True, timeout=900)


OFFLOAD = """
import sys
from pathlib import Path

import torch

from testing.gpu_sim import H100
from vlmrl.config import Config, Model, ServerSettings
from vlmrl.engine.server_backend import ServedModel
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.model import tiny
from vlmrl.run.serving import LocalServerHost
from vlmrl.train.controller import RunTrainer
from vlmrl.train.rank import Rank

folder = tiny.build(Path(sys.argv[1]) / "model", "qwen3")
trainer = RunTrainer(Rank(Config(model=Model(path=str(folder), dtype="bfloat16"), output_dir=sys.argv[1])))
rank, settings = trainer.rank, ServerSettings()
size = torch.cuda.memory_allocated()
assert rank.policy.device == torch.device("cuda", 0) and size > 0
host = LocalServerHost(settings, Path("."), rank.device, ranks=1)
assert host.colocated and trainer.gpu_bytes == H100, trainer.gpu_bytes
[server] = host.servers(SGLangBackend(settings), ServedModel("/m", "bfloat16", sleep=True))
assert "--base-gpu-id 0" in " ".join(server.process.launch.command)
assert trainer.offload() and rank.policy.device.type == "cpu"
assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
rank.onload()
assert rank.policy.device == torch.device("cuda", 0) and torch.cuda.memory_allocated() == size
try:
    LocalServerHost(ServerSettings(first_gpu=1), Path("."), rank.device, 1).servers(SGLangBackend(settings), None)
except ValueError as error:
    assert "of the 1 that this process sees" in str(error)
else:
    raise AssertionError("there is no GPU 1")
"""


@pytest.mark.slow
def test_the_trainers_memory_leaves_the_gpu_and_comes_back(simulated_gpu, tmp_path):
    simulated_gpu.run(OFFLOAD, tmp_path, timeout=900)


ENGINE = """
import asyncio, sys
from pathlib import Path

import torch

from testing.gpu_sim import device_counts
from vlmrl.config import Model
from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.hf import budget
from vlmrl.model import tiny
from vlmrl.model.loading import load_model

folder = tiny.build(Path(sys.argv[1]) / "model", "qwen3")
torch.cuda.set_device(1)
model = load_model(Model(path=str(folder), dtype="bfloat16", device="cuda:1"), folder, seed=0)
request = Request("a", [5, 6, 7], [], SamplingParams(2))
engine = HFEngine(model.policy, model.renderer)
[response] = asyncio.run(engine.generate_batch([request]))
assert len(response.token_ids) == 2
assert device_counts(0)["contexts"] == 0, "the engine's thread used GPU 0"
hidden, failures = model.policy.hidden, [2]

def fails(*args, **options):
    if failures[0]:
        failures[0] -= 1
        torch.empty(2**40, dtype=torch.uint8, device="cuda:1")  # torch's own error
    return hidden(*args, **options)

model.policy.hidden = fails
requests = [Request(str(n), [5, 6, 7 + n], [], SamplingParams(2)) for n in range(4)]
responses = asyncio.run(engine.generate_batch(requests))
assert [len(response.token_ids) for response in responses] == [2] * 4
assert failures == [0]
budget.RESERVE_BYTES = 2.0**50
try:
    asyncio.run(engine.generate(request))
except EngineError as error:
    assert "rollout.kv_cache_gib must be set, or the GPU must have" in str(error), error
else:
    raise AssertionError("nothing is free")
engine.close()
"""


@pytest.mark.slow
def test_the_embedded_engine_on_gpu_1_counts_free_memory_and_survives_its_end(simulated_gpu, tmp_path):
    simulated_gpu.run(ENGINE, tmp_path, devices=2, timeout=900)


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from testing.receivers import FakeReceiver
from vlmrl.config import Algo, Config, Model, Optim
from vlmrl.model import tiny
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import TrainerSpec
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import WeightUpdate

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
rank = Rank(Config(model=Model(path="tiny:qwen3_vl"), output_dir=OUTPUT), Ranks(0, 2))
trainer = rank.start(TrainerSpec(Algo(), Optim(), total_steps=2, tokens_per_micro_batch=64))
for weight in trainer._weights.parameters:
    weight.grad = torch.zeros_like(weight)
trainer._apply_gradient()

def addresses():
    values = [*rank.policy.parameters(), *(state["exp_avg"] for state in trainer.optimizer.state.values())]
    assert all(isinstance(value, DTensor) for value in values)
    return [value.to_local().data_ptr() for value in values if value.to_local().numel()]

def update(number):
    receiver = FakeReceiver("http://127.0.0.1:1", device="cuda")
    receiver.receive = lambda bucket, version: None
    result = rank.send([WeightUpdate((receiver,), SENDERS["tensor"], f"v{number}", bucket_bytes=2**16), None])
    assert not result.failed, result.failed
    kept = rank.sent.kept
    assert kept.version == f"v{number}" and len(kept.buckets) > 2
    assert {bucket.flat.device.type for bucket in kept.buckets} == {"cpu"}
    return [bucket.flat.data_ptr() for bucket in kept.buckets]

on_gpu = torch.cuda.memory_allocated()
first = update(0)
assert torch.cuda.memory_allocated() == on_gpu, (torch.cuda.memory_allocated(), on_gpu)
assert update(1) == first  # the same host memory
places = []
for _ in range(2):
    rank.offload()
    assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
    assert rank.policy.device.type == "cpu"
    places.append(addresses())
    rank.onload()
    assert torch.cuda.memory_allocated() == on_gpu, (torch.cuda.memory_allocated(), on_gpu)
assert places[0] == places[1]
"""


@pytest.mark.slow
def test_updates_and_offloads_of_a_sharded_trainer_leave_nothing_on_the_gpu_and_use_host_memory_again(
    simulated_gpu, tmp_path
):
    simulated_gpu.run(f"OUTPUT = {str(tmp_path)!r}\n{SHARDED}", timeout=900)


ORDER = """
import torch

from vlmrl.utils.host_memory import HostMemory
from vlmrl.weight_sync.base import CPU, Bucket, KeptWeights

host = torch.ones(2**18)
weights = host.cuda()
locked = torch.zeros(2**18, pin_memory=True)
locked.copy_(weights, non_blocking=True)
assert locked.sum() == 0  # it is on its way
torch.cuda.current_stream().synchronize()
assert locked.sum() == 2**18

bucket = Bucket(["w"], [weights.shape], weights)
assert bucket.to(CPU).flat.sum() == 2**18
kept, memory = KeptWeights(), HostMemory()
kept.begin()
kept.add(bucket)
assert kept.buckets[0].flat.sum() == 0 and kept.version is None  # it is copied beside the send
kept.end("v1")
assert kept.buckets[0].flat.sum() == 2**18
away = memory.moved("w", weights, CPU)
assert away.sum() == 0
memory.wait()
assert away.sum() == 2**18
back = memory.moved("w", away, weights.device)
away.zero_()  # too early
assert back.cpu().sum() == 0
"""


@pytest.mark.slow
def test_copies_are_read_only_after_a_wait(simulated_gpu):
    """Page-locked memory has a copy's values after a synchronization only, so that a wait that is missing shows."""
    simulated_gpu.run(ORDER, contents=True, timeout=900)


FORKED = """
import os, re, signal

import torch

from vlmrl.utils.host_memory import HostMemory

host = HostMemory().copy_of("w", torch.ones(2**20, device="cuda"))
torch.cuda.synchronize()
maps = open("/proc/self/smaps").read()
mappings = [(*(int(each, 16) for each in found[1].split("-")), found[2]) for found in re.finditer(
    r"^([0-9a-f]+-[0-9a-f]+) .*?VmFlags: ([a-z ]+)$", maps, re.M | re.S)]
[flags] = [flags.split() for first, end, flags in mappings if first <= host.data_ptr() < end]
assert {"dc", "hg"} <= set(flags), flags  # no copy in a forked process; huge pages
child = os.fork()
if not child:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no traceback
    os._exit(int(host[0]))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
"""


@pytest.mark.slow
def test_a_forked_process_has_no_page_locked_memory(simulated_gpu):
    """With copy-on-write pages, a write after the fork would move this process to other pages than those that the GPU copies."""
    simulated_gpu.run(FORKED, contents=True)
