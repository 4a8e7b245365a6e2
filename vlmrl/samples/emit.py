"""Turns a finished trajectory into samples. Token ids are copied from its turns; nothing is rendered or tokenized here.

:data:`EMIT` has the three forms of rows by name; the training loop calls :func:`emit`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from vlmrl.types import ResponseSpan, Sample, Trajectory


def concat(trajectory: Trajectory) -> list[Sample]:
    """One sample for the whole episode: the first prompt, then all responses and observations.

    Responses have mask 1; observations and ``tail_ids`` have mask 0, logprob 0 and reward 0. Each turn's reward is on its last
    sampled token, the final reward and the group's on the last sampled token of all.

    Raises:
        ValueError: a turn's prompt does not continue the previous one, so that the episode is more than one row.
    """
    check_one_row(trajectory)
    turns = trajectory.turns
    row = _row_of(trajectory, 0)
    for number in range(1, len(turns)):
        _drop(row, turns[number - 1].length - turns[number].kept)
        _continue_row(row, trajectory, number)
    unplaced = 0.0  # the rewards of turns none of whose tokens remain in the row
    for span in row.responses:
        unplaced += turns[span.turn].reward or 0.0
        if span.end > span.start:
            _add_reward(row, unplaced, span.end - 1)
            unplaced = 0.0
    _add_reward(row, unplaced + (trajectory.final_reward or 0.0) + (trajectory.group_reward or 0.0))
    if row.expert_routing:
        row.expert_routing += [None] * len(trajectory.tail_ids)
    _append_unsampled(row, trajectory.tail_ids, row.policy_versions[-1])
    row.is_last_step = True
    return [row]


def check_one_row(trajectory: Trajectory) -> None:
    """Raises ValueError if a turn's prompt does not continue the previous one, so that the episode is more than one row."""
    for number in range(1, len(trajectory.turns)):
        turn, above = trajectory.turns[number], trajectory.turns[number - 1]
        if turn.parent != number - 1 or turn.kept < max(above.length - 1, above.prompt_length):
            raise ValueError(
                f"trajectory {trajectory.id}, turn {number}: its prompt does not continue the turn before it, so the episode does not "
                "fit one row: set rollout.samples to step_wise or merged."
            )


def step_wise(trajectory: Trajectory) -> list[Sample]:
    """One sample per turn: the whole prompt that the model saw, and exactly what it sampled, all with mask 1.

    The trajectory's whole reward is on the last token of the last sample.
    """
    return _finished([_row_of(trajectory, number) for number in range(len(trajectory.turns))], trajectory)


def merged(trajectory: Trajectory) -> list[Sample]:
    """One sample for each chain of turns that keep the whole context of the turn before: ``merge_prefixes`` of :func:`step_wise`."""
    rows: list[Sample] = []
    for number in range(len(trajectory.turns)):
        if number and trajectory.continues(number):
            _continue_row(rows[-1], trajectory, number)
        else:
            rows.append(_row_of(trajectory, number))
    return _finished(rows, trajectory)


def _row_of(trajectory: Trajectory, number: int) -> Sample:
    """Turn ``number``'s whole prompt and its response."""
    turn, context = trajectory.turns[number], trajectory.context(number)
    size = len(turn.response_ids)
    return Sample(
        prompt_token_ids=context.token_ids[: turn.prompt_length],
        response_ids=list(turn.response_ids),
        loss_mask=[1] * size,
        rollout_logprobs=list(turn.logprobs),
        policy_versions=list(turn.policy_versions),
        group_id=trajectory.group_id,
        trajectory_id=trajectory.id,
        is_last_step=False,
        stop_reason=turn.stop_reason,
        media=context.media,
        expert_routing=context.expert_routing,
        responses=[ResponseSpan(number, 0, size)],
    )


def _continue_row(row: Sample, trajectory: Trajectory, number: int) -> None:
    """Append what turn ``number`` adds to the row, which ends with the context that it keeps."""
    turn = trajectory.turns[number]
    assert row.rollout_logprobs is not None
    _append_unsampled(row, turn.prompt_ids, turn.policy_versions[0])
    start, size = len(row.response_ids), len(turn.response_ids)
    row.response_ids += turn.response_ids
    row.loss_mask += [1] * size
    row.rollout_logprobs += turn.logprobs
    row.policy_versions += turn.policy_versions
    row.media += turn.media
    row.responses.append(ResponseSpan(number, start, start + size))
    row.stop_reason = turn.stop_reason
    if row.expert_routing and turn.expert_routing:
        row.expert_routing += turn.expert_routing
    else:
        row.expert_routing = []


