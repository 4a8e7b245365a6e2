"""The canary: before training starts, one image is swapped, and logprobs must move, in the trainer and in the engine.

Pixels that get lost on their way leave everything running and the reward falling; this finds it in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from vlmrl.engine.base import Engine, Request, SamplingParams, paused
from vlmrl.multimodal.renderer import collapse, image_spans
from vlmrl.multimodal.store import MediaStore
from vlmrl.samples import step_wise
from vlmrl.types import MediaItem, Sample, Trajectory

MOVES = 1e-5  # nats; far above what batching changes, far below what an image does
TOKENS = 4  # that the engine is asked for

Score = Callable[[Sequence[Sample]], list[np.ndarray]]
"""The current logprobs of each sample's response tokens, as :meth:`vlmrl.train.trainer.Trainer.score` gives them."""


class CanaryError(RuntimeError):
    """Images do not reach the model."""


@dataclass(frozen=True)
class Canary:
    """The largest change of a logprob, in nats, when one image is another one."""

    trainer: float
    engine: float


async def check_images(
    score: Score, engine: Engine, store: MediaStore, trajectories: Sequence[Trajectory], image_token_id: int | None
) -> Canary | None:
    """Swap the first image there is; ``None`` where no trajectory has one. Raises CanaryError where nothing moves.

    ``score`` is the trainer's, ``image_token_id`` the model's image placeholder.
    """
    row = next((row for trajectory in trajectories for row in step_wise(trajectory) if row.media), None)
    if row is None:
        return None
    assert image_token_id is not None  # or there were no images
    row = _from_first_image(row, image_token_id)
    swapped = replace(row, media=[await store.get(_noise(row.media[0])), *row.media[1:]])
    engine_moved = await _engine_moves(engine, row, swapped, image_token_id)
    async with paused(engine):  # which may sample from the very weights that score
        canary = Canary(_trainer_moves(score, row, swapped), engine_moved)
    for side, moved in vars(canary).items():
        if moved <= MOVES:
            raise CanaryError(
                f"trajectory {row.trajectory_id}, image 0 ({row.media[0].id}): with noise in its place the {side}'s logprobs moved "
                f"by {moved:.2g} nats, where more than {MOVES:g} was expected. Images do not reach the model there: training "
                "would be blind. (train.canary False skips this check.)"
            )
    return canary


def _from_first_image(row: Sample, image_token_id: int) -> Sample:
    """The same tokens, where all text after the first image counts as response.

    A trained reply may be so sure that no image moves it; the text that stands before it never is.
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


def _noise(item: MediaItem) -> Image.Image:
    width, height = item.image.size
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _trainer_moves(score: Score, row: Sample, swapped: Sample) -> float:
    kept, other = score([row, swapped])
    return float(np.abs(kept - other).max())


async def _engine_moves(engine: Engine, row: Sample, swapped: Sample, image_token_id: int) -> float:
    """Greedy continuations right after both images: infinite where they differ, else the largest difference of logprobs."""
    replies = []
    for name, each in (("kept", row), ("swapped", swapped)):
        shown = each.media[:1]
        ids = collapse(each.prompt_token_ids, image_token_id, shown)
        request = Request(f"canary/{name}", ids, shown, SamplingParams(TOKENS, temperature=0))
        replies.append(await engine.generate(request))
        engine.release(request.trajectory_id)
    kept, other = replies
    if kept.token_ids != other.token_ids:
        return float("inf")
    return max(abs(a - b) for a, b in zip(kept.logprobs, other.logprobs, strict=True))
