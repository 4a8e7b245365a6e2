"""Samples as columns, the field's usual generator output, and back. A user's own generator may return its episode in this form.

    {"prompt_token_ids": [[1, 2]], "response_ids": [[5, 6]], "loss_masks": [[1, 1]], "rollout_logprobs": [[-.1, -.2]],
     "rewards": [1.0], "stop_reasons": ["stop"], "trajectory_ids": ["step1/0/0"], "is_last_step": [True],
     "rollout_metrics": {"calls": 2.0}, "rollout_expert_indices": None}

Every column has one entry per row, except ``rollout_metrics``, whose numbers describe the whole batch. ``rewards`` has one number
per row, or one per response token. The optional columns ``group_ids``, ``policy_versions`` and ``media`` (each row's
:class:`~vlmrl.types.MediaItem` list) complete a sample. For a mixture of experts, ``rollout_expert_indices`` has
``[tokens, layers, top_k]`` for each row, prompt tokens included; -1 means not known. Columns, rows and numbers may be those of Python,
numpy or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast
from uuid import UUID

import numpy as np
import torch

from vlmrl.model.expert_routing import indices_from_routing, routing_from_indices
from vlmrl.types import ExpertRouting, MediaItem, Sample

REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "trajectory_ids", "is_last_step")
OPTIONAL = ("stop_reasons", "rollout_logprobs", "rollout_expert_indices", "group_ids", "policy_versions", "media")
OF_THE_BATCH = ("rollout_metrics",)

MAX_ID = 2**31 - 1


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

    Without ``group_ids``, the trajectory's id names its group. ``step1/0/3`` is in group ``step1/0``. ``instance_3``, or an object
    with ``instance_id`` and ``repetition_id`` (SkyRL's form of an id), is in group ``instance``. Any other id is a group of its own.
    The audit checks the values later.

    Raises:
        ValueError: a column is missing, unknown, or has the wrong number of rows, tokens or dimensions, or an entry is of another kind
            than its column.
    """
    columns = {name: _plain(column) for name, column in columns.items()}
    size = _check(columns)
    return [_row(columns, index, *_names(columns, index)) for index in range(size)]


def rollout_metrics(columns: Mapping[str, Any]) -> dict[str, float]:
    """The batch's metrics in columns. Raises ValueError unless each is one finite number."""
    given = columns.get("rollout_metrics") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rollout_metrics must be numbers by name, but it is {given!r:.100}.")
    metrics = {}
    for name, value in given.items():
        number = _number(value)
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"rollout_metrics[{name!r}] must be one finite number of the whole batch, but it is {value!r:.100}."
            )
        metrics[str(name)] = float(number)
    return metrics


def _check(columns: Mapping[str, Any]) -> int:
    """Check names, numbers of rows and metrics. Returns the number of rows."""
    for name in columns:
        if name not in (*REQUIRED, *OPTIONAL, *OF_THE_BATCH):
            raise ValueError(
                f"column {name!r} is not known; there are {', '.join((*REQUIRED, *OPTIONAL, *OF_THE_BATCH))}."
            )
    for name in (*REQUIRED, *OPTIONAL):
        column = columns.get(name)
        if column is None and name in REQUIRED:
            raise ValueError(f"column {name!r} must be given.")
        if not isinstance(column, list | tuple | None):
            raise ValueError(f"column {name!r} must be a list with an entry per row, but it is {column!r:.100}.")
    size = len(columns["prompt_token_ids"])
    for name in (*REQUIRED, *OPTIONAL):
        if columns.get(name) is not None and len(columns[name]) != size:
            raise ValueError(f"column {name!r} has {len(columns[name])} rows, but prompt_token_ids has {size}.")
    rollout_metrics(columns)
    return size


def _names(columns: Mapping[str, Any], row: int) -> tuple[str, str]:
    """The ids of a row's trajectory and group."""
    given = columns["trajectory_ids"][row]
    if hasattr(given, "instance_id"):
        name, group = f"{given.instance_id}_{getattr(given, 'repetition_id', 0)}", str(given.instance_id)
    else:
        name = group = _name(columns, "trajectory_ids", row)
        instance, _, repetition = name.rpartition("_")
        if "/" in name:
            group = name.rpartition("/")[0]
        elif instance and repetition.isdecimal():
            group = instance
    return name, group if columns.get("group_ids") is None else _name(columns, "group_ids", row)


def _name(columns: Mapping[str, Any], column: str, row: int) -> str:
    value = _plain(columns[column][row])
    if not isinstance(value, str | int | UUID):
        raise _wrong(column, row, "a string or a number that names it", value)
    return str(value)


def _row(columns: Mapping[str, Any], row: int, trajectory_id: str, group_id: str) -> Sample:
    def given(name: str, otherwise: Any) -> Any:
        return otherwise if columns.get(name) is None else columns[name][row]

    prompt_ids = _integers("prompt_token_ids", row, given("prompt_token_ids", None), "a token id", 0, MAX_ID)
    response_ids = _integers("response_ids", row, given("response_ids", None), "a token id", 0, MAX_ID)
    mask = _integers("loss_masks", row, given("loss_masks", None), "0 or 1", 0, 1)
    versions = given("policy_versions", [0] * len(mask))
    logprobs, stop_reason, media = given("rollout_logprobs", None), given("stop_reasons", "stop"), given("media", [])
    rollout_logprobs = None if logprobs is None else _floats("rollout_logprobs", row, logprobs)
    policy_versions = _integers("policy_versions", row, versions, "a whole number", -MAX_ID, MAX_ID)
    by_token = {"loss_masks": mask, "rollout_logprobs": rollout_logprobs, "policy_versions": policy_versions}
    _check_lengths(row, response_ids, by_token)
    if not isinstance(stop_reason, str):
        raise _wrong("stop_reasons", row, "a string", stop_reason)
    if not isinstance(media, list | tuple) or not all(isinstance(item, MediaItem) for item in media):
        raise _wrong("media", row, "a list of MediaItem", media)
    return Sample(
        prompt_token_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=mask,
        rollout_logprobs=rollout_logprobs,
        policy_versions=policy_versions,
        group_id=group_id,
        trajectory_id=trajectory_id,
        is_last_step=bool(_integer("is_last_step", row, columns["is_last_step"][row], "true or false", 0, 1)),
        stop_reason=stop_reason,
        media=list(media),
        expert_routing=_expert_routing(given("rollout_expert_indices", None), len(prompt_ids) + len(mask), row),
        rewards=_rewards(columns["rewards"][row], mask, row),
    )


