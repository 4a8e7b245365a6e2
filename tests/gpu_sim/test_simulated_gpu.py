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


def test_a_call_that_is_not_simulated_is_named(simulated_gpu):
    done = simulated_gpu.run("import ctypes; assert ctypes.CDLL(None).cudaGraphLaunch(None, None) == 801")
    assert "simulated CUDA: cudaGraphLaunch is called, but tests/gpu_sim does not simulate it" in done.stderr
