"""What the tests of env, rollout and engine share: a renderer, an image store, tasks, and a way to play them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import Qwen2VLImageProcessor

from testing.fakes import qwen_vl
from vlmrl.config import Model, Rollout
from vlmrl.engine.base import Engine, Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import EnvSpec, resolve_env
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import audit, concat, step_wise
from vlmrl.types import Completion, Task, Trajectory

COLORS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
VISION_START, PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"

Script = Sequence[str] | Callable[[Request, int], Any]


@functools.cache
def renderer() -> Renderer:
    tokenizer = tiny.tokenizer()
    return Renderer(tokenizer, image_token=PAD, stop_ids=[tokenizer.pad_token_id])


def new_store() -> MediaStore:
    """Images of 32 x 32 pixels per token, as in the tiny Qwen3-VL."""
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    return MediaStore(qwen_vl(), Qwen2VLImageProcessor(patch_size=16, temporal_patch_size=2, merge_size=2, size=size))


def image(color: str = "red", size: tuple[int, int] = (64, 32)) -> Image.Image:
    """A plain image, of 2 tokens unless ``size`` (width, height) says otherwise."""
    return Image.new("RGB", size, color)


def a_task(text: str = "2+2?", images: Sequence[Any] = (), id: str = "t", **fields: Any) -> Task:
    content: Any = text
    if images:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return Task(id, [{"role": "user", "content": content}], list(images), **fields)


def script(responses: Script, **options: Any) -> ScriptedEngine:
    """An engine that says ``responses`` one after another, or what the function says."""
    response = responses if callable(responses) else lambda request, turn: responses[turn]
    return ScriptedEngine(response, renderer(), **options)


def turn_loop(
    env: Any, responses: Script | Engine, *, options: dict[str, Any] | None = None, **rollout: Any
) -> TurnLoop:
    engine: Any = responses if hasattr(responses, "generate") else script(responses)  # type: ignore[arg-type]
    spec = env if isinstance(env, EnvSpec) else resolve_env(env, options=options)
    limits = {"max_turns": 4, "max_tokens": 1000, "max_response_tokens": 100, "env_timeout": 600.0} | rollout
    return TurnLoop(spec, engine, renderer(), new_store(), Rollout(**limits))


def play(env: Any, responses: Script | Engine, task: Task | None = None, **options: Any) -> Trajectory:
    """One episode of ``env`` against ``responses``; ``options`` are those of :class:`Rollout`."""
    loop = turn_loop(env, responses, **options)
    return asyncio.run(loop.play(task or a_task(), "g", "g/00"))


def play_audited(env: Any, responses: Script | Engine, task: Task | None = None, **options: Any) -> Trajectory:
    """As :func:`play`, and the audit finds nothing wrong with the rows of the episode, which did not fail."""
    trajectory = play(env, responses, task, **options)
    assert not trajectory.failed, trajectory.error
    for emit in (concat, step_wise):
        audit(emit(trajectory), [trajectory], image_token_id=renderer().image_token_id, banned_ids=[])
    return trajectory


def completion(text: str, prompt_tokens: int, stop_reason: str = "stop", end: bool = True) -> Completion:
    ids = renderer().encode(text) + ([renderer().end_of_turn_id] if end else [])
    return Completion(ids, [-0.5] * len(ids), stop_reason, [0] * len(ids), prompt_tokens)  # type: ignore[arg-type]


def decoded(token_ids: Sequence[int]) -> str:
    return renderer().decode(token_ids)


def sharp_model(folder: Path, end: float = 5.0) -> LoadedModel:
    """The tiny model of ``folder`` in float32 on the CPU, made :func:`sharp`."""
    loaded = load_model(Model(path=str(folder), device="cpu", dtype="float32"), folder, seed=0)
    sharpen(loaded.policy.model, end)
    return loaded


def sharpen(model: Any, end: float) -> None:
    """Random weights that say something: a larger decoder, and a head that ends turns the more the larger ``end`` is.

    Without this, all tokens are nearly equally likely, so that a wrong position or image would hardly show.
    """
    text = model.config.get_text_config()
    head = nn.Linear(text.hidden_size, text.vocab_size)
    with torch.no_grad():
        for name, parameter in model.get_decoder().layers.named_parameters():
            if parameter.dim() >= 2 and "conv" not in name:
                parameter.mul_(5.0 if "q_proj" in name or "k_proj" in name else 3.0)
        head.weight.copy_(model.lm_head.weight * 8)
        head.bias.zero_()
        head.bias[model.generation_config.eos_token_id[0]] = end
    model.lm_head = head.requires_grad_(False)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what another thread or server does after a test's own calls."""
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
