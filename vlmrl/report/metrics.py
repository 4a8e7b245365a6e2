"""The metrics of a batch of trajectories."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from vlmrl.types import TRUNCATED, Ending, Trajectory


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The metrics of a batch of trajectories, for one row of ``metrics.jsonl``.

    Over the trajectories that did not fail: ``reward/mean|std|min|max``, ``group_reward/mean|std``, ``turns/mean|max``,
    ``sampled_tokens/mean|max``, ``images/mean`` (a trajectory), ``turn/<what>/mean|max`` (a turn's tokens, seconds and
    :func:`repetition`), ``turn/with_images`` (the fraction of the turns after the first that show an image), and ``env/<name>`` (the
    mean over the turns that have it). Over all: ``trajectories``, ``failed``, ``ending/<reason>`` and ``truncated`` (fractions),
    ``retries/<kind>`` (counts) and ``trajectory/<name>`` (the mean over the trajectories that have it). A summary of no values is left
    out: two trajectories with rewards 0 and 1 give ``reward/std`` 0.5, no trajectories give no ``reward/`` at all.

    With several sources, or a mixture, there are also ``source/<name>/reward/mean``, ``turns/mean`` and ``trajectories``.
    """
    played = [t for t in trajectories if not t.failed]
    turns = [turn for t in played for turn in t.turns]
    rewards = [t.reward for t in played if t.reward is not None]
    result = {"trajectories": float(len(trajectories)), "failed": float(len(trajectories) - len(played))}
    result |= _ending_fractions(trajectories)
    result |= _summary("reward", rewards, "mean", "std", "min", "max")
    result |= _summary("group_reward", [t.group_reward for t in played if t.group_reward is not None], "mean", "std")
    result |= _summary("turns", [len(t.turns) for t in played], "mean", "max")
    result |= _summary("sampled_tokens", [t.num_sampled for t in played], "mean", "max")
    result |= _summary("images", [sum(len(turn.media) for turn in t.turns) for t in played], "mean")
    result |= _summary("turn/sampled_tokens", [len(turn.response_ids) for turn in turns], "mean", "max")
    result |= _summary("turn/new_prompt_tokens", [len(turn.prompt_ids) for turn in turns], "mean", "max")
    result |= _summary("turn/engine_seconds", [turn.engine_seconds for turn in turns], "mean", "max")
    result |= _summary("turn/env_seconds", [turn.env_seconds for turn in turns], "mean", "max")
    result |= _summary("turn/repetition", [repetition(turn.response_ids) for turn in turns], "mean", "max")
    if later := [turn for t in played for turn in t.turns[1:]]:
        result["turn/with_images"] = sum(bool(turn.media) for turn in later) / len(later)
    result |= _retries(trajectories)
    result |= _means("env", [turn.metrics for turn in turns])
    result |= _means("trajectory", [t.metrics for t in trajectories])
    result |= _by_source(played)
    return result


def _by_source(played: Sequence[Trajectory]) -> dict[str, float]:
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in played:
        groups[trajectory.task.source].append(trajectory)
    if len(groups) < 2 and not any(t.task.part for t in played):
        return {}
    result: dict[str, float] = {}
    for source, group in sorted(groups.items()):
        name = f"source/{source}"
        result[f"{name}/trajectories"] = float(len(group))
        result |= _summary(f"{name}/reward", [t.reward for t in group if t.reward is not None], "mean")
        result |= _summary(f"{name}/turns", [len(t.turns) for t in group], "mean")
    return result


def repetition(token_ids: Sequence[int], length: int = 4) -> float:
    """The fraction of n-grams of ``length`` tokens that occurred before: 0 for ``1 2 3 4 5``, 3/4 for ``1 1 1 1 1 1 1``."""
    runs = list(zip(*(token_ids[start:] for start in range(length)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _retries(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = {f"retries/{kind}": 0.0 for kind in ("env_errors", "env_timeouts", "turns_resampled")}
    for trajectory in trajectories:
        for metrics in (trajectory.metrics, *(turn.metrics for turn in trajectory.turns)):
            for name in counts:
                counts[name] += metrics.get(name.removeprefix("retries/"), 0.0)
    return counts


def _ending_fractions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    if not trajectories:
        return {}
    counts = Counter(t.ending for t in trajectories)
    fractions = {f"ending/{reason}": counts[reason] / len(trajectories) for reason in get_args(Ending)}
    return fractions | {"truncated": sum(fractions[f"ending/{reason}"] for reason in TRUNCATED)}


def _summary(name: str, values: Sequence[float], *kinds: str) -> dict[str, float]:
    functions: dict[str, Callable[[Sequence[float]], float]]
    functions = {"mean": _mean, "std": statistics.pstdev, "min": min, "max": max}
    return {f"{name}/{kind}": float(functions[kind](values)) for kind in kinds if values}


def _means(prefix: str, records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in records:
        for name, value in metrics.items():
            values[name].append(value)
    return {f"{prefix}/{name}": _mean(given) for name, given in sorted(values.items())}


def _mean(values: Sequence[float]) -> float:
    """Finite for all finite values: an env may return a number that a response has written, such as two of 1e308."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)
