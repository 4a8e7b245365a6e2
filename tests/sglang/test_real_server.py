"""Rollouts and weight updates with a real server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlmrl.engine.base import Request, SamplingParams, paused
from vlmrl.renderer import expand
from vlmrl.samples import audit, concat
from vlmrl.serving import _score
from vlmrl.types import Sample

GAP = 0.03  # nats, between a server in bfloat16 and the trainer


def episodes(run, label, count=2):
    """So many groups, played and audited."""
    rollouts = asyncio.run(run.runner().play((run.tasks[i] for i in range(count)), count, label))
    played = rollouts.trajectories
    policy = run.model.policy
    audit(
        [s for t in played for s in concat(t)],
        played,
        image_token_id=policy.image_token_id,
        banned_ids=policy.banned_ids,
    )
    return played


def gap(run, played):
    """The largest difference between the server's logprobs and the trainer's."""
    rows = [sample for trajectory in played for sample in concat(trajectory)]
    scores = _score(run.model.policy, rows, 1.0)
    masks = [np.array(row.loss_mask, bool) for row in rows]
    return max(
        np.abs(ours[mask] - np.array(row.rollout_logprobs)[mask]).max()
        for ours, row, mask in zip(scores, rows, masks, strict=True)
    )


def change(run, seed):
    """Other weights in all parts of the model: its first ones, each a third larger or smaller or so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in run.model.policy.model.named_parameters():
            noise = 1 + 0.3 * torch.randn(weight.shape, generator=generator)
            weight.copy_(run.first_weights[name] * noise.to(weight.dtype))


def weights_of(run):
    return {name: weight.detach().clone() for name, weight in run.model.policy.model.named_parameters()}


def set_weights(run, weights):
    with torch.no_grad():
        for name, weight in run.model.policy.model.named_parameters():
            weight.copy_(weights[name])


def test_server_and_trainer_agree_before_anything_is_played(run):
    [hands] = run.hands.values()
    assert hands.seen < GAP and hands.unseen < GAP


def test_episodes_with_pictures_in_their_observations_are_what_the_trainer_sees(run):
    played = episodes(run, "play")
    assert [len(t.turns) for t in played] == [3] * 8
    assert all(len(turn.media) == 1 for t in played for turn in t.turns)
    assert gap(run, played) < GAP


@pytest.mark.parametrize("method", ["tensor", "group", "disk"])
def test_after_an_update_pictures_seen_before_are_seen_anew(run, method):
    run.serving.sync.method = method
    episodes(run, f"{method}-before")
    change(run, seed=len(method))
    version = run.engine.policy_version + 1

    async def push():
        async with paused(run.engine):
            await run.serving.sync.push(run.serving._send, version)
            run.engine.weights_changed(version)

    asyncio.run(push())
    played = episodes(run, f"{method}-after")
    assert {v for t in played for turn in t.turns for v in turn.policy_versions} == {version}
    assert gap(run, played) < GAP


def test_all_ways_give_the_same_weights(run):
    change(run, seed=7)
    sums, sync = [], run.serving.sync
    for sync.method in ("tensor", "group", "disk"):
        asyncio.run(sync.fill(run.serving._send))
        asyncio.run(sync.push(run.serving._send, run.engine.policy_version))
        sums += asyncio.run(sync.checksums()).values()
    assert sums[0] == sums[1] == sums[2]


def test_turns_that_an_update_interrupts_go_on_under_the_new_weights(run):
    version, old = run.engine.policy_version, weights_of(run)
    requests = [question(run, f"interrupted/{i}", 300) for i in range(8)]

    async def interrupt():
        asked = [asyncio.create_task(run.engine.generate(request)) for request in requests]
        await until(run, lambda told: told["num_used_tokens"] > 400)  # prompts and some tokens of replies
        async with paused(run.engine):
            change(run, seed=11)
            await run.serving.sync.push(run.serving._send, version + 1)
            run.engine.weights_changed(version + 1)
        return await asyncio.gather(*asked)

    completions = asyncio.run(interrupt())
    rows = [row_of(run, *pair) for pair in zip(requests, completions, strict=True)]
    sampled_before = [np.array(row.policy_versions) == version for row in rows]
    assert any(0 < before.sum() < len(before) for before in sampled_before)
    new = _score(run.model.policy, rows, 1.0)
    set_weights(run, old)
    scores = zip(rows, _score(run.model.policy, rows, 1.0), new, sampled_before, strict=True)
    gaps = [np.abs(np.where(before, a, b) - row.rollout_logprobs).max() for row, a, b, before in scores]
    assert max(gaps) < GAP
    moved = max(np.abs(a - b).max() for a, b in zip(_score(run.model.policy, rows, 1.0), new, strict=True))
    assert moved > 10 * GAP  # or the weights would not matter


def test_wrong_counts_are_refused_before_a_request_is_sent(run):
    good = question(run, "counts", 4)
    pad, log = run.model.policy.image_token_id, run.engine.servers.all[0].launch.log
    expanded = expand(good.prompt_ids, pad, good.media)
    before = log.read_text().count("POST /generate")
    for ids, media in (
        (expanded, good.media),
        ([*good.prompt_ids, pad], good.media),
        (good.prompt_ids, [*good.media] * 2),
    ):
        with pytest.raises(ValueError, match="picture placeholders"):
            asyncio.run(run.engine.generate(replace(good, prompt_ids=ids, media=media)))
    assert log.read_text().count("POST /generate") == before
    asyncio.run(run.engine.generate(good))
    assert log.read_text().count("POST /generate") == before + 1


def test_a_matched_stop_string_stays_in_the_reply(run):
    request = question(run, "stop", 200)
    stopped = replace(request, sampling=replace(request.sampling, stop=("e", "o", "a")))
    completion = asyncio.run(run.engine.generate(stopped))
    text = run.model.renderer.decode(completion.token_ids)
    assert completion.stop_reason == "stop"
    before = run.model.renderer.decode(completion.token_ids[:-1])
    assert any(mark in text for mark in "eoa") and not any(mark in before for mark in "eoa")


def test_what_is_given_up_here_ends_there(run):
    async def give_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await run.engine.generate(question(run, "aborted", 440))
        await until(run, lambda told: told["num_running_reqs"] + told["num_waiting_reqs"] == 0)

    asyncio.run(give_up())


async def until(run, true):
    """Wait for the server's load to be as asked."""
    server = run.engine.servers.all[0]
    async with asyncio.timeout(60):
        while True:
            told = await run.engine.thread.run(run.engine.servers.call(server, "/v1/loads"))
            if true(told["loads"][0]):
                return
            await asyncio.sleep(0.1)


def question(run, name, tokens):
    """About a picture, whatever the answer."""
    rendered = run.model.renderer.prompt(run.tasks[0].prompt)
    media = [run.store.load(image) for image in rendered.images]
    return Request(name, rendered.token_ids, media, SamplingParams(tokens))


def row_of(run, request, completion):
    size = len(completion.token_ids)
    prompt = expand(request.prompt_ids, run.model.policy.image_token_id, request.media)
    lists = (prompt, completion.token_ids, [1] * size, completion.logprobs, [0.0] * size, completion.policy_versions)
    return Sample(*lists, "g", "t", True, completion.stop_reason, list(request.media))
