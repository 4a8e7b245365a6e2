"""SmolVLM on a real vLLM server: tiles and the marks between them, as the trainer has them, also after a weight update."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from testing.real_servers import served, versions
from testing.server_cases import push_adapters, train_adapters
from testing.vllm_servers import vllm_config

from vlmrl.config import Lora
from vlmrl.model import tiny
from vlmrl.multimodal.placeholders import image_ids


def config_of(folder, **settings):
    """A tiny SmolVLM in float32."""
    config = vllm_config(tiny.build(folder / "smolvlm", "smolvlm"), folder)
    return replace(config, model=replace(config.model, **settings))


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    for [one] in served(config_of(tmp_path_factory.mktemp("smolvlm"))):
        yield one


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """One that is trained by adapters."""
    for [one] in served(config_of(tmp_path_factory.mktemp("adapted"), lora=Lora(rank=4, alpha=8))):
        yield one


def test_server_and_trainer_agree_about_tiles_at_startup(smolvlm):
    [report] = smolvlm.reports.values()
    assert report.seen < smolvlm.tolerance and report.unseen < smolvlm.tolerance


def test_images_over_several_turns_are_what_the_trainer_sees_also_after_an_update(smolvlm):
    """Other ids at the server, or images of other sizes, would move every later logprob."""
    before = smolvlm.episodes("before")
    media = [item for trajectory in before for turn in trajectory.turns for item in turn.media]
    assert [len(trajectory.turns) for trajectory in before] == [3] * 8 and len(media) == 24
    pad = smolvlm.run.model.policy.image_token_id
    assert all(len(item.separators) > 2 and len(image_ids(item, pad)) == item.num_tokens for item in media)
    assert smolvlm.largest_difference(before) < smolvlm.tolerance
    smolvlm.change(seed=5)
    assert smolvlm.largest_difference(before) > 10 * smolvlm.tolerance  # so the next comparison can fail
    asyncio.run(smolvlm.push())
    after = smolvlm.episodes("after")
    assert versions(after) == {smolvlm.version}
    assert smolvlm.largest_difference(after) < smolvlm.tolerance


def test_adapters_of_the_decoder_are_loaded_while_it_serves(adapted):
    assert adapted.run.serving.adapters is not None
    before = adapted.episodes("before")
    train_adapters(adapted, 1)
    assert adapted.largest_difference(before) > 10 * adapted.tolerance
    asyncio.run(push_adapters(adapted))
    after = adapted.episodes("after")
    assert versions(after) == {adapted.version}
    assert adapted.largest_difference(after) < adapted.tolerance
