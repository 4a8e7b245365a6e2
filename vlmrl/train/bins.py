"""Packs pieces of a batch into bins of a budget: largest first, each into the bin with space that shares most with it.

It takes n log n steps for n pieces, times the number of common prefixes that are nested in each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vlmrl.train.prefix_tree import PrefixOrder


@dataclass
class Piece:
    """Rows that are computed together, and an upper bound of their tokens."""

    rows: list[int]
    tokens: int


class FirstFit:
    """Finds the first of many spaces that is large enough: of 3, 7 and 5, number 1 for a size of 4."""

    def __init__(self) -> None:
        self._most = [-1, -1]  # a binary tree: at i the most of 2i and 2i + 1, and from the middle on the spaces
        self._count = 0

    def append(self) -> int:
        """Add a space of nothing. Returns its number."""
        if 2 * self._count == len(self._most):  # the tree becomes the left half of a larger one
            old, self._most, width = self._most, [-1, self._most[1]], 1
            while width < len(old):
                self._most += old[width : 2 * width] + [-1] * width
                width *= 2
        self._count += 1
        return self._count - 1

    def set(self, number: int, space: int) -> None:
        most, at = self._most, number + len(self._most) // 2
        most[at] = space
        while at > 1:
            at //= 2
            most[at] = max(most[2 * at], most[2 * at + 1])

    def find(self, size: int) -> int | None:
        """The number of the first space of at least ``size``, which is 0 or more."""
        most, at = self._most, 1
        if most[at] < size:
            return None
        while 2 * at < len(most):
            at *= 2
            at += most[at] < size
        return at - len(most) // 2


@dataclass(eq=False)
class _Prefix:
    """A prefix that several pieces share, and the bins that begin with it."""

    length: int
    parent: _Prefix | None
    """The longest shorter prefix that other pieces share, too; ``None`` for the empty one."""
    bins: list[_Bin] = field(default_factory=list)
    spaces: FirstFit = field(default_factory=FirstFit)

    def and_shorter(self) -> Iterator[_Prefix]:
        prefix: _Prefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent


class _Bin:
    """A bin that was opened by ``piece``, and where each of the piece's prefixes has its space."""

    def __init__(self, piece: Piece, longest: _Prefix) -> None:
        self.piece = piece
        self._places = [(prefix.spaces, prefix.spaces.append()) for prefix in longest.and_shorter()]
        for prefix in longest.and_shorter():
            prefix.bins.append(self)

    def set_space(self, space: int) -> None:
        for spaces, number in self._places:
            spaces.set(number, space)


def fill_bins(pieces: Sequence[Piece], budget: int, order: PrefixOrder | None = None) -> list[Piece]:
    """Join pieces up to the budget, largest first, each to the bin with the longest common prefix. Sorted by size.

    A bin's prefix is that of the first row of its first piece. Without ``order`` nothing is shared.
    """
    longest = _longest_prefixes([piece.rows[0] for piece in pieces], order)
    bins: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        own = longest[piece.rows[0]]
        for prefix in own.and_shorter():
            number = prefix.spaces.find(piece.tokens - prefix.length)
            if number is not None:
                bin = prefix.bins[number]
                bin.piece.rows += piece.rows
                bin.piece.tokens += piece.tokens - prefix.length
                break
        else:
            bin = _Bin(piece, own)
            bins.append(piece)
        bin.set_space(budget - bin.piece.tokens)
    return sorted(bins, key=lambda piece: -piece.tokens)


def _longest_prefixes(rows: Sequence[int], order: PrefixOrder | None) -> dict[int, _Prefix]:
    """The longest prefix that each row shares with another one."""
    empty = _Prefix(0, None)
    if order is None:
        return dict.fromkeys(rows, empty)
    found: dict[int, _Prefix] = {}
    ordered = order.sort(rows)
    nested, last = [empty], -1  # the prefixes of the row before, the longest last
    for row, shared in zip(ordered, order.shared_lengths(ordered), strict=True):
        inner = None
        while nested[-1].length > shared:
            inner = nested.pop()
        if nested[-1].length < shared:
            nested.append(_Prefix(shared, nested[-1]))
            if inner is None:
                found[last] = nested[-1]
            else:
                inner.parent = nested[-1]
        found[row], last = nested[-1], row
    return found
