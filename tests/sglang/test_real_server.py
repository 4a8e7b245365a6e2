"""Rollouts and weight updates with a real server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from testing.real_servers import config_of, served, versions

from vlmrl.multimodal.renderer import expand


def test_server_and_trainer_agree_at_startup(family):
    [report] = family.reports.values()
    assert report.seen < family.tolerance and report.unseen < family.tolerance


def test_episodes_with_images_in_their_observations_are_what_the_trainer_sees(family):
    played = family.episodes("play")
    assert [len(t.turns) for t in played] == [3] * 8
    assert all(len(turn.media) == 1 for t in played for turn in t.turns)
    assert family.largest_difference(played) < family.tolerance


@pytest.mark.parametrize("method", ["tensor", "group", "disk"])
def test_after_an_update_image_features_are_computed_again(family, method):
    family.sync.method = method
    family.episodes(f"{method}-before")
    family.change(seed=len(method))
    asyncio.run(family.push())
    played = family.episodes(f"{method}-after")
    assert versions(played) == {family.version}
    assert family.largest_difference(played) < family.tolerance


def test_all_ways_give_the_same_weights(family):
    family.change(seed=7)
    sums = []
    for family.sync.method in ("tensor", "group", "disk"):
        asyncio.run(family.sync.fill(family.run.serving.host.send))
        asyncio.run(family.push())
        sums.append(family.checksums())
    assert sums[0] == sums[1] == sums[2]


def test_interrupted_replies_continue_with_the_new_weights(family):
    requests = [family.question(f"interrupted/{i}", 300) for i in range(8)]

    async def interrupt(seed):
        tasks = await family.in_flight(requests, tokens=400)  # prompts and some tokens of replies
        family.change(seed)
        await family.push()
        return await asyncio.gather(*tasks)

    for seed in range(11, 16):  # on a busy machine the replies may have ended before the update came
        version, old = family.version, family.weights()
        completions = asyncio.run(interrupt(seed))
        rows = [family.row_of(*pair) for pair in zip(requests, completions, strict=True)]
        sampled_before = [np.array(row.policy_versions) == version for row in rows]
        if any(0 < before.sum() < len(before) for before in sampled_before):
            break
    assert any(0 < before.sum() < len(before) for before in sampled_before)
    new = family.scores(rows)
    family.set_weights(old)
    scores = list(zip(rows, family.scores(rows), new, sampled_before, strict=True))
    assert max(np.abs(a - b).max() for _, a, b, _ in scores) > 0.3  # or the weights would not matter
    differences = [np.abs(np.where(before, a, b) - row.rollout_logprobs).max() for row, a, b, before in scores]
    assert max(differences) < family.tolerance


def test_wrong_counts_are_refused_before_a_request_is_sent(family):
    good, pad, before = family.question("counts", 4), family.run.model.policy.image_token_id, family.requests()
    expanded = expand(good.prompt_ids, pad, good.media)
    for ids, media in (
        (expanded, good.media),
        ([*good.prompt_ids, pad], good.media),
        (good.prompt_ids, [*good.media] * 2),
    ):
        with pytest.raises(ValueError, match="image placeholders"):
            asyncio.run(family.run.engine.generate(replace(good, prompt_ids=ids, media=media)))
    assert family.requests() == before
    asyncio.run(family.run.engine.generate(good))
    assert family.requests() == before + 1


def test_a_matched_stop_string_stays_in_the_reply(family):
    request, decode = family.question("stop", 200), family.run.model.renderer.decode
    stopped = replace(request, sampling=replace(request.sampling, stop=("e", "o", "a")))
    completion = asyncio.run(family.run.engine.generate(stopped))
    assert completion.stop_reason == "stop"
    text, before = decode(completion.token_ids), decode(completion.token_ids[:-1])
    assert any(mark in text for mark in "eoa") and not any(mark in before for mark in "eoa")


def test_cancelled_requests_end_on_the_server(family):
    requests = [family.question(f"aborted/{i}", 440) for i in range(16)]  # not all of them end at once by themselves

    async def give_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.gather(*map(family.run.engine.generate, requests))
        await family.until_idle()

    asyncio.run(give_up())


def test_a_server_that_other_machines_can_reach_wants_its_token(qwen2_5_vl, tmp_path):
    config = config_of(qwen2_5_vl, tmp_path)
    # 127.0.0.1 in a form that is no address to us: a name, which other machines might reach.
    settings = replace(config.sglang, args=config.sglang.args | {"host": "127.1"})
    for [one] in served(replace(config, sglang=settings)):
        token, log = one.server.token, one.server.process.launch.log
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"{one.server.url}/server_info", timeout=60)
        asyncio.run(one.push())
        assert versions(one.episodes("guarded")) == {one.version}
        assert len(token) == 64 and token not in log.read_text()
        assert token not in Path(f"/proc/{one.server.process.group}/cmdline").read_text()
