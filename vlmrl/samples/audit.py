"""The audit: every batch is checked against the trajectories it came from, before it is trained on.

A rule that is broken raises :class:`AuditError` naming the trajectory, the turn, the picture and the numbers. The loop calls
:func:`audit` on each batch; who makes samples by hand can call it too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby, islice

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
    for sample in samples:
        _check_lengths(sample)
        _check_values(sample, banned_ids)
        _check_pictures(sample, image_token_id)
    _check_order(samples)
    if trajectories is not None:
        _check_origin(samples, trajectories)


def _check_lengths(sample: Sample) -> None:
    size = len(sample.response_ids)
    for name in ("loss_mask", "rollout_logprobs", "rewards", "policy_versions"):
        length = len(getattr(sample, name))
        if length != size:
            raise AuditError(f"trajectory {sample.trajectory_id}: {name} has {length} entries, but response_ids has {size}.")
    if not sample.prompt_token_ids or not size:
        raise AuditError(
            f"trajectory {sample.trajectory_id}: prompt and response must not be empty, but have {len(sample.prompt_token_ids)} "
            f"and {size} tokens."
        )


def _check_values(sample: Sample, banned_ids: Collection[int]) -> None:
    name = sample.trajectory_id
    if not set(sample.loss_mask) <= {0, 1}:
        raise AuditError(f"trajectory {name}: loss_mask must hold 0 and 1 only, but it holds {sorted(set(sample.loss_mask))}.")
    if not any(sample.loss_mask):
        raise AuditError(f"trajectory {name}: no token has mask 1, so there is nothing to train on.")
    for place, (mask, logprob, reward) in enumerate(zip(sample.loss_mask, sample.rollout_logprobs, sample.rewards, strict=True)):
        where = f"trajectory {name}, turn {_turn_of(sample, place)}, response token {place}"
        if not math.isfinite(logprob) or logprob > TOLERANCE:
            raise AuditError(f"{where}: rollout_logprobs must be finite and at most 0, but it is {logprob}.")
        if not math.isfinite(reward):
            raise AuditError(f"{where}: rewards must be finite, but it is {reward}.")
        if not mask and (logprob or (reward and place + 1 < len(sample.rewards))):
            raise AuditError(f"{where} was not sampled (mask 0), so its logprob and reward must be 0, but they are {logprob} and {reward}.")
        if mask and sample.response_ids[place] in banned_ids:
            raise AuditError(f"{where}: the banned id {sample.response_ids[place]}, a media placeholder, was sampled.")


def _check_pictures(sample: Sample, image_token_id: int | None) -> None:
    """Each run of placeholders is one picture's, in order, and as long as its grid says."""
    if image_token_id is None:
        if sample.media:
            raise AuditError(f"trajectory {sample.trajectory_id}: {len(sample.media)} pictures in a batch for a text model.")
        return
    place = -len(sample.prompt_token_ids)
    runs: list[tuple[int, int]] = []
    for is_image, run in groupby(sample.token_ids, lambda token: token == image_token_id):
        size = sum(1 for _ in run)
        if is_image:
            runs.append((place, size))
        place += size
    for index, ((start, size), item) in enumerate(zip(runs, sample.media, strict=False)):
        if size != item.num_tokens:
            raise AuditError(
                f"trajectory {sample.trajectory_id}, turn {_turn_of(sample, start)}, picture {index} ({item.id}): {size} placeholder "
                f"tokens stand in the row, but its grid {item.mm_inputs['image_grid_thw'][0].tolist()} makes {item.num_tokens}."
            )
    if len(runs) != len(sample.media):
        raise AuditError(
            f"trajectory {sample.trajectory_id}: the row shows {len(runs)} pictures, but holds {len(sample.media)} "
            f"({', '.join(sample.image_ids) or 'none'})."
        )


def _check_order(samples: Sequence[Sample]) -> None:
    """A trajectory's rows are contiguous, and the last of them, alone, is a last step."""
    runs = [(name, [s.is_last_step for s in rows]) for name, rows in groupby(samples, lambda s: s.trajectory_id)]
    names = [name for name, _ in runs]
    for name in names:
        if names.count(name) > 1:
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
        trained = (
            (token, logprob)
            for row in rows
            for token, logprob, mask in zip(row.response_ids, row.rollout_logprobs, row.loss_mask, strict=True)
            if mask
        )
        for index, turn in enumerate(trajectory.turns):
            sampled = list(zip(turn.response_ids, turn.logprobs, strict=True))
            _compare_turn(name, index, sampled, list(islice(trained, len(sampled))))
        if extra := list(trained):
            raise AuditError(f"trajectory {name}: {len(extra)} tokens have mask 1 that were never sampled, the first is {extra[0][0]}.")
        _compare_pictures(trajectory, rows[-1])
        reward = sum(row.reward for row in rows)
        if trajectory.reward is None or not math.isclose(reward, trajectory.reward, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise AuditError(f"trajectory {name}: the rows' rewards add up to {reward}, but the trajectory's is {trajectory.reward}.")
    if by_id:
        raise AuditError(f"trajectories {sorted(by_id)} were played, but are not in the batch.")


def _compare_turn(name: str, turn: int, sampled: list[tuple[int, float]], trained: list[tuple[int, float]]) -> None:
    if trained == sampled:
        return
    place = next((i for i, (a, b) in enumerate(zip(sampled, trained, strict=False)) if a != b), len(trained))
    found = trained[place] if place < len(trained) else "nothing"
    wanted = sampled[place] if place < len(sampled) else "nothing"
    raise AuditError(
        f"trajectory {name}, turn {turn}: {len(trained)} of {len(sampled)} sampled tokens are trained; at token {place} of the reply "
        f"(id, logprob) {wanted} was sampled, but {found} is trained."
    )


def _compare_pictures(trajectory: Trajectory, last_row: Sample) -> None:
    shown = [item.id for turn in trajectory.turns for item in turn.media]
    if last_row.image_ids != shown:
        place = next((i for i, (a, b) in enumerate(zip(shown, last_row.image_ids, strict=False)) if a != b), "the end")
        raise AuditError(
            f"trajectory {trajectory.id}: the env showed the pictures {shown}, but the row holds {last_row.image_ids}; they differ at {place}."
        )


def _turn_of(sample: Sample, place: int) -> int:
    """The turn of a response token: how many replies have begun before it, counting its own observation to the next one."""
    if place <= 0:
        return 0
    begun = sum(1 for key, _ in groupby(sample.loss_mask[:place]) if key)
    return begun - 1 if sample.loss_mask[place - 1] and place < len(sample.loss_mask) and sample.loss_mask[place] else begun
