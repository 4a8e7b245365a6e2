"""The models of the checks, and samples of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from acceptance.report import Report, need
from PIL import Image
from shapes import load_random, write_2b

from vlmrl.config import Lora, Model
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel, shapes_of
from vlmrl.multimodal.placeholders import expand
from vlmrl.types import Sample


def random_model(report: Report, **settings: Any) -> LoadedModel:
    """The 2B's shape on the device in bfloat16, or with ``--tiny`` a tiny model; ``settings`` are those of `load_random`."""
    return load_random(random_folder(report), report.device, torch.bfloat16, **settings)


def random_folder(report: Report) -> Path:
    """The folder with that model's config, tokenizer and processor."""
    folder = report.scratch / ("tiny" if report.tiny else "2b")
    if not folder.exists():
        tiny.build(folder) if report.tiny else write_2b(folder)
    return folder


def parameters_of(report: Report) -> int:
    """Their number, without loading the model."""
    shapes = shapes_of(Model(path=f"random:{random_folder(report)}"), report.scratch)
    return sum(weight.numel() for weight in shapes.parameters())


def noise(seed: int, side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def sampled(
    loaded: LoadedModel, *, groups: int = 2, members: int = 4, response: int = 32, side: int = 128
) -> list[Sample]:
    """Rows that the embedded engine samples, each group's about an image of noise; advantages are 1 and -1 in turn."""
    store = loaded.new_store()
    assert store is not None
    prompts, requests = [], []
    for group in range(groups):
        image = noise(group, side)
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is the answer?"}]
        item, rendered = store.load(image), loaded.renderer.prompt([{"role": "user", "content": content}])
        for member in range(members):
            sampling = SamplingParams(response, seed=members * group + member)
            requests.append(Request(f"g{group}/{member}", rendered.token_ids, [item], sampling))
            prompts.append(expand(rendered.token_ids, loaded.renderer.image_token_id, [item]))
    engine = HFEngine(loaded.policy, loaded.renderer)
    try:
        responses = asyncio.run(engine.generate_batch(requests))
    finally:
        engine.close()
    rows = []
    for number, (request, prompt, completion) in enumerate(zip(requests, prompts, responses, strict=True)):
        size, group = len(completion.token_ids), request.trajectory_id.partition("/")[0]
        lists = (prompt, completion.token_ids, [1] * size, completion.logprobs, completion.policy_versions)
        end = (group, request.trajectory_id, True, completion.stop_reason, list(request.media))
        rows.append(Sample(*lists, *end, 1.0 if number % 2 else -1.0))
    return rows


def rollout_logprobs(rows: Sequence[Sample]) -> list[list[float]]:
    return [row.rollout_logprobs or [] for row in rows]


def lora() -> Lora:
    need("peft")
    return Lora(rank=32, alpha=64)
