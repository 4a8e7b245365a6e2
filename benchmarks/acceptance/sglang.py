"""SGLang servers on the trainer's GPU, with adapters, during training, and on two GPUs."""

from __future__ import annotations

from acceptance import servers
from acceptance.report import Report


def run(report: Report) -> None:
    report.check("two colocated steps", lambda: servers.colocated(report, "sglang"))
    report.check("two steps with LoRA", lambda: servers.with_adapters(report, "sglang"))
    report.check("two asynchronous steps", lambda: servers.asynchronous(report, "sglang"))
    report.check("two ranks, a server with tp 2", lambda: servers.two_gpus(report, "sglang"))
    report.check("weights by NCCL", lambda: servers.by_group(report, "sglang"))
