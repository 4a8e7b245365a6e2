"""Small literal images, turns and trajectories, for tests that need no model."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from vlmrl.families.qwen3_vl import Qwen3VL
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.types import MediaItem, Sample, Task, Trajectory, Turn

PAD = 9  # the image placeholder in the tests' literal tokens


def qwen_vl(image_token_id: int = PAD) -> Qwen3VL:
    """A family that needs no model: images of 2x2 patches a visual token, as those of :func:`make_item`."""
    vision = SimpleNamespace(spatial_merge_size=2)
    return Qwen3VL(SimpleNamespace(image_token_id=image_token_id, video_token_id=0, vision_config=vision))


def make_item(id: str, width: int, height: int = 1) -> MediaItem:
    """A black image of ``height * width`` visual tokens, of 2x2 patches each."""
    return item_of(id, Image.new("RGB", (32 * width, 32 * height)), height * width)


def item_of(id: str, image: Image.Image, num_tokens: int, separators: dict[int, int] | None = None) -> MediaItem:
    """An image as it would be for a model with patches of 16 pixels."""
    sizes = {"image_grid_thw": torch.tensor([[1, image.height // 16, image.width // 16]])}
    return MediaItem(id, image.size, sizes, num_tokens, separators or {}, ArrayPixels(np.array(image)))


def make_turn(prompt_ids: list[int], response_ids: list[int], logprobs: list[float], **fields: Any) -> Turn:
    media = fields.pop("media", [])
    versions = fields.pop("policy_versions", [3] * len(response_ids))
    return Turn(prompt_ids, media, response_ids, logprobs, versions, fields.pop("stop_reason", "stop"), "", **fields)


def make_trajectory(id: str = "t", turns: list[Turn] | None = None, **fields: Any) -> Trajectory:
    """A prompt with an image of 2 tokens, a response, an observation with one of 3, a response; rewards 0.25 and 1."""
    fields = {"ending": "env_done", "final_reward": 1.0} | fields
    return Trajectory(id, "g", Task(id, []), linked(two_turns() if turns is None else turns), **fields)


def linked(turns: list[Turn], dropped: int = 0) -> list[Turn]:
    """The same turns, of which each that names no parent continues all of the one before but the last ``dropped`` tokens."""
    for number, (above, turn) in enumerate(pairwise(turns)):
        if turn.parent is None:
            turn.parent, turn.kept, turn.kept_media = number, above.length - dropped, above.num_images
    return turns


def two_turns() -> list[Turn]:
    return [
        make_turn([1, PAD, PAD, 2], [5, 6], [-0.1, -0.2], media=[make_item("red", 2)], reward=0.25),
        make_turn(
            [7, PAD, PAD, PAD, 8], [5, 4, 6], [-0.3, -0.4, -0.5], media=[make_item("blue", 3)], stop_reason="length"
        ),
    ]


class Router(nn.Module):
    """Sends each token to the two likeliest of three experts, whose logits are its input."""

    top_k, num_experts = 2, 3

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, chosen = hidden.softmax(-1).topk(2)
        return hidden, weights / weights.sum(-1, keepdim=True), chosen


def step_wise(trajectory: Trajectory) -> list[Sample]:
    """One row per turn, written out the plain way: the prompt is all that came before; the reward is on the last."""
    rows, prompt, media = [], [], []
    for turn in trajectory.turns:
        prompt, media = prompt + turn.prompt_ids, media + turn.media
        last = turn is trajectory.turns[-1]
        size = len(turn.response_ids)
        versions = list(turn.policy_versions)
        lists = (list(prompt), list(turn.response_ids), [1] * size, list(turn.logprobs), versions)
        rewards = {size - 1: trajectory.reward} if last else {}
        ids = (trajectory.group_id, trajectory.id)
        rows.append(Sample(*lists, *ids, last, turn.stop_reason, list(media), rewards=rewards))
        prompt = prompt + turn.response_ids
    return rows
