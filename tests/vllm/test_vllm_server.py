"""Rollouts with a real vLLM server, and what its startup checks find."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from testing.engine_drivers import sharpened
from testing.server_cases import (  # noqa: F401
    test_a_run_samples_from_the_trained_weights_also_after_a_resume,
    test_a_run_that_is_killed_leaves_no_server,
    test_a_server_gets_the_random_weights_of_the_trainer,
    test_a_server_is_a_teacher,
    test_a_server_wants_its_token,
    test_after_an_update_in_bfloat16_images_seen_before_have_new_features,
    test_all_ways_give_the_same_weights,
    test_episodes_with_images_in_their_observations_are_what_the_trainer_sees,
    test_server_and_trainer_agree_at_startup,
)

from vlmrl.checks.server_parity import ParityError, check_parity, parity_questions
from vlmrl.engine.vllm.receiver import VLLMReceiver


@pytest.mark.parametrize("images", ["file", "inline"])
def test_images_come_as_files_and_as_data(qwen3, monkeypatch, images):
    """The engine writes files; without them it sends data. Both are the pixels that the trainer has."""
    if images == "inline":
        monkeypatch.setattr(qwen3.run.engine._images, "_folder", None)
    played = qwen3.episodes(images, groups=1)
    assert qwen3.largest_difference(played) < qwen3.tolerance


def parity(one):
    run = one.run
    questions = asyncio.run(parity_questions(run.model.renderer, run.store, run.config.rollout))
    score = partial(run.serving.trainer.logprobs, temperature=1.0)
    check = check_parity(one.sync, run.serving.send, score, questions, same_weights=False, timeout=120)
    return asyncio.run(check)


def test_a_server_that_keeps_image_features_over_an_update_is_refused(qwen3, monkeypatch):
    post = VLLMReceiver.post

    def keeps(self, path, body, timeout=None):
        return b"{}" if path == "/reset_encoder_cache" else post(self, path, body, timeout)

    qwen3.set_weights(sharpened(qwen3.first))  # with others, an image hardly matters
    # The server forgets the features of the check at its start, which are of the right weights.
    asyncio.run(qwen3.push())
    monkeypatch.setattr(VLLMReceiver, "post", keeps)
    with pytest.raises(ParityError, match="keeps image features over a weight update"):
        parity(qwen3)
    monkeypatch.undo()
    [report] = parity(qwen3).values()
    assert report.seen < qwen3.tolerance and report.unseen < qwen3.tolerance
    qwen3.set_weights(qwen3.first)
