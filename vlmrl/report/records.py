"""Trajectories and settings as JSON records."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from vlmrl.config.code import code_path
from vlmrl.report.metrics import repetition
from vlmrl.report.token_columns import TokenTexts, token_columns
from vlmrl.rollout.failures import failure_reason
from vlmrl.train.turn_states import states_of
from vlmrl.types import Message, Trajectory, Turn

Kind = Literal["train", "eval", "blanked", "collect"]
"""What a trajectory was played for: a training step, an evaluation, the evaluation with blanked images, or `vlmrl collect`."""


def plain(value: Any) -> Any:
    """``value`` in JSON types: ``Path("a")`` becomes ``"a"``, a class ``"module:Name"``, infinity ``"inf"``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
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


def flat(settings: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by their full names: ``{"optim": {"lr": 1}}`` as ``{"optim.lr": 1}``."""
    if not isinstance(settings, Mapping):
        return {name: settings}
    parts = [flat(value, f"{name}.{key}".lstrip(".")) for key, value in settings.items()]
    return {key: value for part in parts for key, value in part.items()}


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, each with its old and new value: ``{"optim.lr": (1e-6, 1e-5)}``."""
    before, now = flat(old), flat(new)
    return {name: (before.get(name), now.get(name)) for name in before | now if before.get(name) != now.get(name)}


def trajectory_record(
    trajectory: Trajectory, step: int | None = None, kind: Kind = "train", texts: TokenTexts | None = None
) -> dict[str, Any]:
    """One trajectory in JSON types, with the ids of its images: a line of ``trajectories.jsonl``. ``step`` is ``None`` outside a run.

    ``prompt`` is the text before the first response (the task's, or what the env's ``reset`` returned), ``observation`` the text
    before a later one. An image appears as ``[image]`` in both; ``messages`` has the ids (see :func:`message_parts`). With ``texts``,
    a turn also has the columns of :func:`~vlmrl.report.token_columns.token_columns`. A turn of an agent has ``continues``: the number
    of the turn whose response its request continues, ``None`` for the first of a branch. A turn of an episode with branches has
    ``parent``, ``kept_tokens`` and ``kept_images``: how much of which turn's context it keeps; and ``asked``: whether a history policy
    got this response, not the env. ``state`` is equal for turns of a group that began in the same state. A failed trajectory has
    ``reason`` (see :func:`~vlmrl.rollout.failures.failure_reason`) and ``retried``: it was played again in the same group.
    """
    task, turns = trajectory.task, trajectory.turns
    is_tree, states = _has_branches(turns), states_of(trajectory)
    failure = {"reason": failure_reason(trajectory), "retried": trajectory.retried} if trajectory.failed else {}
    return {
        "step": step,
        "kind": kind,
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
        **failure,
        "metrics": plain(trajectory.metrics),
        "turns": [
            _turn_record(trajectory, number, texts, is_tree)
            | {"state": hashlib.blake2b(state.encode(errors="replace"), digest_size=6).hexdigest()}
            for number, state in enumerate(states)
        ],
    }


def _has_branches(turns: Sequence[Turn]) -> bool:
    """Whether a turn leaves out more of the context before it than an end-of-turn token, as the history ``inline`` does."""
    after = enumerate(turns[1:])
    return any(turn.parent != number or turn.kept < turns[number].length - 1 for number, turn in after)


def _turn_record(trajectory: Trajectory, number: int, texts: TokenTexts | None, is_tree: bool) -> dict[str, Any]:
    turn = trajectory.turns[number]
    record = {
        "observation": messages_text(turn.messages) if number else None,
        "messages": message_parts(turn),
        "images": [item.id for item in turn.media],
        "text": turn.text,
        "reward": plain(turn.reward),
        "metrics": plain(turn.metrics),
        "points": plain(turn.points),
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
    if turn.received is not None:
        record["continues"] = turn.received.continues
    if is_tree:
        record |= {"parent": turn.parent, "kept_tokens": turn.kept, "kept_images": turn.kept_media, "asked": turn.asked}
    return record | ({} if texts is None else token_columns(turn, texts))


def message_parts(turn: Turn) -> list[dict[str, Any]]:
    """The messages before a response, with the images that the model saw: ``[{"role": "user", "parts": [{"image": "3fa9"}]}]``.

    A part is a ``text`` or an ``image``: the id of the turn's next image, or ``None`` if no image is left. Images that belong to no
    message are last, under the role ``images``.
    """
    media = iter(item.id for item in turn.media)
    shown = [{"role": message.get("role", ""), "parts": _parts(message, media)} for message in turn.messages]
    if rest := [{"image": key} for key in media]:
        shown.append({"role": "images", "parts": rest})
    return shown


def _parts(message: Message, media: Iterator[str]) -> list[dict[str, Any]]:
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = [
        {"image": next(media, None)} if part.get("type") == "image" else {"text": str(part.get("text", part))}
        for part in parts
    ]
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return [*shown, {"text": json.dumps(plain(rest), indent=1, ensure_ascii=False)}] if rest else shown


def messages_text(messages: Sequence[Message]) -> str:
    """The text of chat messages, for people: an image and "Which?" give ``"[image]\\nWhich?"``."""
    return "\n\n".join(_content_text(message.get("content")) for message in messages)


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(part["text"] if "text" in part else f"[{part.get('type', 'part')}]" for part in content)