def _drop(row: Sample, count: int) -> None:
    """Remove the last ``count`` tokens of the row's last response."""
    if not count:
        return
    assert row.rollout_logprobs is not None
    for values in (row.response_ids, row.loss_mask, row.rollout_logprobs, row.policy_versions, row.expert_routing):
        del values[-count:]
    last = row.responses[-1]
    row.responses[-1] = replace(last, end=last.end - count)


def _finished(rows: list[Sample], trajectory: Trajectory) -> list[Sample]:
    """The rows of a trajectory, with its reward on the last one."""
    rows[-1].is_last_step = True
    _add_reward(rows[-1], trajectory.reward or 0.0)
    return rows


def merge_prefixes(samples: Iterable[Sample]) -> list[Sample]:
    """Joins step-wise samples of a trajectory wherever one sample's tokens and images are a prefix of the next prompt.

    What the next prompt adds becomes response with mask 0, logprob 0 and reward 0. Rows without rollout logprobs are joined too, but
    not with rows that have them. Prompt ``[1]`` and response ``[2]``, then
    prompt ``[1, 2, 3]`` and response ``[4]``, become prompt ``[1]`` and response ``[2, 3, 4]`` with mask ``[1, 0, 1]``.
    """
    merged: list[Sample] = []
    for _, rows in groupby(samples, lambda sample: sample.trajectory_id):
        current: Sample | None = None
        for row in rows:
            if current is not None and _is_prefix(current, row):
                _append_sample(current, row)
            else:
                current = replace(row, **{name: copy.copy(value) for name, value in vars(row).items()})
                merged.append(current)
    return merged


EMIT: dict[str, Callable[[Trajectory], list[Sample]]] = {
    "concat": concat,
    "step_wise": step_wise,
    "merged": merged,
}


def emit(trajectory: Trajectory, how: str) -> list[Sample]:
    """The trajectory's rows: those that the rollout already made, otherwise ``EMIT[how]`` of its turns."""
    return trajectory.samples if trajectory.samples is not None else EMIT[how](trajectory)


def _append_unsampled(sample: Sample, ids: Sequence[int], version: int) -> None:
    """Append tokens that the model did not sample, under the policy version of the response that they belong to."""
    sample.response_ids += ids
    sample.loss_mask += [0] * len(ids)
    if sample.rollout_logprobs is not None:
        sample.rollout_logprobs += [0.0] * len(ids)
    sample.policy_versions += [version] * len(ids)


def _add_reward(sample: Sample, reward: float, index: int | None = None) -> None:
    """Add to the reward of a response token, by default the last."""
    if reward:
        place = len(sample.response_ids) - 1 if index is None else index
        sample.rewards[place] = sample.rewards.get(place, 0.0) + reward


def _is_prefix(sample: Sample, following: Sample) -> bool:
    """Whether the next prompt begins with all of this sample's tokens and images."""
    return (
        (sample.rollout_logprobs is None) == (following.rollout_logprobs is None)
        and following.prompt_token_ids[: len(sample)] == sample.token_ids
        and following.image_ids[: len(sample.media)] == sample.image_ids
    )


def _append_sample(sample: Sample, following: Sample) -> None:
    _append_unsampled(sample, following.prompt_token_ids[len(sample) :], following.policy_versions[0])
    start = len(sample.response_ids)
    sample.rewards |= {start + index: reward for index, reward in following.rewards.items()}
    sample.response_ids += following.response_ids
    sample.loss_mask += following.loss_mask
    if sample.rollout_logprobs is not None and following.rollout_logprobs is not None:
        sample.rollout_logprobs += following.rollout_logprobs
    sample.policy_versions += following.policy_versions
    sample.responses += [replace(span, start=start + span.start, end=start + span.end) for span in following.responses]
    sample.media, sample.expert_routing = list(following.media), list(following.expert_routing)
    sample.is_last_step, sample.stop_reason = following.is_last_step, following.stop_reason
