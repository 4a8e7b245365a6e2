"""Advisories: what is probably wrong with a run, from its metrics, its last trajectories and its config.

:data:`CHECKS` has them by name; each is a pure function. `advisor.py` prints each one once in a run.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.config import Config
from vlmrl.config.fields import short_name
from vlmrl.types import FAILED, TRUNCATED

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Advisory:
    """One advisory: a line of ``advisories.jsonl``."""

    name: str
    step: int
    message: str
    setting: str
    """The setting to look at first."""


@dataclass(frozen=True)
class Observed:
    """What advisories are drawn from."""

    config: Config
    rows: Sequence[Record]
    """The metrics of the training steps so far, in order."""
    records: Sequence[Record] = ()
    """The trajectories of the last step, failed ones included (see :func:`~vlmrl.report.records.trajectory_record`)."""
    evaluations: Sequence[Record] = ()
    """The metrics of the evaluations so far."""

    @property
    def step(self) -> int:
        rows = self.rows or self.evaluations
        return int(rows[-1]["step"]) if rows else 0

    def values(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    def ends(self, name: str, width: int) -> tuple[list[float], list[float]] | None:
        """A metric's first and last ``width`` values; ``None`` if they would overlap."""
        values = self.values(name)
        return (values[:width], values[-width:]) if len(values) >= 2 * width else None

    def means(self, name: str, width: int = 5) -> tuple[float, float]:
        """The means of :meth:`ends`; where there are none NaN, with which no comparison holds."""
        first, last = self.ends(name, width) or ([math.nan], [math.nan])
        return statistics.fmean(first), statistics.fmean(last)


PAGE = "docs/when_it_does_not_learn.md"
NOT_SHOWN = re.compile(r"^(?>.*?\[This image cannot be shown: )(.*?)\.?\]$", re.M)  # once a line: linear time
LEAST_EPISODES = 4  # fewer say nothing about a step
LEAST_COPIED = 64  # tokens of a summary: a shorter one may be no more than the facts
LEAST_GROUPS = 24  # a step or two without a difference are frequent in runs that learn


def compares_groups(config: Config) -> bool:
    """Whether the advantage compares rewards within a group. A user's own advantages are assumed to do so."""
    return config.rollout.group_size > 1 and config.algo.advantage not in ("none", "reinforce_pp")


def truncated(seen: Observed) -> tuple[str, str] | None:
    """Nine in ten episodes of the step were cut."""
    played = [record for record in seen.records if record["ending"] not in FAILED]
    cut = [record for record in played if record["ending"] in TRUNCATED]
    if len(played) < LEAST_EPISODES or len(cut) < 0.9 * len(played):
        return None
    rollout = seen.config.rollout
    all_cut, has_agent = len(cut) == len(played), seen.config.has_agent  # an agent may go on after a limit
    episodes = "every episode" if all_cut else f"{len(cut)} of {len(played)} episodes"
    shares, rewards = seen.values("truncated"), seen.values("reward/mean")
    if shares and rewards and shares[0] < 0.5 and rewards[-1] < rewards[0]:
        return (
            f"{episodes} reached a limit, and {shares[0]:.0%} in the first step, at a higher reward: the policy no longer ends its "
            "responses. Lower optim.lr, or set algo.kl_coef.",
            "optim.lr",
        )
    if Counter(record["ending"] for record in cut)["length"] < len(cut) / 2:
        whose, before = (f"a request of {episodes}", "") if has_agent else (episodes, " before the env was done")
        return (
            f"{whose} reached rollout.max_tokens ({rollout.max_tokens}){before}: raise it, or lower rollout.max_response_tokens or "
            "model.max_image_pixels.",
            "rollout.max_tokens",
        )
    responses = "every response" if all_cut else f"the last response of {episodes}"
    responses = f"a response of {episodes}" if has_agent else responses
    scoring = [seen.config.reward, *(part.reward for part in seen.config.mixture.values())]  # also cut responses
    before = " before step() was called" if seen.config.episode_setting == "env" and not any(scoring) else ""
    return (
        f"{responses} was cut at rollout.max_response_tokens ({rollout.max_response_tokens}){before}: raise it, or set rollout.stop "
        f"to the text that ends a response{f' (now {list(rollout.stop)})' if rollout.stop else ''}.",
        "rollout.max_response_tokens",
    )


