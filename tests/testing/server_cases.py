"""Tests of every real server program. A module imports those whose fixtures it has:

from testing.server_cases import test_all_ways_give_the_same_weights  # noqa: F401
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from testing.engine_drivers import sharpened
from testing.real_servers import TRIES, Served, left_of, processes_of, served, versions
from vlmrl.checks.doctor_model import highest_id
from vlmrl.checks.server_parity import FILLS
from vlmrl.config import Checkpoint, Config, Optim, Teacher, Train
from vlmrl.engine.base import paused
from vlmrl.engine.server import TOKEN_VARIABLE
from vlmrl.model.expert_routing import indices_from_routing
from vlmrl.model.lora import adapters_off, named_adapters
from vlmrl.report.run_log import read_rows
from vlmrl.run.program import run_training
from vlmrl.run.teacher_servers import TeacherServers
from vlmrl.samples import concat, step_wise
from vlmrl.train.packing import collate, count_unrecorded_experts
from vlmrl.types import ExpertRouting, Sample

TESTS = Path(__file__).parents[1]
BEGIN = """
import asyncio, sys
from pathlib import Path
from {program.__module__} import {program.__name__} as config
from vlmrl.run.build import build_run

run = build_run(config(Path(sys.argv[1]), Path(sys.argv[2])))
asyncio.run(run.engine.start())
print(run.engine.servers.all[0].process.group, flush=True)
asyncio.run(asyncio.sleep(600))
"""


# Rollouts and updates


def test_server_and_trainer_agree_at_startup(family: Served):
    [report] = family.reports.values()
    assert report.seen < family.tolerance and report.unseen < family.tolerance


def test_a_server_gets_the_random_weights_of_the_trainer(program: Any, qwen3_vl: Path, tmp_path: Path):
    """Its own are overwritten, and what is no weight is not random: the mean and the deviation of images, for example."""
    config = program(qwen3_vl, tmp_path, dtype="float32")
    for [one] in served(replace(config, model=replace(config.model, path=f"random:{qwen3_vl}"))):
        [report] = one.reports.values()
        assert report.seen < one.tolerance and report.unseen < one.tolerance


def test_episodes_with_images_in_their_observations_are_what_the_trainer_sees(family: Served):
    played = family.episodes("play")
    assert [len(t.turns) for t in played] == [3] * 8
    assert all(len(turn.media) == 1 for t in played for turn in t.turns)
    assert family.largest_difference(played) < family.tolerance


def test_a_server_is_a_teacher(family: Served, monkeypatch):
    """Checked as at a run's start, it scores rows with images as the trainer does with the weights that it serves."""
    run = family.run
    rows = [sample for trajectory in family.episodes("taught") for sample in concat(trajectory)]
    highest = highest_id(run.model.tokenizer)
    for row in rows:  # a run asks no server about ids that are no tokens
        row.response_ids = [token if token <= highest else 5 for token in row.response_ids]
    rows[0].response_ids[-1] = run.model.renderer.image_opening_id  # as a response ends that was cut there
    teacher = Teacher(model=f"{run.config.engine}:{family.server.url}", top_k=5)
    monkeypatch.setenv(TOKEN_VARIABLE, family.server.token)
    servers = TeacherServers(replace(run.config, teacher=teacher), run.model)
    try:
        [line] = asyncio.run(servers.connect(run.store))
        assert line.startswith(f"teacher   {family.server.url}: scores what it samples within ")
        assert servers.score(rows) == {"teacher/retried": 0}
    finally:
        servers.scorer.close()
    monkeypatch.setattr(run.model.policy, "banned_ids", ())  # a teacher's server bans none
    for row, wanted in zip(rows, family.scores(rows), strict=True):
        seen, trained = row.teacher_scores, np.array(row.loss_mask, bool)
        assert np.abs(seen.logprobs - wanted)[trained].max() < family.tolerance
        assert (np.diff(seen.top_logprobs[trained]) <= 0).all() and (
            seen.logprobs <= seen.top_logprobs[:, 0] + 1e-5
        ).all()
        listed = seen.top_ids == np.array(row.response_ids)[:, None]
        assert np.allclose(seen.top_logprobs[listed], np.repeat(seen.logprobs, listed.sum(1)), atol=1e-5)
        assert 0 < np.exp(seen.top_logprobs[trained].astype(float)).sum(1).max() <= 1 + 1e-5


