"""NCCL between two GPUs: sums are right, and weights move at the speed of the link."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from acceptance.report import NotTried, Report, require
from torch import multiprocessing

from vlmrl.utils.http_server import free_ports

SIZE = 2**30  # bytes of a broadcast
ROUNDS = 5


def run(report: Report) -> None:
    report.check("NCCL between two ranks", lambda: two_ranks(report))


def two_ranks(report: Report) -> str:
    if torch.cuda.device_count() < 2 and not report.tiny:
        raise NotTried("needs two GPUs")
    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    address, size = f"tcp://127.0.0.1:{free_ports(1)[0]}", 2**20 if report.tiny else SIZE
    multiprocessing.spawn(rank, (backend, address, size, results), nprocs=2)
    total, seconds = results.get()
    require(total == 3.0, f"an all_reduce of 1 and 2 gave {total}")
    version = f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if backend == "nccl" else ""
    return f"{backend}{version}: {ROUNDS * size / seconds / 1e9:.1f} GB/s by broadcast"


def rank(
    number: int, backend: str, address: str, size: int, results: multiprocessing.Queue[tuple[float, float]]
) -> None:
    """One of the two processes; the first one reports the sum of 1 and 2, and the seconds of the broadcasts."""
    device = torch.device("cuda", number) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=address, rank=number, world_size=2)
    total = torch.tensor(number + 1.0, device=device)
    dist.all_reduce(total)
    weights = torch.zeros(size, dtype=torch.uint8, device=device)
    dist.broadcast(weights, src=0)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.broadcast(weights, src=0)
    dist.barrier()
    if number == 0:
        results.put((float(total), time.perf_counter() - began))
    dist.destroy_process_group()
