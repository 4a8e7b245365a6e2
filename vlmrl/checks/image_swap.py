"""The image-swap check (``train.image_check``): before training, swap one image; the logprobs must change in trainer and engine.

A run that loses its pixels does not fail: only its reward is lower. This check finds the error within a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from vlmrl.engine.base import Engine, EngineError, Request, SamplingParams, paused
from vlmrl.multimodal.placeholders import collapse, image_spans
from vlmrl.multimodal.store import MediaStore
from vlmrl.samples import step_wise
from vlmrl.types import MediaItem, Sample, Trajectory

MIN_CHANGE = 1e-5  # nats; far above the effect of batching, far below the effect of an image
TOKENS = 4  # sampled by the engine after each of the two images

Score = Callable[[Sequence[Sample]], list[np.ndarray]]
"""The current logprobs of each sample's response tokens, as :meth:`vlmrl.train.trainer.Trainer.score` returns them."""


class ImageSwapError(RuntimeError):
    """Images do not reach the model."""


@dataclass(frozen=True)
class ImageSwap:
    """The largest change of a logprob, in nats, when noise replaces one image."""

    trainer: float
    engine: float


async def check_images(
    score: Score,
    engine: Engine,
    store: MediaStore,
    trajectories: Sequence[Trajectory],
    image_token_id: int | None,
    timeout: float = 600.0,
) -> ImageSwap | None:
    """Swap the first image of the trajectories; ``None`` if they have none.

    ``score`` is the trainer's, ``image_token_id`` the model's image placeholder. ``timeout``: seconds for one response of the engine.

    Raises:
        ImageSwapError: no logprob changes.
        EngineError: the engine does not answer in time.
    """
    row = next((row for trajectory in trajectories for row in step_wise(trajectory) if row.media), None)
    if row is None:
        return None
    assert image_token_id is not None  # or there were no images
    row = from_first_image(row, image_token_id)
    swapped = replace(row, media=[await store.get(noise(row.media[0])), *row.media[1:]])
    engine_change = await _engine_change(engine, row, swapped, image_token_id, timeout)
    async with paused(engine):  # it may share the weights that score uses
        change = ImageSwap(largest_change(score, row, swapped), engine_change)
    for side, nats in vars(change).items():
        if nats <= MIN_CHANGE:
            raise ImageSwapError(
                f"trajectory {row.trajectory_id}, image 0 ({row.media[0].id}): with noise in its place the {side}'s logprobs changed "
                f"by {nats:.2g} nats, where more than {MIN_CHANGE:g} was expected. Images do not reach the model there, so training "
                "would be blind. (--train.no-image-check skips this check.)"
            )
    return change


def from_first_image(row: Sample, image_token_id: int) -> Sample:
    """The same tokens with all text after the first image as the response.

    A trained response may have a probability so close to 1 that no image changes it, so prompt text is scored as well.
    """
    ids = row.token_ids
    cut = image_spans(ids, image_token_id, row.media[:1])[0][1] + 1  # one token of text stays in the prompt
    size = len(ids) - cut
    return replace(
        row,
        prompt_token_ids=ids[:cut],
        response_ids=ids[cut:],
        loss_mask=[int(id != image_token_id) for id in ids[cut:]],
        rollout_logprobs=[0.0] * size,
        rewards={},
        policy_versions=[0] * size,
    )


def noise(item: MediaItem) -> Image.Image:
    """An image of the item's size that shows nothing."""
    width, height = item.size
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def largest_change(score: Score, row: Sample, swapped: Sample) -> float:
    """Of a logprob, in nats."""
    kept, other = score([row, swapped])
    return float(np.abs(kept - other).max())


async def _engine_change(engine: Engine, row: Sample, swapped: Sample, image_token_id: int, timeout: float) -> float:
    """The largest difference of logprobs between greedy continuations of the two images; infinite if their tokens differ."""
    responses = []
    for name, each in (("kept", row), ("swapped", swapped)):
        shown = each.media[:1]
        ids = collapse(each.prompt_token_ids, image_token_id, shown)
        request = Request(f"image-check/{name}", ids, shown, SamplingParams(TOKENS, temperature=0))
        try:
            async with asyncio.timeout(timeout):
                responses.append(await engine.generate(request))
        except TimeoutError:
            raise EngineError(f"image-swap check: no response in rollout.engine_timeout ({timeout:g} s).") from None
        engine.release(request.trajectory_id)
    kept, other = responses
    if kept.token_ids != other.token_ids:
        return float("inf")
    return max(abs(a - b) for a, b in zip(kept.logprobs, other.logprobs, strict=True))
