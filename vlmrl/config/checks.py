"""Rules between settings of different sections. Each function raises ValueError if ``config`` violates one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.config.data import Part, check_env_or_reward, check_held_out
from vlmrl.config.fields import require

if TYPE_CHECKING:
    from vlmrl.config.run import Config


def check_data(config: Config) -> None:
    check_held_out("data", config.data, "eval.data", config.eval.data)
    if config.mixture and config.data.is_set:
        raise ValueError("data and mixture exclude each other: make data a part of the mixture, or leave one unset.")
    if config.mixture and config.eval.data.is_set:
        raise ValueError("eval.data and mixture exclude each other: set mixture.NAME.eval_data, which has NAME's env.")
    for name in config.mixture:
        require(name.isidentifier(), "mixture", "named by identifiers", name)


def check_episodes(config: Config) -> None:
    """The env, reward function or agent loop, and the limits of an episode."""
    check_env_or_reward("", config.env, config.reward)
    rollout = config.rollout
    parts: list[Config | Part] = [config, *config.mixture.values()]
    has_env = any(part.env is not None or part.reward is not None for part in parts)
    if rollout.generate is not None and has_env:
        raise ValueError("rollout.generate plays whole episodes itself, so env and reward must be unset.")
    if config.reward is not None:
        require(rollout.max_turns == 1, "rollout.max_turns", "1 with a reward function", rollout.max_turns)
    reply, total = rollout.max_reply_tokens, rollout.max_tokens
    require(reply < total, "rollout.max_reply_tokens", f"less than rollout.max_tokens ({total})", reply)
    if config.deterministic and rollout.over_sampling > 1:
        raise ValueError(
            "rollout.over_sampling must be 1 with deterministic: the order in which groups finish is not reproducible."
        )


def check_samples(config: Config) -> None:
    """Requirements of the algorithm on the form of the samples."""
    algo, rollout = config.algo, config.rollout
    if rollout.samples == "step_wise" and algo.advantage == "reinforce_pp":
        raise ValueError(
            "algo.advantage reinforce_pp is defined over batches of one sample per episode, but step-wise samples count an episode "
            "once per turn: set rollout.samples to concat or merged, or algo.advantage to grpo or rloo."
        )
    if rollout.needs_rendered_rows and (algo.corrections or algo.old_policy == "rollout"):
        name = f"algo.corrections {list(algo.corrections)}" if algo.corrections else "algo.old_policy rollout"
        raise ValueError(
            f"{name} must be unset with re-rendered samples (rollout.history rerender with rollout.samples concat), which have no "
            "rollout logprobs: set rollout.samples to step_wise."
        )
    if rollout.needs_rendered_rows and algo.credit == "turn":
        raise ValueError(
            "algo.credit turn needs the tokens of each turn: set rollout.samples to step_wise with rollout.history rerender."
        )
    if config.train.shuffle_rewards and algo.credit == "turn":
        raise ValueError("train.shuffle_rewards shuffles the rewards of whole episodes: set algo.credit to trajectory.")


def check_asynchronous(config: Config) -> None:
    """Settings that exclude asynchronous rollouts (``train.max_staleness`` above 0)."""
    if not config.train.max_staleness:
        return
    if config.deterministic:
        raise ValueError(
            "train.max_staleness must be 0 with deterministic: the order in which groups finish is not reproducible."
        )
    if config.rollout.over_sampling > 1:
        raise ValueError(
            "rollout.over_sampling must be 1 with train.max_staleness above 0: the trainer does not wait for stragglers."
        )
    if config.train.too_old == "correct":
        _check_correction(config)
    if config.cluster.gpus and config.cluster.colocate:
        raise ValueError(
            "cluster.colocate must be False or unset with train.max_staleness above 0: engines sample during training, so they "
            "need GPUs of their own."
        )


def _check_correction(config: Config) -> None:
    if config.rollout.needs_rendered_rows:
        raise ValueError(
            "train.too_old correct needs rollout logprobs, which re-rendered samples (rollout.history rerender with rollout.samples "
            "concat) do not have: set rollout.samples to step_wise."
        )
