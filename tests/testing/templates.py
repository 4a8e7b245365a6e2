"""The real tokenizers and chat templates of the shared material, and the ids that they make of a conversation."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vlmrl.multimodal import renderer
from vlmrl.multimodal.renderer import Renderer

PAD = "<|image_pad|>"
STABLE = ["qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"]  # never rewrite an earlier message
DROP_THINKING = ["qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"]  # at the next user turn, not at a tool's
TEMPLATES = STABLE + DROP_THINKING


@functools.cache
def real_tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def real_renderer(shared: Path, tokenizer: str, template: str, image_token: str | None = PAD) -> Renderer:
    """The renderers of one tokenizer share its two backends, of 50 MiB each."""
    text = (shared / f"data/qwen/chat_templates/{template}.jinja").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "backends_of", shared_backends)
        return Renderer(real_tokenizer(shared / "data/qwen" / tokenizer), image_token=image_token, chat_template=text)


shared_backends = functools.cache(renderer.backends_of)


def forget() -> None:
    """Keep no tokenizer and no renderer."""
    for cached in (real_tokenizer, real_renderer, shared_backends):
        cached.cache_clear()


def user(content) -> dict:
    return {"role": "user", "content": content}


def tool(content) -> dict:
    return {"role": "tool", "content": content}


def full_text(renderer: Renderer, messages, tools=(), generate: bool = True) -> str:
    """The whole conversation as the template renders it."""
    return renderer.tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        chat_template=renderer.chat_template,
        tokenize=False,
        add_generation_prompt=generate,
    )


def ids_of(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def episode_ids(renderer: Renderer, prompt, turns, tools=()) -> list[int]:
    """The ids of an episode as the turn loop has them. ``turns``: responses, each with the messages after it or None."""
    ids = list(renderer.prompt(prompt, tools).token_ids)
    for response, messages in turns:
        ids += [*ids_of(renderer, response), renderer.end_of_turn_id]
        if messages is not None:
            ids += renderer.delta(messages, tools).token_ids
    return ids
