"""vLLM servers on the trainer's GPU, with adapters, and during training."""

from __future__ import annotations

from acceptance import servers
from acceptance.report import Report


def run(report: Report) -> None:
    report.check("two colocated steps", lambda: servers.colocated(report, "vllm"))
    report.check("two steps with LoRA", lambda: servers.with_adapters(report, "vllm"))
    report.check("two asynchronous steps", lambda: servers.asynchronous(report, "vllm"))
