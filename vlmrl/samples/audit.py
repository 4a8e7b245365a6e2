"""The audit: every batch is checked against the trajectories it came from, before it is trained on.

A rule that is broken raises :class:`AuditError` naming the trajectory, the turn, the picture and the numbers. The loop
calls :func:`audit` on each batch; who makes samples by hand can call it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, compress, groupby, pairwise, zip_longest

import numpy as np

from vlmrl.types import Sample, Trajectory

TOLERANCE = 1e-6


class AuditError(ValueError):
    """A batch that must not be trained on."""


def audit(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory] | None = None,
    *,
    image_token_id: int | None = None,
    banned_ids: Collection[int] = (),
) -> None:
    """Check the rules of a batch; with ``trajectories``, also that what is trained is what was sampled.

    ``image_token_id`` is the model's picture placeholder, ``banned_ids`` the ids that can never have been sampled.
    """
    if not samples:
        raise AuditError("the batch holds no samples.")
    for row, sample in enumerate(samples):
        _check_lengths(sample)
        _check_values(samples, row, list(banned_ids))
        _check_pictures(samples, row, image_token_id)
    _check_order(samples)
    if trajectories is not None:
        _check_origin(samples, trajectories)


def _check_lengths(sample: Sample) -> None:
    size = len(sample.response_ids)
    for name in ("loss_mask", "rollout_logprobs", "rewards", "policy_versions"):
        length = len(getattr(sample, name))
        if length != size:
            raise AuditError(
                f"trajectory {sample.trajectory_id}: {name} has {length} entries, but response_ids has {size}."
            )
    if not sample.prompt_token_ids or not size:
        raise AuditError(
            f"trajectory {sample.trajectory_id}: prompt and response must not be empty, but have "
            f"{len(sample.prompt_token_ids)} and {size} tokens."
        )


def _check_values(samples: Sequence[Sample], row: int, banned_ids: list[int]) -> None:
    sample = samples[row]
    name = sample.trajectory_id
    if not set(sample.loss_mask) <= {0, 1}:
        raise AuditError(
            f"trajectory {name}: loss_mask must hold 0 and 1 only, but it holds {sorted(set(sample.loss_mask))}."
        )
    sampled = np.array(sample.loss_mask, dtype=bool)
    if not sampled.any():
        raise AuditError(f"trajectory {name}: no token has mask 1, so there is nothing to train on.")
    logprobs, rewards = np.array(sample.rollout_logprobs, dtype=float), np.array(sample.rewards, dtype=float)
    paid = rewards != 0
    paid[-1] = False  # the final reward may stand on a last token that was not sampled
    rules = (
        (
            ~np.isfinite(logprobs) | (logprobs > TOLERANCE),
            "rollout_logprobs must be finite and at most 0, but it is {logprob}.",
        ),
        (~np.isfinite(rewards), "rewards must be finite, but it is {reward}."),
        (
            ~sampled & ((logprobs != 0) | paid),
            "it was not sampled (mask 0), so its logprob and reward must be 0, but they are {logprob} and {reward}.",
        ),
        (
            sampled & np.isin(sample.response_ids, banned_ids),
            "the banned id {token}, a media placeholder, was sampled.",
        ),
    )
    for broken, message in rules:
        if broken.any():
            place = int(broken.argmax())
            numbers = message.format(
                logprob=sample.rollout_logprobs[place], reward=sample.rewards[place], token=sample.response_ids[place]
            )
            raise AuditError(
                f"trajectory {name}, turn {_turn_of(samples, row, place)}, response token {place}: {numbers}"
            )


def _check_pictures(samples: Sequence[Sample], row: int, image_token_id: int | None) -> None:
    """Each run of placeholders is one picture's, in order, and as long as its grid says."""
    sample = samples[row]
    name = sample.trajectory_id
    if image_token_id is None:
        if sample.media:
            raise AuditError(f"trajectory {name}: {len(sample.media)} pictures in a batch for a text model.")
        return
    edges = np.flatnonzero(np.diff(np.array(sample.token_ids) == image_token_id, prepend=False, append=False))
    runs = [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    if len(runs) != len(sample.media):
        raise AuditError(
            f"trajectory {name}: the row shows {len(runs)} pictures (runs of {[size for _, size in runs]} placeholder "
            f"tokens), but holds {len(sample.media)} ({', '.join(sample.image_ids) or 'none'})."
        )
    for index, ((start, size), item) in enumerate(zip(runs, sample.media, strict=True)):
        if size != item.num_tokens:
            turn = _turn_of(samples, row, start - len(sample.prompt_token_ids))
            raise AuditError(
                f"trajectory {name}, turn {turn}, picture {index} ({item.id}): {size} placeholder tokens stand in the "
                f"row, but its grid {item.mm_inputs['image_grid_thw'][0].tolist()} makes {item.num_tokens}."
            )


def _check_order(samples: Sequence[Sample]) -> None:
    """A trajectory's rows are contiguous, and the last of them, alone, is a last step."""
    runs = [(name, [s.is_last_step for s in rows]) for name, rows in groupby(samples, lambda s: s.trajectory_id)]
    for name, count in Counter(name for name, _ in runs).items():
        if count > 1:
            raise AuditError(f"trajectory {name}: its rows are not contiguous in the batch.")
    for name, flags in runs:
        if flags != [False] * (len(flags) - 1) + [True]:
            raise AuditError(f"trajectory {name}: is_last_step must be set on its last row alone, but it is {flags}.")


def _check_origin(samples: Sequence[Sample], trajectories: Sequence[Trajectory]) -> None:
    """Every sampled token is trained once, as it was sampled, and the rewards add up to the trajectory's."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    for name, group in groupby(samples, lambda s: s.trajectory_id):
        rows = list(group)
        trajectory = by_id.pop(name, None)
        if trajectory is None:
            raise AuditError(f"trajectory {name} is in the batch, but it was never played.")
        if trajectory.failed:
            raise AuditError(f"trajectory {name} failed ({trajectory.error}) and must not be trained on.")
        _compare_tokens(trajectory, rows)
        for row in rows:
            _compare_pictures(trajectory, row)
        reward = sum(row.reward for row in rows)
        if trajectory.reward is None or not math.isclose(
            reward, trajectory.reward, rel_tol=TOLERANCE, abs_tol=TOLERANCE
        ):
            raise AuditError(
                f"trajectory {name}: the rows' rewards add up to {reward}, but the trajectory's is {trajectory.reward}."
            )
    if by_id:
        raise AuditError(f"trajectories {sorted(by_id)} were played, but are not in the batch.")


def _compare_tokens(trajectory: Trajectory, rows: Sequence[Sample]) -> None:
    """What has mask 1 in the rows is what the turns sampled: ids and logprobs, in order."""
    turns = trajectory.turns
    ids = list(chain.from_iterable(compress(row.response_ids, row.loss_mask) for row in rows))
    logprobs = list(chain.from_iterable(compress(row.rollout_logprobs, row.loss_mask) for row in rows))
    if ids == list(chain.from_iterable(turn.response_ids for turn in turns)) and logprobs == list(
        chain.from_iterable(turn.logprobs for turn in turns)
    ):
        return
    places = [(turn, place) for turn, t in enumerate(turns) for place in range(len(t.response_ids))]
    sampled = [(turns[turn].response_ids[place], turns[turn].logprobs[place]) for turn, place in places]
    trained = list(zip(ids, logprobs, strict=True))
    counts = f"{len(sampled)} tokens were sampled and {len(trained)} have mask 1"
    for where, wanted, found in zip_longest(places, sampled, trained):
        if where is None:
            raise AuditError(
                f"trajectory {trajectory.id}: {counts}; the first that was never sampled is (id, logprob) {found}."
            )
        if wanted != found:
            raise AuditError(
                f"trajectory {trajectory.id}, turn {where[0]}: at token {where[1]} of the reply (id, logprob) {wanted} "
                f"was sampled, but {found or 'nothing'} is trained; {counts}."
            )


def _compare_pictures(trajectory: Trajectory, row: Sample) -> None:
    """A row's pictures are those the env showed, from the first on; the last row's are all of them."""
    shown = [(item.id, turn) for turn, t in enumerate(trajectory.turns) for item in t.media]
    wanted = shown if row.is_last_step else shown[: len(row.media)]
    for index, (pair, held) in enumerate(zip_longest(wanted, row.image_ids)):
        picture, turn = pair or ("nothing", len(trajectory.turns) - 1)
        if picture != held:
            raise AuditError(
                f"trajectory {trajectory.id}, turn {turn}, picture {index}: the env showed {picture}, but the row "
                f"holds {held or 'nothing'} ({len(shown)} pictures were shown, the row holds {len(row.media)})."
            )


def _turn_of(samples: Sequence[Sample], row: int, place: int) -> int:
    """The turn of a row's response token: how many replies ended before it, also in the trajectory's earlier rows.

    With the mask ``[1, 1, 0, 1]``, tokens 0 and 1 are of turn 0, the observation and the next reply of turn 1. A token
    of the prompt (``place < 0``) counts as one of the row's first turn.
    """
    before = [s.loss_mask for s in samples[:row] if s.trajectory_id == samples[row].trajectory_id]
    mask = [*chain.from_iterable([*earlier, 0] for earlier in before), *samples[row].loss_mask[: max(place, 0) + 1]]
    return sum(a > b for a, b in pairwise(mask))