def no_signal(seen: Observed) -> tuple[str, str] | None:
    """In every group of the last steps all members have equal rewards."""
    if not compares_groups(seen.config):
        return None
    groups, steps, rewards = 0, 0, set()
    for row in reversed(seen.rows):
        if not row.get("groups/played") or row["groups/zero_variance"] < row["groups/played"]:
            break
        groups, steps = groups + int(row["groups/played"]), steps + 1
        rewards.add(row["reward/mean"])
    best = max(seen.values("reward/max"), default=0.0)
    is_solved = rewards == {best} and seen.values("reward/mean")[0] not in rewards
    if groups < LEAST_GROUPS or is_solved:
        return None
    known = f" ({rewards.pop():g})" if len(rewards) == 1 else ""
    where = "this step" if steps == 1 else f"the last {steps} steps"
    norm, cut = seen.rows[-1].get("grad_norm"), truncated(seen)
    learned = (
        f"rewards teach nothing; the gradient of norm {norm:.2g} is of other terms" if norm else "nothing is learned"
    )
    why = "the tasks are too hard or too easy, or the reward does not depend on the response. Look at them with vlmrl view"
    if cut is not None:
        why = f"episodes are cut before they can earn a reward. Look at {cut[1]}"
    remedy = "" if seen.config.warm_start.steps else ", or add a warm start"
    return (
        f"in {where} the members of each of the {groups} groups have equal rewards{known}, so that {learned}: {why}{remedy}.",
        "data" if cut is None else cut[1],
    )


def tool_calls_fail(seen: Observed) -> tuple[str, str] | None:
    """Nine in ten tool calls of the last five steps failed."""
    errors = seen.values("env/tool_errors")
    calls = seen.values("env/tool_calls") or [1.0] * len(errors)
    failed = sum(errors[-5:]) / max(sum(calls[-5:]), 1e-9)
    if len(errors) < 5 or failed < 0.9:
        return None
    first = errors[0] / max(calls[0], 1e-9)
    return (
        f"{failed:.0%} of the tool calls of the last five steps failed, and {first:.0%} in the first step: they cannot be parsed, "
        "name no tool, or do not fit its schema. Look at the observations with vlmrl view. If the policy knew how to call, lower "
        "optim.lr or set algo.kl_coef; otherwise add a warm start.",
        "optim.lr",
    )


def zero_gradient(seen: Observed) -> tuple[str, str] | None:
    """Rewards differ, and still the gradient is 0."""
    row = seen.rows[-1] if seen.rows else {}
    differ = row.get("groups/played", 0) > row.get("groups/zero_variance", 0)
    if not (differ and row.get("groups/trained") and row.get("grad_norm") == 0):
        return None
    return (
        "the gradient is 0, though the rewards of a group differ: the weights do not change. Look at model.freeze, at "
        "algo.corrections and loss options that mask every token, and at algo.filters.",
        "model.freeze",
    )


def entropy_collapse(seen: Observed) -> tuple[str, str] | None:
    """The entropy fell to a fifth, and rewards within groups no longer differ, below the best reward so far."""
    (before, now), last = seen.means("entropy"), seen.rows[-5:]
    groups = sum(row.get("groups/played", 0) for row in last)
    equal = sum(row.get("groups/zero_variance", 0) for row in last)
    best, reward = max(seen.values("reward/max"), default=0.0), statistics.fmean(seen.values("reward/mean")[-5:] or [0])
    if not now <= 0.2 * before or equal < 0.9 * groups or reward >= 0.9 * best:
        return None
    return (
        f"the entropy fell from {before:.3g} to {now:.3g} nats and {equal:.0f} of the last {groups:.0f} groups have equal rewards, at "
        f"a mean reward of {reward:.3g}: the policy no longer explores. Lower optim.lr, or set algo.entropy_coef or algo.kl_coef.",
        "algo.entropy_coef",
    )


