"""Trajectories and settings as JSON records."""

from __future__ import annotations

import dataclasses
import math
import numbers
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.config.code import code_path
from vlmrl.report.metrics import repetition
from vlmrl.types import Message, Trajectory, Turn


def plain(value: Any) -> Any:
    """``value`` in JSON types: ``Path("a")`` becomes ``"a"``, a class ``"module:Name"``, infinity ``"inf"``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (value if isinstance(value, list | tuple) else sorted(value, key=str))]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return code_path(value)
    return str(value)


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """One trajectory in JSON types, with the ids of its images: a line of ``trajectories.jsonl``.

    ``prompt`` is the text before the first reply (the task's, or what the env's ``reset`` returned), ``observation`` the text before
    a later one. An image appears as ``[image]`` in both.
    """
    task, turns = trajectory.task, trajectory.turns
    return {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "task_id": task.id,
        "source": task.source,
        "prompt": messages_text(turns[0].messages if turns and turns[0].messages else task.prompt),
        "answer": plain(task.answer),
        "reward": plain(trajectory.reward),
        "final_reward": plain(trajectory.final_reward),
        "group_reward": plain(trajectory.group_reward),
        "ending": trajectory.ending,
        "error": trajectory.error,
        "metrics": plain(trajectory.metrics),
        "turns": [_turn_record(turn, first=index == 0) for index, turn in enumerate(turns)],
    }


def _turn_record(turn: Turn, first: bool) -> dict[str, Any]:
    return {
        "observation": None if first else messages_text(turn.messages),
        "images": [item.id for item in turn.media],
        "text": turn.text,
        "reward": plain(turn.reward),
        "metrics": plain(turn.metrics),
        "stop_reason": turn.stop_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "sampled_tokens": len(turn.response_ids),
        "mean_logprob": plain(statistics.fmean(turn.logprobs)) if turn.logprobs else None,
        "policy_versions": sorted(set(turn.policy_versions)),
        "repetition": repetition(turn.response_ids),
        "engine_seconds": plain(turn.engine_seconds),
        "env_seconds": plain(turn.env_seconds),
        "logprob_mismatch": plain(turn.logprob_mismatch),
    }


def messages_text(messages: Sequence[Message]) -> str:
    """The text of chat messages, for people: an image and "Which?" give ``"[image]\\nWhich?"``."""
    return "\n\n".join(_content_text(message.get("content")) for message in messages)


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(part["text"] if "text" in part else f"[{part.get('type', 'part')}]" for part in content)
