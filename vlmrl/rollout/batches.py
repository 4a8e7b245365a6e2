"""Fills a batch with groups that pass the filters, and completes it by more sampling or by repetition (dynamic sampling)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vlmrl.data.stream import TaskStream
from vlmrl.rollout.runner import Group, RolloutError, Rollouts, Runner
from vlmrl.types import Trajectory

Filter = Callable[[Sequence[Trajectory]], bool]
MAX_REJECTED = 16  # times the groups of a batch: the run stops if the filters reject so many


@dataclass
class GroupBatch:
    """The groups of one rollout step, and everything that was played for them."""

    groups: list[Group] = field(default_factory=list)  # to train on
    filtered: int = 0  # groups that the filters rejected
    too_old: int = 0  # groups that were dropped because they exceeded the allowed staleness
    rollouts: Rollouts = field(default_factory=Rollouts)  # all groups played, the filtered ones included

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


async def fill(
    runner: Runner, tasks: TaskStream, count: int, label: str, filters: Sequence[Filter], mode: str
) -> GroupBatch:
    """A batch of ``count`` groups that pass all ``filters``.

    Dynamic sampling ``mode``: ``off`` plays ``count`` groups and keeps those that pass, ``filter`` continues until ``count`` pass,
    ``replace`` repeats kept groups. Raises RolloutError if the filters reject :data:`MAX_REJECTED` times ``count`` groups.
    """
    batch = GroupBatch()
    for number in itertools.count():
        suffix = f".{number}" if number else ""
        missing = count - len(batch.groups)
        rollouts = await runner.play(
            tasks, missing, label + suffix, over_sampling=runner.config.over_sampling, earlier=batch.rollouts
        )
        batch.rollouts.add(rollouts)
        kept = [group for group in rollouts.groups if passes(group, filters)]
        batch.filtered += len(rollouts.groups) - len(kept)
        batch.groups += kept
        if mode != "filter" or len(batch.groups) == count or not rollouts.groups:
            break
        check_rejected(label, batch, len(batch.groups), count)
    if mode == "replace":
        batch.groups = repeated(batch.groups, count)
    return batch


def passes(group: Group, filters: Sequence[Filter]) -> bool:
    return all(keep(list(group)) for keep in filters)  # a list of its own: it may sort it, or take members out


def repeated(groups: list[Group], count: int) -> list[Group]:
    """``count`` groups, by repetition of ``groups``; each copy has ids of its own. Empty if ``groups`` is."""
    copies = math.ceil(count / len(groups)) if groups else 0
    return [_copy(group, number) for number in range(copies) for group in groups][:count]


def check_rejected(label: str, batch: GroupBatch, passed: int, count: int) -> None:
    """Raises RolloutError if the filters rejected too many groups for a batch of ``count``, of which ``passed`` are there."""
    if batch.filtered >= MAX_REJECTED * count:
        raise RolloutError(
            f"{label}: only {passed} of {count} groups passed algo.filters, and {batch.filtered} did not: the tasks are too easy "
            "or too hard, or the filters too strict.",
            batch.rollouts.failed,
        )


def _copy(group: Group, number: int) -> Group:
    """The same trajectories with other ids; copy 0 is the group itself."""
    if not number:
        return group

    def renamed(item: Trajectory) -> Trajectory:
        name, group_id = f"{item.id}+{number}", f"{item.group_id}+{number}"
        samples = [replace(sample, trajectory_id=name, group_id=group_id) for sample in item.samples or []]
        return replace(item, id=name, group_id=group_id, samples=samples or None)

    return [renamed(trajectory) for trajectory in group]