def mismatch_rising(seen: Observed) -> tuple[str, str] | None:
    """The engine's and the trainer's logprobs drift apart."""
    before, now = seen.means("logprob_mismatch/mean")
    if not (now >= 0.02 and now >= 3 * before):
        return None
    return (
        f"the mean difference between the trainer's and the rollout's logprobs rose from {before:.2g} to {now:.2g} nats: the engine "
        "may sample from other weights, or in a lower precision. Look at logprob_mismatch/worst, and set algo.corrections.",
        "algo.corrections",
    )


def images_not_needed(seen: Observed) -> tuple[str, str] | None:
    """Without images the reward is the same, within two standard errors of the difference.

    A reward that is not above ``eval.chance``, or above that of the first evaluation, says nothing about images: it is not learned.
    """
    found = {kind: _rewards(seen.evaluations, kind) for kind in ("eval", "blanked")}
    if not all(found.values()):
        return None
    chance = seen.config.eval.chance
    floor = found["eval"][0] if chance is None else (chance, 0.0)
    (reward, error), (blanked, blanked_error) = found["eval"][-1], found["blanked"][-1]
    is_learned = reward - floor[0] > 2 * math.hypot(error, floor[1])
    if not is_learned or reward - blanked > 2 * math.hypot(error, blanked_error):
        return None
    return (
        f"with blanked images the reward is {blanked:.3f} ± {blanked_error:.3f}, and with images {reward:.3f} ± {error:.3f}, "
        "which is within two standard errors. The text may give the answer away, or the images may be too small to read "
        "(model.max_image_pixels).",
        "data",
    )


def starts_at_chance(seen: Observed) -> tuple[str, str] | None:
    """Before RL, and without a teacher, the reward is ``eval.chance`` within two standard errors; demonstrations earn three more."""
    evaluated, chance = _rewards(seen.evaluations, "eval"), seen.config.eval.chance
    earned = [row["sft/reward"] for row in seen.evaluations if "sft/reward" in row][-10:]
    if not chance or not evaluated or not earned or seen.config.teacher.model is not None:
        return None
    (reward, error), shown = evaluated[0 if seen.config.train.steps else -1], statistics.fmean(earned)
    if abs(reward - chance) > 2 * error or shown - reward <= 3 * error:
        return None
    return (
        f"before RL the reward is {reward:.3f} ± {error:.3f}, which is guessing (eval.chance {chance:g}), and demonstrations earn "
        f"{shown:.3f}: the warm start taught their format, not the answers. Raise the share of right ones, or enlarge the decisive "
        "detail.",
        "warm_start.demonstrate",
    )


def images_vanish(seen: Observed) -> tuple[str, str] | None:
    """Turns after the first show a tenth of the images, or fewer, of those of the first five steps, and the reward has not risen."""
    (before, now), (low, high) = seen.means("turn/with_images"), seen.means("reward/mean")
    if not (before >= 0.2 and now <= 0.1 * before and high <= low):
        return None
    return (
        f"turns after the first that show an image fell from {before:.0%} to {now:.0%}: the policy no longer requests images in a "
        "valid format. Look at responses with vlmrl view; lower optim.lr, set algo.kl_coef, or reward a well-formed request.",
        "optim.lr",
    )


def images_not_shown(seen: Observed) -> tuple[str, str] | None:
    """Nine in ten images that came after a response of the step cannot be shown."""
    turns = [turn for record in seen.records for turn in record["turns"][1:]]
    lost = [reason for turn in turns for reason in NOT_SHOWN.findall(turn["observation"])]
    total = len(lost) + sum(len(turn["images"]) for turn in turns)
    if len(lost) < max(LEAST_EPISODES, 0.9 * total):
        return None
    return (
        f"{len(lost)} of {total} images of {short_name(seen.config.agent or seen.config.env)} cannot be shown, and the model reads a "
        f"text instead, most often: {Counter(lost).most_common(1)[0][0]}. Correct the env, or teach the policy what it may ask for.",
        "env",
    )


