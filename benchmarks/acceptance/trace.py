"""Profiler traces of one step of the trainer, kept beside the table: which kernels take the time, and when the GPU waits."""

from __future__ import annotations

from pathlib import Path

from acceptance.models import random_model, sampled
from acceptance.report import Report, synchronize
from torch.profiler import ProfilerActivity, profile

from vlmrl.config import Algo, Optim
from vlmrl.train.trainer import Trainer, TrainerSpec

KERNELS = 5  # that are named


def run(report: Report) -> None:
    report.check("a step", lambda: trace(report, "trace.json"))
    report.check("a step with compiled layers", lambda: compiled(report))


def compiled(report: Report) -> str:
    report.need_gpu()
    return trace(report, "trace-compiled.json", compile_layers=True)


def trace(report: Report, name: str, compile_layers: bool = False) -> str:
    """The third step, after compilation and the first allocations; `chrome://tracing` and Perfetto show the file."""
    loaded = random_model(report)
    loaded.policy.enable_gradient_checkpointing()
    if compile_layers:
        loaded.policy.compile_layers()
    rows = sampled(loaded, response=32 if report.tiny else 256, side=128 if report.tiny else 512)
    trainer = Trainer(loaded.policy, TrainerSpec(Algo(), Optim(), total_steps=3, tokens_per_micro_batch=16384))
    for _ in range(2):
        trainer.step(rows)
    synchronize(report.device)
    on_gpu = report.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        trainer.step(rows)
        synchronize(report.device)
    path = (report.path.parent if report.path is not None else Path()) / name
    profiler.export_chrome_trace(str(path))
    time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, time))
    total = sum(getattr(event, time) for event in events) or 1.0
    largest = ", ".join(f"{event.key[:40]} {getattr(event, time) / total:.0%}" for event in events[:KERNELS])
    return f"{total / 1e6:.2f} s in {sum(event.count for event in events)} calls: {largest}; {path}"
