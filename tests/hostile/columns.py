"""Columns as a user's generator may return them: right ones in which up to three places are replaced by something else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

NAMES = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "trajectory_ids",
    "is_last_step",
    "stop_reasons",
    "rollout_logprobs",
    "rollout_expert_indices",
    "group_ids",
    "policy_versions",
    "media",
    "rollout_metrics",
)


def cases(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Endlessly: columns for :func:`vlmrl.samples.from_columns`, of one to three rows."""
    while True:
        columns = _right(rng)
        for _ in range(rng.randrange(4)):
            _spoil(columns, rng)
        yield columns


def _right(rng: random.Random) -> dict[str, Any]:
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    array = rng.choice([list, np.array, torch.tensor])
    return {
        "prompt_token_ids": [[rng.randrange(100) for _ in range(rng.randint(1, 4))] for _ in sizes],
        "response_ids": [array([rng.randrange(100) for _ in range(size)]) for size in sizes],
        "rewards": [rng.choice([1.0, 0, True, np.float32(0.5), torch.tensor(-1)]) for _ in sizes],
        "loss_masks": [array([1] * size) for size in sizes],
        "trajectory_ids": [rng.choice(["step1/0/", "geo_", ""]) + str(row) for row in range(len(sizes))],
        "is_last_step": [True] * len(sizes),
        "rollout_logprobs": rng.choice([None, [array([-0.5] * size) for size in sizes]]),
    }


def _spoil(columns: dict[str, Any], rng: random.Random) -> None:
    """Replace a column, a row or an entry."""
    name = rng.choice(NAMES) if rng.random() < 0.97 else "rollouts"
    column, junk = columns.get(name), _junk(rng)
    if not isinstance(column, list) or not column or rng.random() < 0.1:
        columns[name] = rng.choice([junk, {"calls": junk}, [junk] * len(NAMES[:2])])
        return
    row = rng.randrange(len(column))
    if isinstance(column[row], list) and rng.random() < 0.7:
        column[row].insert(rng.randint(0, len(column[row])), junk)
    elif rng.random() < 0.2:
        del column[row]
    else:
        column[row] = junk


def _junk(rng: random.Random) -> Any:
    itself: list[Any] = []
    itself.append(itself)
    numbers = [0, 1, -1, 2, 0.5, True, 10**400, -(10**30), 2**31, float("nan"), float("inf"), 1e308, 1j]
    arrays = [
        np.float16(1),
        np.int8(-1),
        np.zeros((2, 2, 2)),
        np.array(["a"]),
        np.array(None),
        torch.ones(3),
        torch.tensor([]),
    ]
    others = [
        None,
        "",
        "a" * 10**5,
        "1",
        b"1",
        "\x00/\ud800",
        [],
        [[]],
        [None],
        {},
        {"a": 1},
        {1, 2},
        object(),
        int,
        itself,
    ]
    return rng.choice(rng.choice([numbers, arrays, others]))
