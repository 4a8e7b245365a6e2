"""Ranks and engines that take turns on the same GPUs: Ray is told of GPUs that are not there, and everything computes on the CPU."""

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
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import read_rows
from vlmrl.run.build import build_run
from vlmrl.run.checkpointing import save_after_failure
from vlmrl.run.program import run_training
from vlmrl.train.trainer import TrainerSpec
from vlmrl.weight_sync.transfer import Target, WeightUpdate

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")
from vlmrl.cluster.ray_cluster import parts_by_rank  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def pretended_gpus():
    ray.init(address="local", num_cpus=6, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def two_gpus(folder, **changes):
    config = short_quickstart(folder, cluster=Cluster(gpus=2), **changes)
    return replace(config, model=replace(config.model, dtype="float32"))


def away(ranks) -> list[bool]:
    """Which ranks are in host memory."""
    return ray.get([rank.__ray_call__.remote(lambda worker: worker._away) for rank in ranks])


def test_a_side_leaves_the_gpus_before_the_other_comes(pretended_gpus, tmp_path):
    run = build_run(two_gpus(tmp_path))
    cluster = run.engine._cluster
    assert len(cluster.engines) == 2
    shared = [engine.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) for engine in cluster.engines]
    assert sorted(ray.get(shared)) == ["0", "1"]
    tell, told = run.engine._all, []

    async def tell_and_look(method, *arguments):
        told.append((method, arguments, away(cluster.ranks)))
        await tell(method, *arguments)

    run.engine._all = tell_and_look
    said = io.StringIO()
    try:

        async def turns():
            async with paused(run.engine):
                spec = TrainerSpec(run.config.algo, Optim(lr=1e-3), total_steps=1, tokens_per_micro_batch=400)
                trainer = run.trainers.start(spec)
                assert away(cluster.ranks) == [False, False]
            await save_after_failure(run, trainer, RunProgress(Console(file=said)))

        asyncio.run(turns())
        assert told == [("pause", (True,), [False] * 2), ("resume", (), [True] * 2), ("pause", (True,), [True] * 2)]
        assert (run.folder / "model/model.safetensors").exists() and not said.getvalue()
    finally:
        run.engine.close()


def test_a_run_that_takes_turns_trains_what_it_sampled_also_when_it_was_resumed(pretended_gpus, tmp_path):
    config = two_gpus(tmp_path, checkpoint=Checkpoint(every=1))
    config = replace(config, warm_start=WarmStart(), eval=replace(config.eval, every=0, blank_images=False))
    run_training(config)
    run_training(replace(config, train=replace(config.train, steps=3)), resume=True)
    rows = [row for row in read_rows(config.folder / "metrics.jsonl") if "logprob_mismatch/max" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3


def test_servers_get_their_weights_from_the_rank_whose_gpu_they_share_and_rank_0_keeps_them():
    targets = tuple(Target(f"http://127.0.0.1:{port}") for port in (1, 2))
    whole = WeightUpdate(targets, "tensor", "run.1", "run", bucket_bytes=1, timeout=1.0)
    parts = parts_by_rank(whole, {targets[0].url: 0, targets[1].url: 2}, ranks=4)
    assert [part and (part.targets, part.keep) for part in parts] == [
        (targets[:1], True),
        None,
        (targets[1:], False),
        None,
    ]
    (first, *others) = parts_by_rank(replace(whole, targets=()), {}, ranks=2)
    assert first is not None and first.keep and others == [None]
