"""Micro-batches are those of the plain algorithm, which compares each piece with every bin and each row with all of its group."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from vlmrl.train.packing import split
from vlmrl.train.prefix_tree import atoms_of, shared_length
from vlmrl.types import Sample


def plain_fill(pieces, budget):
    """Each of ``(rows, tokens, atoms)``, the largest first, to the bin with the longest common prefix; the first of several."""
    bins = []
    for rows, tokens, atoms in sorted(pieces, key=lambda piece: -piece[1]):
        shared = [shared_length(bin[2], atoms) for bin in bins]
        fits = [index for index, bin in enumerate(bins) if bin[1] + tokens - shared[index] <= budget]
        if fits:
            index = max(fits, key=shared.__getitem__)
            bins[index] = (bins[index][0] + rows, bins[index][1] + tokens - shared[index], bins[index][2])
        else:
            bins.append((rows, tokens, atoms))
    return sorted(bins, key=lambda bin: -bin[1])


def plain_cut(atoms, ordered, budget):
    """Of all cuts into parts of at most ``budget`` tokens the one with the fewest tokens, and then the fewest parts."""
    lengths = [len(atoms[row]) for row in ordered]
    shared = [0, *(shared_length(atoms[a], atoms[b]) for a, b in pairwise(ordered))]
    best = [(0, 0, 0)]
    for last in range(len(ordered)):
        size, ways = 0, []
        for first in range(last, -1, -1):
            if first < last and size + lengths[first] > budget:
                break
            ways.append((best[first][0] + size + lengths[first], best[first][1] + 1, first))
            size += lengths[first] - shared[first]
        best.append(min(ways))
    parts, stop = [], len(ordered)
    while stop:
        first = best[stop][2]
        parts.append((ordered[first:stop], best[stop][0] - best[first][0]))
        stop = first
    return parts[::-1]


def plain_split(samples, budget, layout):
    atoms = atoms_of(samples, None)
    if layout == "packed":
        return [
            rows for rows, *_ in plain_fill([([row], len(s), atoms[row][:0]) for row, s in enumerate(samples)], budget)
        ]

    def in_order(rows):
        return sorted(rows, key=lambda row: (atoms[row].tolist(), row))

    groups = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(row)
    parts = [part for group in groups.values() for part in plain_cut(atoms, in_order(group), budget)]
    pieces = [(rows, tokens, atoms[rows[0]]) for rows, tokens in parts]
    return [in_order(rows) for rows, *_ in plain_fill(pieces, budget)]


def random_rows(dice: random.Random) -> list[Sample]:
    """Rows that branch anywhere, within groups and between them; some are equal, some the beginning of others."""
    rows = [[dice.randrange(3)]]
    for _ in range(dice.randrange(1, 60)):
        start = dice.choice(rows) if dice.random() < 0.8 else []
        rows.append(start[: dice.randrange(len(start) + 1)] + dice.choices(range(3), k=dice.randrange(1, 12)))
    names = [str(dice.randrange(1 + len(rows) // dice.choice([1, 4, 100]))) for _ in rows]
    return [
        Sample(ids, [9], [1], [-1.0], [0], name, f"{name}/{number}", is_last_step=True, stop_reason="stop")
        for number, (ids, name) in enumerate(zip(rows, names, strict=True))
    ]


@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_plans_are_those_of_the_plain_algorithm(layout):
    cut = joined = 0
    for seed in range(300):
        dice = random.Random(seed)
        rows, budget = random_rows(dice), dice.choice([1, 10, 20, 40, 100, 1000])
        plans = [plan.rows for plan in split(rows, budget, layout)]
        assert plans == plain_split(rows, budget, layout), f"seed {seed}"
        groups = [{rows[index].group_id for index in plan} for plan in plans]
        cut += len({*map(frozenset, groups)}) < len(groups)
        joined += max(map(len, groups)) > 1
    assert cut > 50 and joined > 50  # groups cut into several pieces, and bins of several groups
