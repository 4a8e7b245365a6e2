"""Samples as columns, the field's usual generator output, and back. A user's own generator may return its episode in this form.

    {"prompt_token_ids": [[1, 2]], "response_ids": [[5, 6]], "loss_masks": [[1, 1]], "rollout_logprobs": [[-.1, -.2]],
     "rewards": [1.0], "stop_reasons": ["stop"], "trajectory_ids": ["step1/0/0"], "is_last_step": [True],
     "rollout_metrics": {"calls": 2.0}, "rollout_expert_indices": None}

Every column has one entry per row, except ``rollout_metrics``, whose numbers describe the whole batch. ``rewards`` has one number
per row, or one per response token. The optional columns ``group_ids``, ``policy_versions`` and ``media`` (each row's
:class:`~vlmrl.types.MediaItem` list) complete a sample. For a mixture of experts, ``rollout_expert_indices`` has
``[tokens, layers, top_k]`` for each row, prompt tokens included; -1 means not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlmrl.model.expert_routing import indices_from_routing, routing_from_indices
from vlmrl.types import ExpertRouting, Sample

REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "trajectory_ids", "is_last_step")
OPTIONAL = ("stop_reasons", "rollout_logprobs", "rollout_expert_indices", "group_ids", "policy_versions", "media")
OF_THE_BATCH = ("rollout_metrics",)


def to_columns(samples: Sequence[Sample], rollout_metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All samples by column, with one reward per response token.

    ``rollout_logprobs`` is ``None`` if any row has none, ``rollout_expert_indices`` if no row has any.
    """
    known = all(sample.rollout_logprobs is not None for sample in samples)
    routed = any(sample.expert_routing for sample in samples)
    return {
        "prompt_token_ids": [sample.prompt_token_ids for sample in samples],
        "response_ids": [sample.response_ids for sample in samples],
        "rewards": [
            [sample.rewards.get(index, 0.0) for index in range(len(sample.response_ids))] for sample in samples
        ],
        "loss_masks": [sample.loss_mask for sample in samples],
        "stop_reasons": [sample.stop_reason for sample in samples],
        "rollout_metrics": dict(rollout_metrics or {}),
        "rollout_logprobs": [sample.rollout_logprobs for sample in samples] if known else None,
        "trajectory_ids": [sample.trajectory_id for sample in samples],
        "rollout_expert_indices": [indices_from_routing(sample.expert_routing) for sample in samples]
        if routed
        else None,
        "is_last_step": [sample.is_last_step for sample in samples],
        "group_ids": [sample.group_id for sample in samples],
        "policy_versions": [sample.policy_versions for sample in samples],
        "media": [sample.media for sample in samples],
    }


def from_columns(columns: Mapping[str, Any]) -> list[Sample]:
    """The rows as samples. One reward for a row goes on its last token with mask 1.

    Without ``group_ids``, a trajectory's group is its id up to the last ``/``. The audit checks the values later.

    Raises:
        ValueError: a column is missing, unknown, or has the wrong number of rows, tokens or dimensions.
    """
    size = _check(columns)
    group_ids = columns.get("group_ids") or [str(name).rpartition("/")[0] for name in columns["trajectory_ids"]]
    return [_row(columns, index, str(group_ids[index])) for index in range(size)]


def _check(columns: Mapping[str, Any]) -> int:
    """Check names and numbers of rows. Returns the number of rows."""
    for name in columns:
        if name not in (*REQUIRED, *OPTIONAL, *OF_THE_BATCH):
            raise ValueError(
                f"column {name!r} is not known; there are {', '.join((*REQUIRED, *OPTIONAL, *OF_THE_BATCH))}."
            )
    for name in REQUIRED:
        if columns.get(name) is None:
            raise ValueError(f"column {name!r} must be given.")
    size = len(columns["prompt_token_ids"])
    for name in (*REQUIRED, *OPTIONAL):
        if columns.get(name) is not None and len(columns[name]) != size:
            raise ValueError(f"column {name!r} has {len(columns[name])} rows, but prompt_token_ids has {size}.")
    for name, value in (columns.get("rollout_metrics") or {}).items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"rollout_metrics[{name!r}] must be one finite number of the whole batch, but it is {value!r}."
            )
    return size


def _row(columns: Mapping[str, Any], index: int, group_id: str) -> Sample:
    def given(name: str, otherwise: Any) -> Any:
        return otherwise if columns.get(name) is None else columns[name][index]

    mask = [int(value) for value in columns["loss_masks"][index]]
    logprobs = given("rollout_logprobs", None)
    size = len(columns["prompt_token_ids"][index]) + len(mask)
    return Sample(
        prompt_token_ids=list(columns["prompt_token_ids"][index]),
        response_ids=list(columns["response_ids"][index]),
        loss_mask=mask,
        rollout_logprobs=None if logprobs is None else [float(value) for value in logprobs],
        policy_versions=list(given("policy_versions", [0] * len(mask))),
        group_id=group_id,
        trajectory_id=str(columns["trajectory_ids"][index]),
        is_last_step=bool(columns["is_last_step"][index]),
        stop_reason=str(given("stop_reasons", "stop")),
        media=list(given("media", [])),
        expert_routing=_expert_routing(given("rollout_expert_indices", None), size, index),
        rewards=_rewards(columns["rewards"][index], mask, index),
    )


def _rewards(reward: Any, mask: Sequence[int], row: int) -> dict[int, float]:
    """The nonzero rewards by response token; one number for the row goes on the last token with mask 1."""
    if isinstance(reward, int | float):
        last = len(mask) - 1 - mask[::-1].index(1) if 1 in mask else len(mask) - 1
        return {last: float(reward)} if reward else {}
    if len(reward) != len(mask):
        raise ValueError(
            f"column 'rewards', row {row}, has {len(reward)} entries, but loss_masks has {len(mask)} in that row."
        )
    return {index: float(value) for index, value in enumerate(reward) if value}


def _expert_routing(experts: Any, size: int, row: int) -> list[ExpertRouting | None]:
    """The routing of each token of a row from ``[tokens, layers, top_k]``. The last token, which engines never run, may be missing."""
    if experts is None or not len(experts):
        return []
    indices = np.asarray(experts)
    if indices.ndim != 3 or size - len(indices) not in (0, 1):
        raise ValueError(
            f"column 'rollout_expert_indices', row {row}, must be [tokens, layers, top_k] of its {size} tokens, but its shape is "
            f"{list(indices.shape)}."
        )
    routing = routing_from_indices(np.maximum(indices, 0))
    known = [None if (token < 0).any() else own for token, own in zip(indices, routing, strict=True)]
    return known + [None] * (size - len(indices))
