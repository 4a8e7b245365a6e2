"""RolloutBuffer of groups that have something to teach: filters, and what becomes of a batch that they left short."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from vlmrl.algos import FILTERS
from vlmrl.config import Algo
from vlmrl.config.code import resolve_function
from vlmrl.rollout.runner import RolloutError, Rollouts, Runner
from vlmrl.types import Task, Trajectory

Group = list[Trajectory]
Filter = Callable[[Sequence[Trajectory]], bool]
ROUNDS = 16  # of sampling for one batch, before it is given up


@dataclass
class GroupBatch:
    """``groups`` are trained; ``rollouts`` is all that was played for them, the ``filtered`` groups too.

    ``too_old`` groups were dropped, since the weights had changed too often since they began.
    """

    groups: list[Group] = field(default_factory=list)
    filtered: int = 0
    too_old: int = 0
    rollouts: Rollouts = field(default_factory=Rollouts)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


async def fill(
    runner: Runner, tasks: Iterator[Task], count: int, label: str, filters: Sequence[Filter], mode: str
) -> GroupBatch:
    """``count`` groups that pass all ``filters``; with ``mode`` off, those of ``count`` that do.

    ``filter`` samples on until the batch is full, ``replace`` repeats kept groups. Raises RolloutError where no group passes.
    """
    batch = GroupBatch()
    for number in range(ROUNDS):
        suffix = f".{number}" if number else ""
        played = await runner.play(
            tasks, count - len(batch.groups), label + suffix, over_sampling=runner.config.over_sampling
        )
        _add(batch.rollouts, played)
        kept = [group for group in played.groups if passes(group, filters)]
        batch.filtered += len(played.groups) - len(kept)
        batch.groups += kept
        if mode != "filter" or len(batch.groups) == count or not played.groups:
            break
    else:
        raise too_few(label, len(batch.groups), count)
    if mode == "replace":
        batch.groups = repeated(batch.groups, count)
    return batch


def passes(group: Group, filters: Sequence[Filter]) -> bool:
    return all(keep(group) for keep in filters)


def repeated(groups: list[Group], count: int) -> list[Group]:
    """``count`` groups: these as often as it takes, each copy under a name of its own. None where there are none."""
    copies = math.ceil(count / len(groups)) if groups else 0
    return [_copy(group, number) for number in range(copies) for group in groups][:count]


def too_few(label: str, passed: int, count: int) -> RolloutError:
    return RolloutError(
        f"{label}: after {ROUNDS} rounds only {passed} of {count} groups passed algo.filters: tasks are too easy or too hard, or "
        "the filters too strict."
    )


def resolve_filters(algo: Algo) -> list[Filter]:
    """The functions of ``algo.filters`` with their options bound. Raises ValueError if one is missing or its options do not fit."""
    found: list[Filter] = []
    for name in algo.filters:
        options = algo.options_of(name)
        function = resolve_function(
            "algo.filters", name, ["trajectories"], options, options_field="algo.filter_options", registry=FILTERS
        )
        found.append(partial(function, **options))
    return found


def _add(total: Rollouts, played: Rollouts) -> None:
    total.groups += played.groups
    total.failed += played.failed
    total.dropped_groups += played.dropped_groups
    total.stopped_groups += played.stopped_groups


def _copy(group: Group, number: int) -> Group:
    """The same trajectories under other ids; the first copy is the group itself."""
    if not number:
        return group

    def renamed(item: Trajectory) -> Trajectory:
        name, group_id = f"{item.id}+{number}", f"{item.group_id}+{number}"
        samples = [replace(sample, trajectory_id=name, group_id=group_id) for sample in item.samples or []]
        return replace(item, id=name, group_id=group_id, samples=samples or None)

    return [renamed(trajectory) for trajectory in group]