def _check_lengths(row: int, response_ids: Sequence[int], by_token: Mapping[str, Sequence[float] | None]) -> None:
    """Raises ValueError unless every column in ``by_token`` has an entry per response token: merged rows would not show it."""
    size = len(response_ids)
    if not size:
        raise ValueError(f"column 'response_ids', row {row}, must have one token or more, but it has none.")
    for name, values in by_token.items():
        if values is not None and len(values) != size:
            raise ValueError(
                f"column {name!r}, row {row}, has {len(values)} entries, but response_ids has {size} in that row."
            )


def _rewards(given: Any, mask: Sequence[int], row: int) -> dict[int, float]:
    """The nonzero rewards by response token; one number for the row goes on the last token with mask 1."""
    reward = _number(given)
    if reward is not None:
        last = len(mask) - 1 - mask[::-1].index(1) if 1 in mask else len(mask) - 1
        return {last: float(reward)} if reward else {}
    rewards = _floats("rewards", row, given)
    if len(rewards) != len(mask):
        raise ValueError(
            f"column 'rewards', row {row}, has {len(rewards)} entries, but loss_masks has {len(mask)} in that row."
        )
    return {index: value for index, value in enumerate(rewards) if value}


def _expert_routing(experts: Any, size: int, row: int) -> list[ExpertRouting | None]:
    """The routing of each token of a row from ``[tokens, layers, top_k]``. The last token, which engines never run, may be missing."""
    if experts is None or (isinstance(experts, list | tuple) and not experts):
        return []
    try:
        indices = np.asarray(experts)
    except ValueError:  # lists of unequal lengths
        indices = np.asarray(experts, dtype=object)
    if indices.ndim != 3 or size - len(indices) not in (0, 1):
        raise ValueError(
            f"column 'rollout_expert_indices', row {row}, must be [tokens, layers, top_k] of its {size} tokens, but its shape is "
            f"{list(indices.shape)}."
        )
    if indices.dtype.kind not in "iu" or not ((indices >= -1) & (indices < 2**16)).all():
        raise _wrong("rollout_expert_indices", row, "the numbers of experts, or -1", experts)
    routing = routing_from_indices(np.maximum(indices, 0))
    known = [None if (token < 0).any() else own for token, own in zip(indices, routing, strict=True)]
    return known + [None] * (size - len(indices))


def _integers(column: str, row: int, given: Any, rule: str, low: int, high: int) -> list[int]:
    values = _plain(given)
    if not isinstance(values, list | tuple):
        raise _wrong(column, row, f"a list, each entry {rule}", given)
    array = _as_array(values)
    if array is not None and ((low <= array) & (array <= high) & (array == np.trunc(array))).all():
        return cast("list[int]", array.astype(np.int64).tolist())
    return [_integer(column, row, value, rule, low, high, f", entry {index}") for index, value in enumerate(values)]


def _integer(column: str, row: int, given: Any, rule: str, low: int, high: int, entry: str = "") -> int:
    """A whole number from ``low`` to ``high``, also if it is given as a float or a truth value."""
    number = _number(given)
    if number is None or not low <= number <= high or number != int(number):
        raise _wrong(column, row, rule, given, entry)
    return int(number)


def _floats(column: str, row: int, given: Any) -> list[float]:
    values = _plain(given)
    if not isinstance(values, list | tuple):
        raise _wrong(
            column, row, "a list of numbers, or one number" if column == "rewards" else "a list of numbers", given
        )
    array = _as_array(values)
    if array is not None:
        return cast("list[float]", array.tolist())
    numbers = [_number(value) for value in values]
    if None in numbers:
        index = numbers.index(None)
        raise _wrong(column, row, "a number", values[index], f", entry {index}")
    return [float(number) for number in numbers if number is not None]


def _as_array(values: Sequence[Any]) -> np.ndarray | None:
    """A list of numbers of at most 64 bits as float64; ``None`` for any other, which is read, or refused, entry by entry."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # lists of unequal lengths, tensors on a GPU
        return None
    if array.ndim != 1 or array.dtype.kind not in "iubf":
        return None
    array = array.astype(np.float64)
    return array if (np.abs(array) < 2.0**63).all() else None


def _number(value: Any) -> float | int | None:
    """A number of Python, numpy or torch as one of Python; ``None`` if it is no number, or an integer of more than 64 bits."""
    value = _plain(value)
    if isinstance(value, Integral):
        return int(value) if abs(int(value)) < 2**63 else None
    return float(value) if isinstance(value, float | np.floating) else None


def _plain(value: Any) -> Any:
    """The lists and numbers of an array or a tensor; anything else as it is."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def _wrong(column: str, row: int, rule: str, value: Any, entry: str = "") -> ValueError:
    return ValueError(f"column {column!r}, row {row}{entry}, must be {rule}, but it is {value!r:.100}.")
