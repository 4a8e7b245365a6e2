"""Emission: a finished trajectory as samples. Pure functions; tokens are copied, never made.

:data:`EMIT` names the three ways; :func:`emit` is what the loop calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from vlmrl.types import Sample, Trajectory


def concat(trajectory: Trajectory) -> list[Sample]:
    """One sample for the whole episode: the prompt, then all replies and observations.

    Replies have mask 1; observations have mask 0, logprob 0, reward 0. Each turn's reward stands on its last sampled
    token, the final one and the group's on the last of all; ``tail_ids`` follow, untrained. Raises ValueError where a turn's
    prompt did not go on from what came before.
    """
    first, last = trajectory.turns[0], trajectory.turns[-1]
    sample = Sample(
        prompt_token_ids=list(first.prompt_ids),
        response_ids=[],
        loss_mask=[],
        rollout_logprobs=[],
        rewards=[],
        policy_versions=[],
        group_id=trajectory.group_id,
        trajectory_id=trajectory.id,
        is_last_step=True,
        stop_reason=last.stop_reason,
    )
    *_, sample.expert_routing = trajectory.expert_routing()
    carried = 0.0  # the reward of a turn none of whose tokens is left
    for number, turn in enumerate(trajectory.turns):
        if number and turn.kept is not None:
            raise ValueError(
                f"trajectory {trajectory.id}, turn {number}: its prompt was rendered anew, so the episode is no single row; "
                "emit it with step_wise or merge_prefixes (rollout.samples)."
            )
        if number:
            _observe(sample, turn.prompt_ids, turn.policy_versions[0])
        trained = len(turn.response_ids) - turn.dropped
        sample.response_ids += turn.response_ids[:trained]
        sample.loss_mask += [1] * trained
        sample.rollout_logprobs += turn.logprobs[:trained]  # type: ignore[operator]
        sample.rewards += [0.0] * trained
        sample.policy_versions += turn.policy_versions[:trained]
        sample.media += turn.media
        carried += turn.reward or 0.0
        if trained:
            sample.rewards[-1] += carried
            carried = 0.0
    sample.rewards[-1] += carried + (trajectory.final_reward or 0.0) + (trajectory.group_reward or 0.0)
    if sample.expert_routing:
        del sample.expert_routing[len(sample) :]  # of tokens that were dropped
        sample.expert_routing += [None] * len(trajectory.tail_ids)
    _observe(sample, trajectory.tail_ids, sample.policy_versions[-1])
    return [sample]


def step_wise(trajectory: Trajectory) -> list[Sample]:
    """One sample per turn: the whole prompt that the model saw, and exactly what it sampled, all of it with mask 1.

    The trajectory's whole reward stands on the last token of the last sample; the others have none.
    """
    samples = []
    for turn, (prompt_ids, media), routes in zip(
        trajectory.turns, trajectory.prompts(), trajectory.expert_routing(), strict=True
    ):
        length, is_last = len(turn.response_ids), turn is trajectory.turns[-1]
        reward = trajectory.reward or 0.0 if is_last else 0.0
        samples.append(
            Sample(
                prompt_token_ids=list(prompt_ids),
                response_ids=list(turn.response_ids),
                loss_mask=[1] * length,
                rollout_logprobs=list(turn.logprobs),
                rewards=[0.0] * (length - 1) + [reward],
                policy_versions=list(turn.policy_versions),
                group_id=trajectory.group_id,
                trajectory_id=trajectory.id,
                is_last_step=is_last,
                stop_reason=turn.stop_reason,
                media=list(media),
                expert_routing=list(routes),
            )
        )
    return samples


def merge_prefixes(samples: Sequence[Sample]) -> list[Sample]:
    """Step-wise samples joined, trajectory by trajectory, wherever one's tokens and images begin the next one's prompt.

    What the next prompt adds joins the response with mask 0, logprob 0 and reward 0. Prompt ``[1]`` and reply ``[2]``, then
    prompt ``[1, 2, 3]`` and reply ``[4]``, become prompt ``[1]`` and response ``[2, 3, 4]`` with mask ``[1, 0, 1]``.
    """
    merged: list[Sample] = []
    for _, rows in groupby(samples, lambda sample: sample.trajectory_id):
        current: Sample | None = None
        for row in rows:
            if current is not None and _begins(current, row):
                _join(current, row)
            else:
                current = _copy(row)
                merged.append(current)
    return merged


def emit(trajectory: Trajectory, how: str) -> list[Sample]:
    """The trajectory's rows: those made while it was played, if there are any, otherwise by ``EMIT[how]``."""
    return trajectory.samples if trajectory.samples is not None else EMIT[how](trajectory)


def _observe(sample: Sample, ids: Sequence[int], version: int) -> None:
    """Add tokens that were not sampled."""
    assert sample.rollout_logprobs is not None
    sample.response_ids += ids
    sample.loss_mask += [0] * len(ids)
    sample.rollout_logprobs += [0.0] * len(ids)
    sample.rewards += [0.0] * len(ids)
    sample.policy_versions += [version] * len(ids)


def _begins(sample: Sample, following: Sample) -> bool:
    """Whether the next prompt begins with all of this sample, its images included."""
    return (
        sample.rollout_logprobs is not None
        and following.rollout_logprobs is not None
        and following.prompt_token_ids[: len(sample)] == sample.token_ids
        and following.image_ids[: len(sample.media)] == sample.image_ids
    )


def _join(sample: Sample, following: Sample) -> None:
    assert sample.rollout_logprobs is not None and following.rollout_logprobs is not None
    _observe(sample, following.prompt_token_ids[len(sample) :], following.policy_versions[0])
    sample.response_ids += following.response_ids
    sample.loss_mask += following.loss_mask
    sample.rollout_logprobs += following.rollout_logprobs
    sample.rewards += following.rewards
    sample.policy_versions += following.policy_versions
    sample.media, sample.expert_routing = list(following.media), list(following.expert_routing)
    sample.is_last_step, sample.stop_reason = following.is_last_step, following.stop_reason


def _copy(sample: Sample) -> Sample:
    """The same row with lists of its own."""
    return replace(sample, **{name: list(value) for name, value in vars(sample).items() if isinstance(value, list)})  # type: ignore[arg-type]


def _merged(trajectory: Trajectory) -> list[Sample]:
    return merge_prefixes(step_wise(trajectory))


EMIT: dict[str, Callable[[Trajectory], list[Sample]]] = {
    "concat": concat,
    "step_wise": step_wise,
    "merged": _merged,
}
