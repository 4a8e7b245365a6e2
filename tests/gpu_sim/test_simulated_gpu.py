"""The simulated GPU itself: what torch can do on it, and what it says when it cannot go on."""

import pytest

pytestmark = pytest.mark.slow

GIB = 2**30


def test_torch_computes_nothing_on_it_and_reports_true_sizes(simulated_gpu):
    simulated_gpu.run(f"""
import torch
from testing.gpu_sim import device_counts
assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.device_count() == 2
assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin == 227 * 1024
layer = torch.nn.Linear(1000, 1000, device="cuda:1", dtype=torch.bfloat16)
layer(torch.randn(10, 1000, device="cuda:1", dtype=torch.bfloat16)).sum().backward()
torch.optim.AdamW(layer.parameters(), fused=True).step()
assert layer.weight.grad.shape == (1000, 1000) and layer.weight.grad.sum().item() == 0
before = torch.cuda.memory_allocated(1)
big = torch.empty(30 * {GIB}, dtype=torch.uint8, device="cuda:1")
assert torch.cuda.memory_allocated(1) - before == 30 * {GIB}
counts = device_counts(1)
assert counts["contexts"] == 1 and counts["launches"] > 0 and counts["downloads"] == 1
assert device_counts(0)["mallocs"] == 0
""", devices=2)  # fmt: skip


def test_a_device_that_is_full_refuses(simulated_gpu):
    simulated_gpu.run(
        f"""
import pytest, torch
held = torch.empty(20 * {GIB}, dtype=torch.uint8, device="cuda")
with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4.00 GiB"):
    torch.empty(4 * {GIB}, dtype=torch.uint8, device="cuda")
del held
torch.empty(22 * {GIB}, dtype=torch.uint8, device="cuda")
""",
        memory=24 * GIB,
    )


def test_copies_move_bytes_where_it_is_asked_for(simulated_gpu):
    script = """
import sys, torch
numbers = torch.arange(5)
assert numbers.cuda().cpu().tolist() == (numbers.tolist() if sys.argv[1] == "True" else [0] * 5)
assert torch.empty(5).pin_memory().is_pinned() and not torch.empty(5).is_pinned()
"""
    for contents in (True, False):
        simulated_gpu.run(script, contents, contents=contents)


def test_tensors_reach_another_process_by_ipc(simulated_gpu):
    simulated_gpu.run(
        """
import torch, torch.multiprocessing as mp

def child(queue, done):
    tensor = queue.get()
    assert tensor.is_cuda and tensor.cpu().tolist() == [0, 1, 2], tensor.cpu()
    done.put(True)

if __name__ == "__main__":
    context = mp.get_context("fork")  # this process has not used CUDA yet
    queue, done = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, done))
    process.start()
    tensor = torch.arange(3).cuda()
    queue.put(tensor)
    assert done.get(timeout=60)
    process.join()
""",
        contents=True,
    )


def test_a_collective_that_hangs_ends_when_its_group_is_aborted(simulated_gpu):
    simulated_gpu.run(
        """
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
work = dist.broadcast(torch.zeros(5, device="cuda"), src=0, async_op=True)
assert not work.is_completed()
dist.distributed_c10d._abort_process_group()
assert work.is_completed()
""",
        nccl_hangs=True,
    )


def test_a_call_that_is_not_simulated_is_named(simulated_gpu):
    done = simulated_gpu.run("import ctypes; assert ctypes.CDLL(None).cudaGraphLaunch(None, None) == 801")
    assert "simulated CUDA: cudaGraphLaunch is called, but tests/gpu_sim does not simulate it" in done.stderr


def test_triton_compiles_for_hopper(triton_gpu):
    triton_gpu.run(
        """
import torch
compiled = torch.compile(lambda x: (x * 2).relu().sum(1))
assert compiled(torch.ones(100, 300, device="cuda")).shape == (100,)
from testing.gpu_sim import device_counts
assert device_counts()["launches"] > 0
from triton.runtime import driver
assert driver.active.get_current_target().arch == 90
"""
    )
