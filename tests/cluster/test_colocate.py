"""Ranks and engines colocated on GPUs that only Ray believes in: everything computes on the CPU."""

from __future__ import annotations

import asyncio
import io
import os
from dataclasses import replace

import pytest
from rich.console import Console
from testing.runs import short_quickstart

from vlmrl.config import Checkpoint, Cluster, Optim, WarmStart
from vlmrl.engine.base import paused
from vlmrl.engine.sglang.receiver import SGLangReceiver
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import read_rows
from vlmrl.run.build import build_run
from vlmrl.run.checkpointing import save_after_failure
from vlmrl.run.program import run_training
from vlmrl.train.trainer import TrainerSpec
from vlmrl.weight_sync.base import WeightUpdate
from vlmrl.weight_sync.ipc import IpcSender

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")
from vlmrl.cluster.server_host import updates_by_rank  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def two_fake_gpus():
    ray.init(address="local", num_cpus=6, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def two_gpus(folder, **changes):
    config = short_quickstart(folder, cluster=Cluster(gpus=2), **changes)
    return replace(config, model=replace(config.model, dtype="float32"))


def offloaded(ranks) -> list[bool]:
    """Which ranks are in host memory."""
    return ray.get([rank.__ray_call__.remote(lambda worker: worker.memory.offloaded) for rank in ranks.actors])


def test_one_side_is_offloaded_before_the_other_is_onloaded(two_fake_gpus, tmp_path):
    run = build_run(two_gpus(tmp_path))
    cluster = run.engine._cluster
    assert len(cluster.engines) == 2
    shared = [engine.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) for engine in cluster.engines]
    assert sorted(ray.get(shared)) == ["0", "1"]
    call_all, calls = run.engine._call_all, []

    async def recorded(method, *arguments):
        calls.append((method, arguments, offloaded(cluster.ranks)))
        await call_all(method, *arguments)

    run.engine._call_all = recorded
    output = io.StringIO()
    try:

        async def train_and_save():
            async with paused(run.engine):
                spec = TrainerSpec(run.config.algo, Optim(lr=1e-3), total_steps=1, tokens_per_micro_batch=400)
                trainer = run.trainers.start(spec)
                assert offloaded(cluster.ranks) == [False, False]
            await save_after_failure(run, trainer, RunProgress(Console(file=output)))

        asyncio.run(train_and_save())
        assert calls == [("pause", (True,), [False] * 2), ("resume", (), [True] * 2), ("pause", (True,), [True] * 2)]
        assert (run.folder / "model/model.safetensors").exists() and not output.getvalue()
    finally:
        run.engine.close()


def test_a_colocated_run_trains_on_its_own_samples_also_after_a_resume(two_fake_gpus, tmp_path):
    config = two_gpus(tmp_path, checkpoint=Checkpoint(every=1))
    config = replace(config, warm_start=WarmStart(), eval=replace(config.eval, every=0, blank_images=False))
    run_training(config)
    run_training(replace(config, train=replace(config.train, steps=3)), resume=True)
    rows = [row for row in read_rows(config.folder / "metrics.jsonl") if "logprob_mismatch/max" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3


def test_servers_get_their_weights_from_the_rank_whose_gpu_they_share_and_rank_0_keeps_them():
    receivers = tuple(SGLangReceiver(f"http://127.0.0.1:{port}") for port in (1, 2))
    whole = WeightUpdate(receivers, IpcSender, "run.1", "run", bucket_bytes=1)
    updates = updates_by_rank(whole, {receivers[0].url: 0, receivers[1].url: 2}, ranks=4)
    assert [update and (update.receivers, update.keep) for update in updates] == [
        (receivers[:1], True),
        None,
        (receivers[1:], False),
        None,
    ]
    (first, *others) = updates_by_rank(replace(whole, receivers=()), {}, ranks=2)
    assert first is not None and first.keep and others == [None]
