"""The findings of `vlmrl doctor RECIPE` about the recipe's model: template, tokenizer and patch embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from vlmrl.checks.doctor_machine import Finding
from vlmrl.config import Config, Rollout
from vlmrl.model.loading import load_reader, shapes_of
from vlmrl.model.patch_embedding import PatchProjection, use_linear_patches
from vlmrl.multimodal.renderer import OUR_TEMPLATES, Renderer
from vlmrl.types import Message

THOUGHT = "<think>\nReason.\n</think>\n\n"


def model_findings(config: Config) -> Iterator[Finding]:
    """The checks of the config's model, which loads its tokenizer and its shapes, and no weights."""
    reader, model = load_reader(config.model, config.models_dir), shapes_of(config.model, config.models_dir)
    yield check_template(reader.renderer, config.rollout)
    yield check_vocabulary(highest_id(reader.tokenizer), model.get_input_embeddings().weight.shape[0])
    yield check_convolutions(model)


def check_template(renderer: Renderer, rollout: Rollout) -> Finding:
    """Whether the chat template leaves earlier turns as they were sampled when a later message comes."""
    try:
        renderer.delta([{"role": "user", "content": "Go on."}])
        changed = changed_turns(renderer)
    except Exception as error:  # a template may raise anything
        remedy = f"Set model.chat_template to one that works. Ours: {OUR_TEMPLATES}."
        return Finding(
            "template", "error", f"the chat template does not render: {type(error).__name__}: {error}", remedy
        )
    if not changed:
        return Finding("template", "ok", "earlier turns stay as they were sampled")
    found = f"the chat template rewrites earlier turns: {', '.join(changed)}"
    if rollout.max_turns == 1 or rollout.rerenders:
        return Finding("template", "ok", f"{found}; this recipe does not depend on it")
    remedy = (
        "Training keeps the turns as they were sampled. To train on what the template shows, set rollout.history rerender with "
        "rollout.samples step_wise; or set model.chat_template to chatml."
    )
    return Finding("template", "warning", found, remedy)


def changed_turns(renderer: Renderer) -> list[str]:
    """What the template changes in an earlier response: ``["thinking, when a user message follows"]``. Empty: nothing."""
    changed = []
    for role in ("user", "tool") if renderer.has_tool_role else ("user",):
        for what, response in {"a response": "Fine.", "thinking": f"{THOUGHT}Fine."}.items():
            talk: list[Message] = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": response}]
            before = _shown(renderer, talk)
            turn = before.rpartition(renderer.end_of_turn)[0] or before
            if not _shown(renderer, [*talk, {"role": role, "content": "Go on."}]).startswith(turn):
                changed.append(f"{what}, when a {role} message follows")
    return changed


def _shown(renderer: Renderer, messages: Sequence[Message]) -> str:
    template = renderer.chat_template
    return renderer.tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False)


def highest_id(tokenizer: Any) -> int:
    """The highest id of the tokenizer's tokens, added ones included."""
    return max(tokenizer.get_vocab().values())


def check_vocabulary(highest: int, rows: int) -> Finding:
    """``highest``: the tokenizer's highest id; ``rows`` of the model's embedding."""
    found = f"the tokenizer's ids go up to {highest}, the model embeds {rows}"
    if highest >= rows:
        return Finding(
            "vocabulary", "error", found, "Use the tokenizer of this model, or resize the model's embedding."
        )
    return Finding("vocabulary", "ok", found)


def check_convolutions(model: nn.Module) -> Finding:
    """Whether the patch embedding is computed as a matrix product: its convolution is 10 to 20 times slower on some versions."""
    use_linear_patches(model)
    slow = [name for name, each in model.named_modules() if type(each) is nn.Conv3d]
    fast = [name for name, each in model.named_modules() if type(each) is PatchProjection]
    if slow:
        remedy = "With torch 2.9 and later, update cuDNN to 9.15 or newer, or expect a slow vision encoder."
        return Finding("conv3d", "warning", f"computed as 3-D convolutions: {', '.join(slow)}", remedy)
    return Finding("conv3d", "ok", f"{', '.join(fast)} is a matrix product" if fast else "no 3-D convolution")
