"""The image-swap check passes where images reach the model, and names the side where they get lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from PIL import Image

from vlmrl.checks.image_swap import ImageSwapError, check_images
from vlmrl.config import Algo, Model, Optim
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.loading import load_model
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Task, Trajectory, Turn


@pytest.fixture
def parts(tiny_folder):
    model = load_model(Model(path=str(tiny_folder), device="cpu"), tiny_folder.parent, seed=0)
    engine = HFEngine(model.policy, model.renderer)
    yield model, engine, model.new_store()
    engine.close()


def trajectory(model, store, images: int) -> Trajectory:
    """The image, if there is one, is shown in the second turn."""
    media = [store.load(Image.new("RGB", (64, 64), "red"))] * images
    shown = [id for item in media for id in [model.policy.image_token_id] * item.num_tokens]
    turns = [
        Turn([1, 2], [], [5, 6], [-1.0, -1.0], [0, 0], "stop", ""),
        Turn([3, *shown, 4], media, [7], [-1.0], [0], "stop", ""),
    ]
    return Trajectory("t", "g", Task("g", []), turns, "env_done", 1.0)


def check(model, engine, store, images: int = 1):
    trainer = Trainer(model.policy, TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=1000))
    shown = [trajectory(model, store, images)]
    return asyncio.run(check_images(trainer.score, engine, store, shown, model.policy.image_token_id))


def test_a_model_that_sees_passes(parts):
    model, engine, store = parts
    image_check = check(model, engine, store)
    assert image_check.trainer > 1e-3 and image_check.engine > 1e-3


def test_text_has_no_image_check(parts):
    model, engine, store = parts
    assert check(model, engine, store, 0) is None


def test_a_blind_trainer_is_found(parts, monkeypatch):
    model, engine, store = parts
    encode = model.policy.encode_images
    black = lambda item: replace(item, pixels=ArrayPixels(item.pixels.read() * 0))  # noqa: E731
    blind = lambda images: encode([black(item) for item in images])  # noqa: E731
    monkeypatch.setattr(model.policy, "encode_images", blind)
    with pytest.raises(ImageSwapError, match=r"trajectory t, image 0 \(.*the trainer's logprobs changed by 0 nats"):
        check(model, engine, store)


def test_an_engine_that_drops_pixels_on_the_wire_is_found(parts):
    model, engine, store = parts
    first = store.load(Image.new("RGB", (64, 64), "green"))

    class Lossy:
        policy_version = 0

        async def generate(self, request):
            return await engine.generate(replace(request, media=[first] * len(request.media)))

        def release(self, trajectory_id):
            engine.release(trajectory_id)

        async def pause(self):
            await engine.pause()

        async def resume(self):
            await engine.resume()

    with pytest.raises(ImageSwapError, match="the engine's logprobs changed by"):
        check(model, Lossy(), store)