def test_all_ways_give_the_same_weights(family: Served):
    """Each after other weights, so that a way that keeps image features of those shows."""
    sums = []
    for seed, family.sync.method in enumerate(("group", "disk", "tensor"), start=11):
        family.change(seed)
        asyncio.run(family.push())
        played = family.episodes(f"way-{family.sync.method}", groups=1)
        assert versions(played) == {family.version}
        assert family.largest_difference(played) < family.tolerance
        family.change(seed=7)
        asyncio.run(family.sync.fill(family.run.serving.send, FILLS[0]))
        asyncio.run(family.push())
        sums.append(family.checksums())
    assert sums[0] == sums[1] == sums[2]


def test_after_an_update_in_bfloat16_images_seen_before_have_new_features(qwen2_5: Served):
    """The same tasks before and after two updates.

    Weights that say something have logits of 20, which bfloat16 rounds by 0.06: there the mean difference is checked.
    """
    one = qwen2_5
    one.episodes("seen")
    old = one.weights()
    one.change(1)
    asyncio.run(one.push())
    played = one.episodes("again")
    assert one.largest_difference(played) < one.tolerance
    new = one.weights()
    one.set_weights(new | {name: weight for name, weight in old.items() if "visual" in name})
    assert one.differences(played).mean() > one.tolerance  # what a server that keeps image features would show
    one.set_weights(sharpened(one.first))
    asyncio.run(one.push())
    assert one.differences(one.episodes("sharpened")).mean() < one.tolerance


def test_a_run_samples_from_the_trained_weights_also_after_a_resume(qwen3: Served, tmp_path: Path, monkeypatch):
    """On a server as a run leaves it that is killed in its startup check: paused, and every weight the same number."""
    config = qwen3.run.config
    settings = replace(config.server, urls=(qwen3.server.url,), args={}, env={})
    config = replace(
        config, output_dir=str(tmp_path), server=settings, optim=Optim(lr=3e-3), checkpoint=Checkpoint(every=2)
    )
    monkeypatch.setenv(TOKEN_VARIABLE, qwen3.server.token)
    asyncio.run(qwen3.sync.fill(qwen3.run.serving.send, FILLS[0]))
    asyncio.run(qwen3.run.engine.pause())
    try:
        run_training(config)
    finally:
        asyncio.run(qwen3.run.engine.resume())
    run_training(replace(config, train=Train(steps=4, groups_per_batch=2)), resume=True)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["failed"] for row in rows] == [0] * 4
    assert max(row["logprob_mismatch/max"] for row in rows) < qwen3.tolerance
    size = sum(weight.nbytes for weight in qwen3.first.values())
    assert [row["weight_sync/bytes"] for row in rows] == [size] * 4


def test_glm_has_the_trainers_logprobs_before_and_after_updates(glm: Served):
    """Of episodes with images over several turns."""
    for seed, method in enumerate(("", "tensor", "disk")):
        if method:
            glm.sync.method = method
            glm.change(seed)
            asyncio.run(glm.push())
        played = glm.episodes(f"after {method}")
        assert any(len(trajectory.turns) > 1 for trajectory in played)
        assert glm.largest_difference(played) < glm.tolerance
        assert versions(played) == {glm.version}
    assert glm.run.engine.retried == glm.run.engine.resent == 0


# Processes


def test_a_server_wants_its_token(qwen2_5: Served):
    """Each server that a run starts has one, and all other tests use it."""
    server = qwen2_5.server
    with pytest.raises(HTTPError, match="401"):
        urlopen(server.url + qwen2_5.run.engine.backend.info.path, timeout=60)
    assert len(server.token) == 64 and server.token not in server.process.launch.log.read_text()
    assert server.token not in Path(f"/proc/{server.process.group}/cmdline").read_text()


def test_a_run_that_is_killed_leaves_no_server(program: Callable[..., Config], qwen3_vl: Path, tmp_path: Path):
    folders = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", BEGIN.format(program=program), str(qwen3_vl), str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        group = int(driver.stdout.readline())
        assert len(processes_of(group)) > 1
        driver.kill()
    assert left_of([group]) == []


# Experts


def chosen_here(experts: Served, sample: Sample) -> np.ndarray:
    """Where the trainer's routers send the tokens of a row by themselves."""
    policy = experts.run.model.policy
    batch = collate([replace(sample, expert_routing=[])], policy.family)
    with torch.no_grad(), policy.routing.recorded() as layers:
        policy(batch)
    return torch.stack(layers, 1).numpy()


