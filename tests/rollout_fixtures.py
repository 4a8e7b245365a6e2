"""What the tests of env, rollout and engine share: one tokenizer, one picture processor, tasks, and a way to play them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from transformers import Qwen2VLImageProcessor

from vlmrl import tiny
from vlmrl.config import Rollout
from vlmrl.engine.base import Engine, Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env import EnvSpec, resolve_env
from vlmrl.media import MediaStore
from vlmrl.renderer import Renderer
from vlmrl.rollout.turn_loop import TurnLoop
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
    """Pictures of 32 x 32 pixels per token, as in the tiny Qwen3-VL."""
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    return MediaStore(Qwen2VLImageProcessor(patch_size=16, temporal_patch_size=2, merge_size=2, size=size))


def picture(color: str = "red", size: tuple[int, int] = (64, 32)) -> Image.Image:
    """A plain picture, of 2 tokens unless ``size`` (width, height) says otherwise."""
    return Image.new("RGB", size, color)


def a_task(text: str = "2+2?", images: Sequence[Any] = (), id: str = "t", **fields: Any) -> Task:
    content: Any = text
    if images:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return Task(id, [{"role": "user", "content": content}], list(images), **fields)


def script(replies: Script, **options: Any) -> ScriptedEngine:
    """An engine that says ``replies`` one after another, or what the function says."""
    reply = replies if callable(replies) else lambda request, turn: replies[turn]
    return ScriptedEngine(reply, renderer(), **options)


def turn_loop(env: Any, replies: Script | Engine, *, options: dict[str, Any] | None = None, **rollout: Any) -> TurnLoop:
    engine: Any = replies if hasattr(replies, "generate") else script(replies)  # type: ignore[arg-type]
    spec = env if isinstance(env, EnvSpec) else resolve_env(env, options=options)
    limits = {"max_turns": 4, "max_tokens": 1000, "max_reply_tokens": 100, "env_timeout": 20.0} | rollout
    return TurnLoop(spec, engine, renderer(), new_store(), Rollout(**limits))


def play(env: Any, replies: Script | Engine, task: Task | None = None, **options: Any) -> Trajectory:
    """One episode of ``env`` against ``replies``; ``options`` are those of :class:`Rollout`."""
    loop = turn_loop(env, replies, **options)
    return asyncio.run(loop.play(task or a_task(), "g", "g/00"))


def completion(text: str, prompt_tokens: int, stop_reason: str = "stop", end: bool = True) -> Completion:
    ids = renderer().encode(text) + ([renderer().end_of_turn_id] if end else [])
    return Completion(ids, [-0.5] * len(ids), stop_reason, [0] * len(ids), prompt_tokens)  # type: ignore[arg-type]


def decoded(token_ids: Sequence[int]) -> str:
    return renderer().decode(token_ids)
