"""A task as a JSON file with image files, for agents that are commands."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from vlmrl.multimodal.images import data_uri
from vlmrl.multimodal.openai_messages import openai_messages
from vlmrl.types import ImageSource, Task

TASK_FILE = "task.json"
SUFFIXES = {"image/jpeg": ".jpg"}  # of the others: the type itself, such as .png


def write_task(task: Task, folder: Path) -> Path:
    """Write ``task`` to ``folder/task.json``, and its images as files beside it. Returns the path of the JSON file.

    The keys are ``id``, ``messages`` (in OpenAI's form, with file URLs), ``images`` (paths), ``answer``, ``data``, ``source`` and
    ``seed``. It reads, decodes and encodes images: do not call it on an event loop.
    """
    from vlmrl.report.records import plain  # needs torch, which `import vlmrl` must not

    paths: list[str] = []

    def written(image: ImageSource) -> str:
        head, _, content = data_uri(image).partition(";base64,")
        kind = head.removeprefix("data:")
        path = folder / f"image-{len(paths)}{SUFFIXES.get(kind, '.' + kind.rpartition('/')[2])}"
        path.write_bytes(base64.b64decode(content))
        paths.append(str(path))
        return path.as_uri()

    document = {
        "id": task.id,
        "messages": openai_messages(task.prompt, written),
        "images": paths,
        "answer": plain(task.answer),
        "data": plain(task.data),
        "source": task.source,
        "seed": task.seed,
    }
    file = folder / TASK_FILE
    file.write_text(json.dumps(document), encoding="utf-8")
    return file