def share_alike(experts: Served, sample: Sample, routing: Sequence[ExpertRouting | None]) -> float:
    """The share of the known entries of ``routing`` that are the trainer's."""
    known = np.array([each is not None for each in routing])
    served, ours = indices_from_routing(routing)[known], chosen_here(experts, sample)[known]
    return float((np.sort(served) == np.sort(ours)).mean())


def test_the_experts_of_all_tokens_are_those_of_the_trainers_routers_before_and_after_an_update(experts: Served):
    """Of all turns, which share prefixes."""
    for name in ("before", "after"):
        played = experts.episodes(name)
        assert max(len(trajectory.turns) for trajectory in played) == 3
        for sample in (sample for trajectory in played for sample in (*concat(trajectory), *step_wise(trajectory))):
            assert count_unrecorded_experts([sample]) == 0
            # A rounding difference may decide between two experts.
            assert share_alike(experts, sample, [*sample.expert_routing[:-1], None]) > 0.995
        assert experts.largest_difference(played) < experts.tolerance
        experts.change(1)
        asyncio.run(experts.push())


def test_known_experts_are_not_returned_again(experts: Served):
    request = experts.question("again", 8)
    whole = asyncio.run(experts.run.engine.generate(request))
    assert len(whole.expert_routing) == whole.prompt_tokens + len(whole.token_ids)
    known = whole.prompt_tokens - 3
    request = experts.question("again", 8, routing_from=known)
    rest = asyncio.run(experts.run.engine.generate(request))
    assert len(rest.expert_routing) == 3 + len(rest.token_ids)
    assert rest.expert_routing[:2] == whole.expert_routing[known : known + 2]


# Adapters


def train_adapters(adapted: Served, seed: int) -> None:
    """Change the adapters, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.run.model.policy.model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


async def push_adapters(adapted: Served) -> dict[str, float]:
    version = adapted.version + 1
    async with paused(adapted.run.engine):
        metrics = await adapted.run.serving.push(version)
        adapted.run.engine.weights_changed(version)
    return metrics


def test_adapters_are_sent_separately_and_used_for_sampling(adapted: Served):
    """The base's weights, which the startup parity check sends, are those without adapters."""
    [report] = adapted.reports.values()
    assert report.seen < adapted.tolerance and adapted.run.serving.adapters is not None
    for seed in (1, 2):
        train_adapters(adapted, seed)
        metrics = asyncio.run(push_adapters(adapted))
        played = adapted.episodes(f"adapters-{seed}")
        assert versions(played) == {adapted.version}
        assert adapted.largest_difference(played) < adapted.tolerance
        with adapters_off(adapted.run.model.policy.model):
            assert adapted.largest_difference(played) > 3 * adapted.tolerance  # so the adapters have an effect
    width = 2 if adapted.run.config.model.dtype == "bfloat16" else 4
    size = width * sum(weight.numel() for _, weight in named_adapters(adapted.run.model.policy.model))
    assert size < metrics["weight_sync/bytes"] < 2 * size + 50_000


def test_responses_keep_the_adapter_that_they_began_with(adapted: Served):
    """Also when it is unloaded while they are sampled."""
    requests = [adapted.question(f"kept/{i}", 300) for i in range(8)]

    async def exchange(seed):
        tasks = [asyncio.create_task(adapted.run.engine.generate(request)) for request in requests]
        await adapted.run.engine.generate(adapted.question("short", 8))  # the others have begun by then
        are_sampled = not all(task.done() for task in tasks)
        train_adapters(adapted, seed)
        await push_adapters(adapted)
        return are_sampled, await asyncio.gather(*tasks)

    for seed in range(3, 3 + 2 * TRIES, 2):
        train_adapters(adapted, seed)
        asyncio.run(push_adapters(adapted))
        version, old = adapted.version, adapted.weights()
        are_sampled, responses = asyncio.run(exchange(seed + 1))
        if are_sampled:
            break
    assert are_sampled
    assert all(set(response.policy_versions) == {version} for response in responses)
    adapted.set_weights(old)
    rows = [adapted.row_of(*pair) for pair in zip(requests, responses, strict=True)]
    pairs = zip(adapted.scores(rows), responses, strict=True)
    assert max(np.abs(scores - response.logprobs).max() for scores, response in pairs) < adapted.tolerance
