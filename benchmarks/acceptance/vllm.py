"""A vLLM server on the trainer's GPU."""

from __future__ import annotations

from acceptance import servers
from acceptance.report import Report


def run(report: Report) -> None:
    report.check("two colocated steps", lambda: servers.colocated(report, "vllm"))
