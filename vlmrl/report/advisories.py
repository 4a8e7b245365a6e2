"""Advisories: what is probably wrong with a run, from its metrics, its last trajectories and its config.

    Advisory("truncated", 1, "every response was cut at rollout.max_response_tokens (16) before step() was called: ...",
             "rollout.max_response_tokens")

:data:`CHECKS` has them by name; each is a pure function. An :class:`Advisor` prints each one once in a run.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vlmrl.config import Config
from vlmrl.report.run_log import RunLog, read_rows
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


PAGE = "docs/when_it_does_not_learn.md"
LEAST_EPISODES = 4  # fewer say nothing about a step
LEAST_GROUPS = 24  # a step or two without a difference are frequent in runs that learn


def truncated(seen: Observed) -> tuple[str, str] | None:
    """Nine in ten episodes of the step were cut."""
    played = [record for record in seen.records if record["ending"] not in FAILED]
    cut = [record for record in played if record["ending"] in TRUNCATED]
    if len(played) < LEAST_EPISODES or len(cut) < 0.9 * len(played):
        return None
    rollout = seen.config.rollout
    all_cut, has_agent = len(cut) == len(played), seen.config.has_agent  # an agent may go on after a limit
    episodes = "every episode" if all_cut else f"{len(cut)} of {len(played)} episodes"
    if Counter(record["ending"] for record in cut)["length"] < len(cut) / 2:
        whose, before = (f"a request of {episodes}", "") if has_agent else (episodes, " before the env was done")
        return (
            f"{whose} reached rollout.max_tokens ({rollout.max_tokens}){before}: raise it, or lower rollout.max_response_tokens or "
            "model.max_image_pixels.",
            "rollout.max_tokens",
        )
    responses = (
        f"a response of {episodes}"
        if has_agent
        else "every response"
        if all_cut
        else f"the last response of {episodes}"
    )
    before = " before step() was called" if seen.config.episode_setting == "env" else ""
    return (
        f"{responses} was cut at rollout.max_response_tokens ({rollout.max_response_tokens}){before}: raise it, or set rollout.stop "
        f"to the text that ends a response{f' (now {list(rollout.stop)})' if rollout.stop else ''}.",
        "rollout.max_response_tokens",
    )


def no_signal(seen: Observed) -> tuple[str, str] | None:
    """In no group of the last steps does one member have another reward than the others. A group of one has no others."""
    if seen.config.rollout.group_size == 1 or seen.config.algo.advantage == "none":
        return None
    groups, steps, rewards = 0, 0, set()
    for row in reversed(seen.rows):
        if not row.get("groups/played") or row["groups/zero_variance"] < row["groups/played"]:
            break
        groups, steps = groups + int(row["groups/played"]), steps + 1
        rewards.add(row["reward/mean"])
    is_solved = (
        rewards == {max(seen.values("reward/max"), default=0.0)} and seen.values("reward/mean")[0] not in rewards
    )
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
    """The policy's entropy is a fifth of what it was, and groups no longer differ, below the reward that was seen."""
    ends, last = seen.ends("entropy", 5), seen.rows[-5:]
    if ends is None:
        return None
    (before, now), groups = map(statistics.fmean, ends), sum(row.get("groups/played", 0) for row in last)
    equal = sum(row.get("groups/zero_variance", 0) for row in last)
    best, reward = max(seen.values("reward/max"), default=0.0), statistics.fmean(seen.values("reward/mean")[-5:] or [0])
    if now > 0.2 * before or equal < 0.9 * groups or reward >= 0.9 * best:
        return None
    return (
        f"the entropy fell from {before:.3g} to {now:.3g} nats and {equal:.0f} of the last {groups:.0f} groups have equal rewards, at "
        f"a mean reward of {reward:.3g}: the policy no longer explores. Lower optim.lr, or set algo.entropy_coef or algo.kl_coef.",
        "algo.entropy_coef",
    )


def mismatch_rising(seen: Observed) -> tuple[str, str] | None:
    """The engine's and the trainer's logprobs drift apart."""
    ends = seen.ends("logprob_mismatch/mean", 5)
    if ends is None:
        return None
    before, now = map(statistics.fmean, ends)
    if now < 0.02 or now < 3 * before:
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
        f"with blanked images the reward is {blanked:.3f} ± {blanked_error:.3f}, and with images {reward:.3f} ± {error:.3f}: it "
        "does not depend on the images. The text may give the answer away, or the images may be too small to read "
        "(model.max_image_pixels).",
        "data",
    )


def _rewards(evaluations: Sequence[Record], kind: str) -> list[tuple[float, float]]:
    """The mean rewards of the evaluations of one kind, each with its standard error."""
    name = f"{kind}/reward/mean"
    return [(row[name], row[f"{kind}/standard_error"]) for row in evaluations if row.get(name) is not None]


def long_trajectories_lost(seen: Observed) -> tuple[str, str] | None:
    """Failed episodes are longer than trained ones, or an asynchronous run trains the short ones."""
    bias = seen.values("length_bias/sampled_tokens")
    if len(bias) >= 5 and bias[-1] < 0.9:
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
    if len(lost) < LEAST_EPISODES or len(lost) < 0.1 * len(kept) or not kept:
        return None
    if statistics.fmean(lost) < 1.5 * statistics.fmean(kept):
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
    """The policy is more than a nat a token away from the reference, three steps in a row."""
    last = seen.values("kl")[-3:]
    if len(last) < 3 or min(last) < 1.0:
        return None
    return (
        f"the KL to the reference is {last[-1]:.2g} nats a token: the policy has left it. Raise algo.kl_coef, or lower optim.lr.",
        "algo.kl_coef",
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
        long_trajectories_lost,
        reward_below_start,
        zero_learning_rate,
        high_kl,
    )
}
"""Each returns a message and the setting to look at, or ``None``."""


def advisories(seen: Observed) -> list[Advisory]:
    """All advisories that hold now."""
    found = {name: check(seen) for name, check in CHECKS.items()}
    return [Advisory(name, seen.step, *text) for name, text in found.items() if text is not None]


class Advisor:
    """Prints each advisory of a run once, and appends it to ``advisories.jsonl``; also those of before a resume are not repeated."""

    def __init__(self, log: RunLog, config: Config, say: Callable[[str], None]) -> None:
        self._log = log
        self._config = config
        self._say = say
        self._given = {row["name"] for row in read_rows(log.folder / "advisories.jsonl")}
        self._rows, self._evaluations = _by_kind(log.rows())
        self._records: Sequence[Record] = ()

    def after_step(self, row: Record, records: Sequence[Record]) -> None:
        """Judge a step by its row of metrics and its trajectories."""
        self._rows.append(row)
        self._records = records
        self._give()

    def after_evaluations(self) -> None:
        """Judge the evaluations that were logged since."""
        self._rows, self._evaluations = _by_kind(self._log.rows())
        self._give()

    def _give(self) -> None:
        seen = Observed(self._config, self._rows, self._records, self._evaluations)
        new = [each for each in advisories(seen) if each.name not in self._given]
        self._given |= {each.name for each in new}
        self._log.append("advisories.jsonl", map(asdict, new))
        for each in new:
            self._say(f"advisory    step {each.step}: {each.message} ({PAGE}#{each.name})")


def _by_kind(rows: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Rows of training steps, and those of evaluations."""
    return [row for row in rows if "trajectories" in row], [row for row in rows if "trajectories" not in row]
