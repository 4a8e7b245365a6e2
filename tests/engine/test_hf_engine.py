"""The embedded engine against the trainer's forward, against Hugging Face's own generate, and against itself."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from testing.episodes import COLORS, END, a_task, image, sharp_model, sharpen
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlmrl import Env, obs
from vlmrl.config import Rollout
from vlmrl.engine.base import EngineError, Request, SamplingParams, paused
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.hf.features import ImageFeatureCache
from vlmrl.env.base import resolve_env
from vlmrl.families import FAMILIES
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel
from vlmrl.model.policy import Policy
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import audit, concat
from vlmrl.train.packing import collate
from vlmrl.types import Completion, Sample, Trajectory

MOST = ["qwen3_vl", "qwen2_5_vl"]
VISION = [name for name, family in FAMILIES.items() if family.vision]
NUCLEUS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny.build(root / family, family) for family in VISION}


@pytest.fixture(scope="module", params=MOST)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> LoadedModel:
    return sharp_model(folders[request.param])


@pytest.fixture(scope="module", params=VISION)
def any_model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> LoadedModel:
    return sharp_model(folders[request.param], end=6.0)


@pytest.fixture(scope="module")
def qwen3(folders: dict[str, Path]) -> LoadedModel:
    return sharp_model(folders["qwen3_vl"])


@pytest.fixture(scope="module", params=MOST)
def wordy(request: pytest.FixtureRequest, folders: dict[str, Path]) -> LoadedModel:
    """One that never ends its turn."""
    return sharp_model(folders[request.param], end=-50.0)


@pytest.fixture
def mine(qwen3: LoadedModel) -> LoadedModel:
    """A Qwen3-VL that a test may change."""
    return replace(qwen3, policy=qwen3.policy.frozen_copy())


def store_of(model: LoadedModel) -> MediaStore:
    store = model.new_store()
    assert store is not None
    return store


def a_request(model: LoadedModel, text: str, colors: Sequence[str] = (), id: str = "a", **sampling: Any) -> Request:
    """A first turn with an image for each color; each color has a size of its own unless it is written with one."""
    sizes = {color: (32 + 28 * index, 64) for index, color in enumerate(COLORS)}
    images = [image(color.split()[0], sizes.get(color, (64, 64))) for color in colors]
    rendered = model.renderer.prompt(a_task(text, images).prompt)
    store = store_of(model)
    options = SamplingParams(**({"max_tokens": 24, "seed": 5} | sampling))
    return Request(id, rendered.token_ids, [store.load(image) for image in rendered.images], options)


def go_on(request: Request, response: Completion, more: Request) -> Request:
    """The next turn of ``request``'s trajectory: its response, and the message of ``more`` as it stands."""
    return replace(
        more,
        trajectory_id=request.trajectory_id,
        prompt_ids=[*request.prompt_ids, *response.token_ids, *more.prompt_ids],
        media=[*request.media, *more.media],
    )


def ask(engine: HFEngine, *requests: Request) -> list[Completion]:
    return asyncio.run(asyncio.wait_for(engine.generate_batch(requests), 900))


def alone(model: LoadedModel, request: Request) -> Completion:
    """The response of a fresh engine that serves nothing else."""
    engine = HFEngine(model.policy, model.renderer)
    try:
        return ask(engine, request)[0]
    finally:
        engine.close()


def same(one: Completion, other: Completion, tolerance: float = 5e-5) -> bool:
    """Sharp models have logits of tens, whose float32 sums differ by up to 2e-5 with the order of a batch's rows."""
    return one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


class Gallery(Env):
    """Four turns, each but the first with a new image, at a place and of a size that the seed says."""

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        number = self.seed + self.turn
        shown = image(COLORS[number % 8], (32 * (1 + number % 4), 32 * (1 + self.turn)))
        return obs("More " * number, images=[shown] if self.turn != 1 else None), self.turn == 3, {"reward": 1.0}


def play(
    model: LoadedModel, engine: HFEngine, env: type[Env] = Gallery, members: int = 2, **rollout: Any
) -> list[Trajectory]:
    """Two groups; all episodes have several turns, with the images in their middle."""
    limits = {"max_turns": 4, "max_tokens": 2000, "max_response_tokens": 120, "truncated_reward": 0.0} | rollout
    loop = TurnLoop(resolve_env(env), engine, model.renderer, store_of(model), Rollout(**limits), seed=1)
    tasks = [a_task("What?", [image("white", (64, 96))] * seed, seed=seed) for seed in (0, 1)]
    return asyncio.run(Runner(loop, group_size=members).play(iter(tasks), 2, "step")).trajectories


