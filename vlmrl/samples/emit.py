"""Emission: a finished trajectory as samples. Pure functions; tokens are copied, never made."""

from __future__ import annotations

from vlmrl.types import Sample, Trajectory


def concat(trajectory: Trajectory) -> list[Sample]:
    """One sample for the whole episode: the prompt, then all replies and observations.

    Replies have mask 1; observations have mask 0, logprob 0, reward 0. Each turn's reward stands on its last sampled
    token, the final one on the last token of all.
    """
    first = trajectory.turns[0]
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
        stop_reason=trajectory.turns[-1].stop_reason,
    )
    for turn in trajectory.turns:
        observed = [] if turn is first else turn.prompt_ids
        sampled = turn.response_ids
        sample.response_ids += [*observed, *sampled]
        sample.loss_mask += [0] * len(observed) + [1] * len(sampled)
        sample.rollout_logprobs += [0.0] * len(observed) + turn.logprobs
        sample.rewards += [0.0] * (len(observed) + len(sampled))
        sample.policy_versions += turn.policy_versions[:1] * len(observed) + turn.policy_versions
        sample.media += turn.media
        sample.rewards[-1] += turn.reward or 0.0
    sample.rewards[-1] += trajectory.final_reward or 0.0
    return [sample]