def never_done(seen: Observed) -> tuple[str, str] | None:
    """In all steps, at least five, each episode ended by ``rollout.max_turns`` or failed, and none had a reward above 0."""
    steps = [row for row in seen.rows if "ending/max_turns" in row]
    shares = [sum(row[f"ending/{ending}"] for ending in ("max_turns", *FAILED)) for row in steps]
    if (
        len(steps) < 5
        or min(shares) < 1 - 1e-9
        or max(seen.values("reward/max"), default=1.0) > 0
        or seen.config.env is None
    ):
        return None
    return (
        f"in {len(steps)} steps every episode ended by rollout.max_turns ({seen.config.rollout.max_turns}), without a "
        "reward: the policy needs more turns, or step() never returns True for done, as it must at its last turn.",
        "env",
    )


def _rewards(evaluations: Sequence[Record], kind: str) -> list[tuple[float, float]]:
    """The mean rewards of the evaluations of one kind, each with its standard error."""
    name = f"{kind}/reward/mean"
    return [(row[name], row[f"{kind}/standard_error"]) for row in evaluations if row.get(name) is not None]


def long_trajectories_lost(seen: Observed) -> tuple[str, str] | None:
    """Failed episodes are longer than trained ones, or an asynchronous run trains the short ones."""
    bias = seen.values("length_bias/sampled_tokens")
    if seen.config.train.too_old == "drop" and len(bias) >= 5 and bias[-1] < 0.9:
        return (
            f"trained trajectories are {1 - bias[-1]:.0%} shorter than those played (length_bias/sampled_tokens): long ones are "
            "dropped, so that the policy may learn short responses. Set train.too_old wait or correct, or raise train.max_staleness.",
            "train.too_old",
        )
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for record in seen.records:
        if record["turns"]:
            lengths[record["ending"] in FAILED].append(sum(turn["sampled_tokens"] for turn in record["turns"]))
    lost, kept = lengths[True], lengths[False]
    enough = kept and len(lost) >= max(LEAST_EPISODES, 0.1 * len(kept))
    if not enough or statistics.fmean(lost) < 1.5 * statistics.fmean(kept):
        return None
    return (
        f"the {len(lost)} failed trajectories had sampled {statistics.fmean(lost):.0f} tokens on average, the others "
        f"{statistics.fmean(kept):.0f}: long ones are lost, so that the policy may learn short responses. "
        "`vlmrl view` lists them by reason; timeouts are rollout.env_timeout and rollout.engine_timeout.",
        "rollout.env_timeout",
    )


def reward_below_start(seen: Observed) -> tuple[str, str] | None:
    """The reward of the last ten steps is below that of the first ten by four standard errors."""
    ends = seen.ends("reward/mean", 10)
    if ends is None:
        return None
    (before, now), variance = map(statistics.fmean, ends), sum(statistics.variance(values) / 10 for values in ends)
    if before - now <= max(4 * math.sqrt(variance), 0.05 * abs(before)):
        return None
    return (
        f"the reward fell from {before:.3g} in the first ten steps to {now:.3g} in the last ten: lower optim.lr, or set algo.kl_coef.",
        "optim.lr",
    )


def zero_learning_rate(seen: Observed) -> tuple[str, str] | None:
    """An optimizer step with learning rate 0."""
    rates = seen.values("lr")
    if not rates or rates[-1] != 0:
        return None
    schedule = seen.config.optim.schedule
    return f"the learning rate is 0 by optim.schedule {schedule}, so that the weights do not change.", "optim.schedule"


def high_kl(seen: Observed) -> tuple[str, str] | None:
    """The KL to the reference is above 1 nat a token, three steps in a row."""
    last = seen.values("kl")[-3:]
    if len(last) < 3 or min(last) < 1.0:
        return None
    return (
        f"the KL to the reference is {last[-1]:.2g} nats a token: the policy is far from it. Raise algo.kl_coef, or lower optim.lr.",
        "algo.kl_coef",
    )


