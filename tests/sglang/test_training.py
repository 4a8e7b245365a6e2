"""Whole runs on an external server: colocated, and with rollouts ahead of the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from testing.real_servers import Served

from vlmrl.config import Config, Optim, Train
from vlmrl.engine.server import TOKEN_VARIABLE
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.report.run_log import read_rows
from vlmrl.run.program import run_training
from vlmrl.run.serving import LocalServerHost
from vlmrl.utils.tokens import bearer


def with_external_server(family: Served, folder: Path, monkeypatch: Any, **settings: Any) -> Config:
    monkeypatch.setenv(TOKEN_VARIABLE, family.server.token)
    config = family.run.config
    server = replace(config.server, urls=(family.server.url,), args={}, env={})
    return replace(config, output_dir=str(folder), server=server, optim=Optim(lr=3e-3), **settings)


def rows_of(config: Config) -> list[dict[str, Any]]:
    run_training(config)
    return read_rows(config.folder / "metrics.jsonl")


def test_a_server_on_the_trainers_gpu_sleeps_during_training(qwen3, tmp_path, monkeypatch):
    """On a CPU there is no memory to release, but the server must accept the calls and sample correctly afterwards."""
    monkeypatch.setattr(LocalServerHost, "colocated", True)
    log = qwen3.server.process.launch.log
    before = log.read_text()
    rows = rows_of(with_external_server(qwen3, tmp_path, monkeypatch))
    assert max(row["logprob_mismatch/max"] for row in rows) < qwen3.tolerance
    calls = log.read_text()[len(before) :]
    pauses, releases = (calls.count(f"POST /{name}") for name in ("pause_generation", "release_memory_occupation"))
    assert pauses >= 5  # three of them before it serves
    assert pauses < releases <= 2 * pauses  # of its KV cache in each pause, of its weights before training
    # It still sleeps at the end, without weights: the model is saved.
    assert releases - 2 == calls.count("POST /resume_memory_occupation")
    assert SGLangBackend.restore_weights is not None
    for call in (SGLangBackend.restore_weights, SGLangBackend.wake, SGLangBackend.resume):
        headers = bearer(qwen3.server.token)
        httpx.post(qwen3.server.url + call.path, json=call.body, headers=headers, timeout=60).raise_for_status()


def test_rollouts_continue_during_training(qwen3, tmp_path, monkeypatch):
    train = Train(steps=4, groups_per_batch=2, max_staleness=1)
    rows = rows_of(with_external_server(qwen3, tmp_path, monkeypatch, train=train))
    assert rows[0]["logprob_mismatch/max"] < qwen3.tolerance
    assert max(row["staleness/max"] for row in rows) == 1
    assert [row["failed"] for row in rows] == [0] * 4
    assert all(row["weight_sync/bytes"] > 0 for row in rows)
