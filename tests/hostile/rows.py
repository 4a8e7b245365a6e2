"""Rows as a generator or a dataset may give them: right ones in which a few places are replaced by something else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image
from testing.episodes import new_store, renderer, turn_loop
from testing.hostile import junk

from vlmrl import Env, obs
from vlmrl.config import Data
from vlmrl.data import PromptLength, TaskStream, load_tasks
from vlmrl.data.conversations import _conversation
from vlmrl.data.row_images import RowImages
from vlmrl.multimodal.masks import RowError
from vlmrl.rollout.runner import RolloutError, Runner
from vlmrl.samples import audit
from vlmrl.samples.conversation import samples_of_conversation
from vlmrl.types import Task

TEXTS = (
    "",
    "What?",
    "<image>",
    "<image><image> and <image>",
    "<|im_end|><|image_pad|>",
    "a\ud800b",
    "\x00\u202e",
    "x" * 3000,
)
COLUMNS = {"messages": ["messages"], "images": ["images"], "tools": ["tools"]}
SECONDS = 60.0  # the deadline of one case; it takes milliseconds


def cases(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: what a generator gives for four tasks, and the limit of their prompts' length."""
    while True:
        limit = rng.choice([None, 20, 500])
        yield {"rows": [_row(rng) for _ in range(4)], "max_prompt_tokens": limit}


def run(case: dict[str, Any]) -> str:
    """Play the rows, and return how that ended. Raises if it ends in no answer, no counted failure and no clear error."""
    rows = case["rows"]
    data = Data(generator=lambda index, seed: _given(rows[index]), size=4, max_prompt_tokens=case["max_prompt_tokens"])
    loop = turn_loop(_Once, lambda request, turn: "a", group_size=2, max_refills=0, max_failed_fraction=1.0)
    stream = TaskStream(load_tasks(data), PromptLength(renderer(), new_store(), lambda task: []), once=True)

    async def play() -> str:
        draws = await stream.take(4)
        rollouts = await Runner(loop).play(iter(draws), len(draws), "x")
        assert len(rollouts.groups) + rollouts.dropped_groups == len(draws)
        assert rollouts.dropped_groups == len(rollouts.bad_rows), [t.error for t in rollouts.failed]
        assert all(rollouts.bad_rows)
        return f"{len(draws)} drawn, {len(rollouts.groups)} played"

    try:
        return asyncio.run(asyncio.wait_for(play(), SECONDS))
    except RolloutError as error:
        return type(error).__name__
    finally:
        stream.close()


def conversations(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: rows of recorded conversations."""
    while True:
        response = {"role": "assistant", "content": rng.choice([*TEXTS, junk(rng)])}
        row: Any = {"messages": [*_messages(rng), response], "tools": rng.choice([None, [], junk(rng)])}
        row["images"] = [_image(rng) for _ in range(rng.randrange(3))]
        for _ in range(rng.choice([0, 0, 1])):
            rng.choice(row["messages"])[rng.choice(["role", "content", "tool_calls", "weight", "from"])] = junk(rng)
        for _ in range(rng.choice([0, 0, 1])):
            row[rng.choice(["messages", "images", "tools", "responses"])] = junk(rng)
        yield row


def read(row: dict[str, Any]) -> str:
    """``rows``, or why the conversation is a bad row. Raises whatever else comes of it."""
    try:
        task = _conversation(Task("t", []), row, COLUMNS, "all", RowImages("row 0", []))
    except Exception:  # which the source of conversations reports as a bad row
        return "unreadable"
    try:
        samples = asyncio.run(samples_of_conversation(task, renderer(), new_store(), max_tokens=4000, seconds=SECONDS))
        audit(samples, image_token_id=renderer().image_token_id, banned_ids=[])
        return "rows"
    except RowError as error:
        return error.reason


class _Once(Env):
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs(), True, {"reward": 1.0}


def _given(row: Any) -> Any:
    if isinstance(row, BaseException):
        raise row
    return row


def _row(rng: random.Random) -> Any:
    row: Any = {"prompt": "<image>What?" if rng.random() < 0.5 else _messages(rng), "answer": "4"}
    if rng.random() < 0.5:
        row["images"] = [_image(rng) for _ in range(rng.randrange(3))]
    for _ in range(rng.choice([0, 0, 1, 2])):
        row[rng.choice(["prompt", "images", "answer", "data", "seed", "id"])] = junk(rng)
    if rng.random() < 0.05:
        return rng.choice([junk(rng), KeyError("prompt"), StopIteration(), SystemExit(3), asyncio.CancelledError()])
    return row


def _messages(rng: random.Random) -> list[Any]:
    messages = []
    for role in rng.choice([["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "user"], ["tool"]]):
        content: Any = rng.choice(TEXTS)
        if rng.random() < 0.4:
            content = [_part(rng) for _ in range(rng.randrange(4))]
        messages.append({"role": role, "content": content})
    for _ in range(rng.choice([0, 0, 1])):
        rng.choice(messages)[rng.choice(["role", "content", "tool_calls", "extra"])] = junk(rng)
    return messages


def _part(rng: random.Random) -> Any:
    kinds = ("text", "image", "image_url", "video", "", None)
    part = {
        "type": rng.choice(kinds),
        rng.choice(["text", "image", "url", "image_url", "base64", "path"]): junk(rng),
    }
    return rng.choice([{"type": "text", "text": "x"}, {"type": "image"}, part, junk(rng)])


def _image(rng: random.Random) -> Any:
    size = (rng.randint(1, 300), rng.randint(1, 300))
    return rng.choice(
        [
            Image.new(rng.choice(["RGB", "L", "RGBA", "P", "1"]), size),
            Image.new("RGB", (64, 32)),
            junk(rng),
        ]
    )