def summaries_grow_or_copy(seen: Observed) -> tuple[str, str] | None:
    """A summary has twice the tokens of the first steps and half of its limit; or half of it is one run of tokens of its context."""
    asked = [row for row in seen.rows if row.get("trajectory/asked_turns")]
    lengths = [row["trajectory/asked_tokens"] / row["trajectory/asked_turns"] for row in asked]
    if len(lengths) < 10:
        return None
    first, last = statistics.fmean(lengths[:5]), statistics.fmean(lengths[-5:])
    limit = seen.config.rollout.max_response_tokens
    copied = statistics.fmean(row.get("env/copied", 0.0) for row in asked[-5:])
    if last >= LEAST_COPIED and copied >= 0.5:
        found = f"{copied:.0%} of a summary of {last:.0f} tokens is one run of tokens that it repeats from its context"
    elif last >= 2 * first and last >= limit / 2:
        found = f"summaries grew from {first:.0f} to {last:.0f} tokens, of rollout.max_response_tokens ({limit})"
    else:
        return None
    return (
        f"{found}: they save few tokens. Ask for less (request of rollout.history_options), write them less often, or "
        "lower rollout.max_response_tokens.",
        "rollout.history_options",
    )


def teacher_agrees(seen: Observed) -> tuple[str, str] | None:
    """Since the first step, teacher and policy agree."""
    leads = seen.values("teacher/kl")
    differ = [abs(each) for each in (*leads, *seen.values("teacher/divergence"))]
    if len(leads) < 5 or max(differ) > 1e-3:
        return None
    return (
        f"in {len(leads)} steps the teacher never disagreed with the policy (teacher/kl at most {max(differ):.1g} nats): nothing is "
        "learned from it. It must see more than the policy (teacher.sees), or be another model.",
        "teacher.sees",
    )


def teacher_kl_grows(seen: Observed) -> tuple[str, str] | None:
    """The policy moves away from its teacher."""
    before, now = seen.means("teacher/kl")
    if not (now >= 0.1 and now >= 2 * before):
        return None
    own = " or raise teacher.decay, since policy and average drift together" * (seen.config.teacher.model == "average")
    return (
        f"the KL to the teacher grew from {before:.2g} to {now:.2g} nats a token, where it should shrink: lower optim.lr{own}; beside "
        "rewards, raise teacher.coef.",
        "optim.lr",
    )


def teacher_changes_length(seen: Observed) -> tuple[str, str] | None:
    """With a teacher, responses become half or twice as long."""
    before, now = seen.means("turn/sampled_tokens/mean")
    if seen.config.teacher.model is None or not (now <= before / 2 or now >= 2 * before):
        return None
    return (
        f"with the teacher, responses went from {before:.0f} to {now:.0f} tokens: a teacher that sees the answer favors a short "
        "response, another may prefer longer texts. Look at its lead over the policy with vlmrl view, and set teacher.clip or "
        "teacher.coef.",
        "teacher.clip",
    )


def stops_looking(seen: Observed) -> tuple[str, str] | None:
    """The reward rises while episodes shrink to half of their turns, and to less than two of them."""
    (before, now), (low, high) = seen.means("turns/mean", 10), seen.means("reward/mean", 10)
    if not (now <= before / 2 and now < 2 and high > low):
        return None
    return (
        f"episodes fell from {before:.1f} to {now:.1f} turns while the reward rose from {low:.3g} to {high:.3g}: the policy answers "
        "without looking. Compare rewards on tasks that need a look; let the env ask for one, or reward it.",
        "env",
    )


CHECKS: dict[str, Callable[[Observed], tuple[str, str] | None]] = {
    check.__name__: check
    for check in (
        truncated,
        no_signal,
        tool_calls_fail,
        zero_gradient,
        entropy_collapse,
        mismatch_rising,
        images_not_needed,
        starts_at_chance,
        images_vanish,
        images_not_shown,
        never_done,
        long_trajectories_lost,
        reward_below_start,
        zero_learning_rate,
        high_kl,
        summaries_grow_or_copy,
        teacher_agrees,
        teacher_kl_grows,
        teacher_changes_length,
        stops_looking,
    )
}
"""Each returns a message and the setting to look at, or ``None``."""


def advisories(seen: Observed) -> list[Advisory]:
    """All advisories that hold now."""
    found = {name: check(seen) for name, check in CHECKS.items()}
    return [Advisory(name, seen.step, *text) for name, text in found.items() if text is not None]
