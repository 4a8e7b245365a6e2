"""What lists of trajectories show of each one, so that a page need not hold them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUESTION_LENGTH = 160  # characters


def overview(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A few fields of a trajectory's record: ``{"n": 7, "id": "train/3#1", "step": 3, "reward": 1.0, "question": "Which?", ...}``.

    ``n`` is the number of its line in ``trajectories.jsonl``; ``image`` the id of its first image, or ``None``.
    """
    turns = record.get("turns") or []
    kept = ("id", "group_id", "task_id", "source", "reward", "ending")
    return {
        "n": number,
        "step": record.get("step"),
        "kind": record.get("kind") or "train",
        **{name: record.get(name) for name in kept},
        "turns": len(turns),
        "tokens": sum(turn.get("sampled_tokens") or 0 for turn in turns),
        "image": next((image for turn in turns for image in turn.get("images") or []), None),
        "question": _question(record)[:QUESTION_LENGTH],
    }


def _question(record: Mapping[str, Any]) -> str:
    """The user's text before the first response, or else the prompt."""
    turns = record.get("turns") or []
    messages = (turns[0].get("messages") or []) if turns else []
    parts = [part for message in messages if message["role"] == "user" for part in message["parts"]]
    text = " ".join(part.get("text") or "" for part in parts).strip()
    return text or str(record.get("prompt") or "").replace("[image]", "").strip()


def search_text(record: Mapping[str, Any]) -> str:
    """All text of a trajectory in lower case, for a search: its id, prompt, answer, error, responses and observations."""
    turns = record.get("turns") or []
    texts = [record.get(name) for name in ("id", "task_id", "prompt", "answer", "error")]
    texts += [turn.get(name) for turn in turns for name in ("text", "observation")]
    return "\n".join(str(text) for text in texts if text is not None).lower()
