"""How long a task's prompt is in true tokens, images included, without decoding or processing any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Task


def prompt_tokens(
    renderer: Renderer, store: MediaStore | None, tools: Callable[[Task], Sequence[dict[str, Any]]]
) -> Callable[[Task], int]:
    """A function that counts the row's own prompt with its env's ``tools``; what an env's ``reset`` shows instead it cannot know."""

    def count(task: Task) -> int:
        rendered = renderer.prompt(task.prompt, tools(task))
        if not rendered.images:
            return len(rendered.token_ids)
        assert store is not None  # the renderer of a text model refuses images
        return len(rendered.token_ids) + sum(store.measure(image).num_tokens - 1 for image in rendered.images)

    return count