def trained(policy: Policy, samples: list[Sample], temperature: float = 1.0) -> list[list[float]]:
    """What the trainer's forward says of each row's sampled tokens."""
    with torch.no_grad():
        scores = policy(collate(samples, policy.family), temperature).logprobs
    return [
        [scores[row, len(sample.prompt_token_ids) + i].item() for i, mask in enumerate(sample.loss_mask) if mask]
        for row, sample in enumerate(samples)
    ]


def sampled(samples: list[Sample]) -> list[list[float]]:
    return [[x for x, mask in zip(s.rollout_logprobs, s.loss_mask, strict=True) if mask] for s in samples]


def largest_difference(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


# The trainer's forward


def test_logprobs_are_those_of_the_trainers_forward(any_model: LoadedModel):
    """With a temperature, top-p and top-k; `tests/model/test_family_runs.py` compares them without."""
    model = any_model
    engine = HFEngine(model.policy, model.renderer)
    trajectories = play(model, engine, **NUCLEUS)
    samples = [sample for trajectory in trajectories for sample in concat(trajectory)]
    audit(samples, trajectories, image_token_id=model.policy.image_token_id, banned_ids=model.policy.banned_ids)
    assert [len(t.turns) for t in trajectories][1:] == [4] * 3  # noise may run into a limit, and one does
    assert [len(s.media) for s in samples][1:] == [2, 3, 3]
    temperature = NUCLEUS["temperature"]
    assert largest_difference(sampled(samples), trained(model.policy, samples, temperature)) < 1e-4
    # The temperature is in them, and top-p and top-k are not.
    assert largest_difference(sampled(samples), trained(model.policy, samples, 1.0)) > 0.1

    first, last = samples[2], samples[2].media[-1]
    other = store_of(model).load(image("purple", last.size))
    swapped = replace(first, media=[*first.media[:-1], other])
    assert largest_difference(sampled([first]), trained(model.policy, [swapped], temperature)) > 0.01  # the image check


# What is kept from turn to turn


@pytest.mark.parametrize("model", [*MOST, "qwen3_5"], indirect=True)
def test_keys_and_values_kept_between_turns_change_nothing_but_the_work(model: LoadedModel):
    keeping, forgetting = (HFEngine(model.policy, model.renderer, keep_kv=keep) for keep in (True, False))
    kept, fresh = play(model, keeping), play(model, forgetting)
    for one, other in zip(kept, fresh, strict=True):
        assert [turn.response_ids for turn in one.turns] == [turn.response_ids for turn in other.turns]
        for mine, theirs in zip(one.turns, other.turns, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    new = sum(len(turn.prompt_ids) for t in kept for turn in t.turns)
    # A response's last token is fed with the next turn. Members of a group whose first requests meet in a batch share that prompt.
    assert keeping.tokens_prefilled <= new + sum(len(t.turns) - 1 for t in kept)
    assert forgetting.tokens_prefilled > 1.5 * new
    assert keeping.images_encoded == forgetting.images_encoded
    assert len(keeping._resources.prefixes) == 0  # all trajectories were released


def test_a_trajectory_goes_on_after_a_stop_string(qwen3: LoadedModel):
    engine = HFEngine(qwen3.policy, qwen3.renderer)
    first = a_request(qwen3, "What?", ["red"], stop=("e", "a", "r", "o", "i"), max_tokens=200, seed=3)
    (response,) = ask(engine, first)
    assert response.stop_reason == "stop"
    assert response.token_ids[-1] != qwen3.renderer.end_of_turn_id
    second = go_on(first, response, a_request(qwen3, "More.", ["green"]))
    done = engine.tokens_prefilled
    assert same(ask(engine, second)[0], alone(qwen3, second))
    assert engine.tokens_prefilled - done == 1 + alone(qwen3, a_request(qwen3, "More.", ["green"])).prompt_tokens


def test_the_same_prompt_again_is_answered_as_the_first_time(qwen3: LoadedModel):
    """An env's RetryTurn after an empty response: all of the prompt is kept, and nothing is new."""
    engine = HFEngine(qwen3.policy, qwen3.renderer)
    with_end = SamplingParams(24, stop=("",), seed=5)  # the empty string stops after one token
    first = replace(a_request(qwen3, "What?", ["red"]), sampling=with_end)
    assert len(ask(engine, first)[0].token_ids) == 1
    other = a_request(qwen3, "Which one is it?", ["blue"], id="b")
    again, beside = ask(engine, replace(first, sampling=SamplingParams(24, seed=6)), other)
    assert same(again, alone(qwen3, replace(first, sampling=SamplingParams(24, seed=6))))
    assert same(beside, alone(qwen3, other))


def test_another_image_under_the_same_ids_is_looked_at(qwen3: LoadedModel):
    engine = HFEngine(qwen3.policy, qwen3.renderer)
    red, blue = (a_request(qwen3, "What?", [f"{color} 64"]) for color in ("red", "blue"))
    assert red.prompt_ids == blue.prompt_ids
    (response,) = ask(engine, replace(red, sampling=SamplingParams(200, seed=5)))
    assert response.stop_reason == "stop"
    more = a_request(qwen3, "More.")
    (first,) = ask(engine, go_on(blue, response, more))
    assert same(first, alone(qwen3, go_on(blue, response, more)))
    assert not same(first, alone(qwen3, go_on(red, response, more)), 1e-3)


# Batches


@pytest.mark.parametrize("any_model", ["qwen2_5_vl", "qwen3_5", "smolvlm"], indirect=True)
def test_the_rest_of_the_batch_does_not_matter(any_model: LoadedModel):
    model = any_model
    engine = HFEngine(model.policy, model.renderer)
    texts = ["What?", "Which one of these is it, left or right?", "Go.", "The color of the square, " * 4]
    shown: list[list[str]] = [[], ["red"], ["blue", "green"], ["white", "white"]]
    pairs = list(itertools.product(texts, shown))
    requests = [
        a_request(
            model,
            text,
            colors,
            id=f"{number:02d}",
            seed=number,
            max_tokens=10 + number,
            **(NUCLEUS if number % 3 else {}),
        )
        for number, (text, colors) in enumerate(pairs)
    ]
    together = ask(engine, *requests)
    assert len({len(response.token_ids) for response in together}) > 3  # rows left the batch at different times
    for request, response in zip(requests, together, strict=True):
        assert same(response, alone(model, request)), request.trajectory_id
    small = HFEngine(model.policy, model.renderer, prefill_tokens=60)
    assert all(same(one, other) for one, other in zip(ask(small, *requests), together, strict=True))


def test_equal_prompts_are_prefilled_once_and_their_image_encoded_once(wordy: LoadedModel):
    engine = HFEngine(wordy.policy, wordy.renderer)
    request = a_request(wordy, "What?", ["red", "green"])
    group = [replace(request, trajectory_id=str(seed), sampling=SamplingParams(24, seed=seed)) for seed in range(8)]
    responses = ask(engine, *group)
    assert engine.tokens_prefilled == responses[0].prompt_tokens
    assert responses[0].prompt_tokens == len(request.prompt_ids) - 2 + sum(item.num_tokens for item in request.media)
    assert engine.images_encoded == 2
    assert len({tuple(response.token_ids) for response in responses}) == 8
    for request, response in zip(group, responses, strict=True):
        assert same(response, alone(wordy, request))


def test_prompts_that_differ_in_the_image_alone_are_not_shared(qwen3: LoadedModel):
    engine = HFEngine(qwen3.policy, qwen3.renderer)
    red, blue = (a_request(qwen3, "What?", [f"{color} 64"], id=color) for color in ("red", "blue"))
    responses = ask(engine, red, blue)
    assert engine.tokens_prefilled == 2 * responses[0].prompt_tokens
    assert same(responses[0], alone(qwen3, red))
    assert same(responses[1], alone(qwen3, blue))
    assert not same(*responses, 1e-3)


# New weights


def test_a_pause_drops_image_features_whose_memory_the_trainer_needs(mine: LoadedModel):
    engine = HFEngine(mine.policy, mine.renderer)
    request = a_request(mine, "What?", ["red"])
    [first] = ask(engine, request)
    asyncio.run(asyncio.wait_for(pause_and_resume(engine), 600))
    [second] = ask(engine, replace(request, trajectory_id="b"))
    assert same(second, first)
    assert engine.images_encoded == 2
    engine.close()


async def pause_and_resume(engine: HFEngine) -> None:
    async with paused(engine):
        pass


def test_features_that_were_encoded_while_the_weights_changed_are_not_used(
    mine: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """Trap 19: an update between an image's encoding and its being stored."""
    engine = HFEngine(mine.policy, mine.renderer)
    request, encode = a_request(mine, "What?", ["red"]), mine.policy.encode_images

    def changes_meanwhile(images: Any) -> Any:
        features = encode(images)
        if engine.policy_version == 0:
            engine.weights_changed(1)
        return features

    monkeypatch.setattr(mine.policy, "encode_images", changes_meanwhile)
    ask(engine, request)
    ask(engine, replace(request, trajectory_id="b"))
    assert engine.images_encoded == 2


def test_features_live_as_long_as_their_images_and_are_encoded_in_parts(
    qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    encode, parts = qwen3.policy.encode_images, []

    def counted(images: Any) -> Any:
        parts.append(len(images))
        return encode(images)

    monkeypatch.setattr(qwen3.policy, "encode_images", counted)
    features = ImageFeatureCache(qwen3.policy, budget=9)
    store = store_of(qwen3)
    items = [store.load(image(color, (64, 64))) for color in COLORS[:5]]  # 4 visual tokens each
    found = features.of([*items, items[0]])
    assert parts == [2, 2, 1] and features.encoded == len(features) == 5
    whole = encode(items)
    for item, expected in zip(items, whole, strict=True):
        assert torch.allclose(found[item.id].embeds, expected.embeds, atol=1e-5)
    del items[1:], item
    assert len(features) == 1
    features.of(items)
    assert features.encoded == 5
    features.clear()
    features.of(items)
    assert features.encoded == 6


# What may be sampled


@pytest.mark.parametrize("colors", [[], ["blue", "purple", "green"]])
def test_greedy_is_what_hugging_face_generates(wordy: LoadedModel, folders: dict[str, Path], colors: list[str]):
    """An independent check of positions, images and cache: their generate on their processor's inputs."""
    folder = folders[wordy.policy.config.model_type]
    request = replace(a_request(wordy, "What is it?", colors), sampling=SamplingParams(30, temperature=0.0))
    (ours,) = ask(HFEngine(wordy.policy, wordy.renderer), request)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
    sharpen(theirs, end=-50.0)
    images = [item.image for item in request.media]
    text = wordy.renderer.decode(request.prompt_ids)
    inputs = AutoProcessor.from_pretrained(folder)(text=[text], images=images or None, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == ours.prompt_tokens
    if images:
        policy = wordy.policy
        made_by_us = merge_mm_inputs(request.media, policy.family, policy.image_processor, policy.device)
        assert torch.equal(inputs["pixel_values"], made_by_us["pixel_values"])
    made = theirs.generate(**inputs, max_new_tokens=30, do_sample=False, suppress_tokens=wordy.policy.banned_ids)
    assert ours.token_ids == made[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(ours.token_ids) > 20


# Endings


def say(engine: HFEngine, text: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the policy say the bytes of ``text`` one token a byte, and then end its turn."""
    letters = engine._resources.renderer.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ids = [
        engine._resources.renderer.tokenizer.convert_tokens_to_ids(letter) for piece, _ in letters for letter in piece
    ]
    coming = iter([*ids, engine._resources.renderer.end_of_turn_id])

    def logits(hidden: torch.Tensor, temperature: Any) -> torch.Tensor:
        forced = torch.full((len(hidden), 512), -50.0)
        forced[:, next(coming)] = 50.0
        return forced

    monkeypatch.setattr(engine.policy, "logits", logits)
    return ids


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("</call>",), "ab</call>"),  # each letter is a token of its own
        (("zz", "call>"), "ab</call>"),
        (("b<",), "ab<"),
        (("a",), "a"),
        (("日本語です",), "aé日本語です"),  # 15 tokens for 5 characters
        (("never",), f"ab</call>日本語です and more{END}"),
        ((), f"ab</call>日本語です and more{END}"),
    ],
)
def test_a_stop_string_ends_the_response_and_stays_in_it(
    mine: LoadedModel, monkeypatch: pytest.MonkeyPatch, stops: tuple[str, ...], text: str
):
    engine = HFEngine(mine.policy, mine.renderer)
    script = {"a": "ab</call>日本語です and more"}.get(text[:1]) if "é" not in text else "aé日本語です and more"
    assert script is not None
    say(engine, script, monkeypatch)
    (response,) = ask(engine, a_request(mine, "What?", max_tokens=200, stop=stops))
    assert mine.renderer.decode(response.token_ids) == text
    assert response.stop_reason == "stop"
    assert len(response.logprobs) == len(response.policy_versions) == len(response.token_ids)
    assert response.logprobs == pytest.approx([0.0] * len(response.token_ids), abs=1e-5)


# What goes wrong


def test_a_forward_that_leaves_its_thread_fails_its_requests_and_the_engine_answers_the_next(
    mine: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    engine = HFEngine(mine.policy, mine.renderer)
    request = a_request(mine, "What?", ["red"])
    with monkeypatch.context() as patched:
        patched.setattr(mine.policy, "hidden", lambda *args, **options: sys.exit("a library gave up"))
        with pytest.raises(EngineError, match="the embedded engine failed: SystemExit: a library gave up"):
            asyncio.run(asyncio.wait_for(engine.generate(request), 900))
    assert same(*ask(engine, request), alone(mine, request))
    engine.close()


def test_an_engine_that_was_dropped_without_close_is_freed_with_its_model(folders):
    loaded = sharp_model(folders["qwen3_vl"])
    engine = HFEngine(loaded.policy, loaded.renderer)
    ask(engine, a_request(loaded, "What?", ["red"]))
    thread, dropped = engine._thread, [weakref.ref(engine), weakref.ref(loaded.policy.model)]
    del engine, loaded
    for _ in range(600):  # its thread may still be in the last call
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            break
    gc.collect()
    assert [reference() for reference in dropped] == [None, None]
