"""Sharing: every block of memory gets a fixed offset in one arena, and blocks that never live together share it.

Chen et al. 2016, section 3, let results share memory by counting references along a topological order; `reuse` has
that rule. Here the same problem is solved as what it is, *dynamic storage allocation*: blocks with known sizes and
lifetimes, offsets to be chosen, the arena to be as small as possible. It cannot be smaller than the largest number of
bytes alive at one time (`lower_bound_bytes`), and need not be attainable: the problem is NP-hard.

`place` tries first fit and best fit in several orders (longest lifetime first is good for training graphs, where
lifetimes are nested as forward is in backward), improves the best of them by moving what ends at the top of the arena
to the front of the order, and searches exhaustively where there are few blocks. It stops at the lower bound.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

import msgspec
import numpy as np

_EXHAUSTIVE: Final = 9  # so many blocks at most are searched exhaustively
_EFFORT: Final = 2 * 10**8  # comparisons of two blocks spent on improving, about half a second
_IMPROVED: Final = 4  # of the simple orders
_SEARCHED: Final = 300  # of the largest blocks, whose order is searched; smaller ones find room between them


class Lifetime(msgspec.Struct, frozen=True):
    """One block of memory: how large it is and when it is alive.

    Attributes:
        first: the time at which it is allocated, a whole number such as a position in an order of nodes.
        last: the last time at which it is alive, first ≤ last.
        bytes: its size.
        kind: what it is, for pictures.
        name: whose it is, for people.
    """

    first: int
    last: int
    bytes: int
    kind: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.first > self.last or self.bytes < 0:
            raise ValueError(f"a lifetime needs first ≤ last and bytes ≥ 0, not {self}")

    def meets(self, other: Lifetime) -> bool:
        """Whether both are alive at some time."""
        return self.first <= other.last and other.first <= self.last


class Placement(msgspec.Struct, frozen=True):
    """Offsets in one arena.

    Attributes:
        offsets: where every block begins, in the order of the lifetimes.
        total_bytes: the size of the arena.
        rule: which rule it was made by.
    """

    offsets: tuple[int, ...]
    total_bytes: int
    rule: str = ""


def load_bytes(lifetimes: Sequence[Lifetime]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes alive over time, as (times, bytes from that time on), times ascending."""
    changes = [(one.first, one.bytes) for one in lifetimes] + [(one.last + 1, -one.bytes) for one in lifetimes]
    times = np.array([time for time, _ in changes], dtype=np.int64)
    sizes = np.array([size for _, size in changes], dtype=np.int64)
    distinct, place = np.unique(times, return_inverse=True)
    totals = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(totals, place, sizes)
    return distinct, np.cumsum(totals)


def lower_bound_bytes(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes alive at one time: no arena is smaller."""
    return int(load_bytes(lifetimes)[1].max(initial=0))


def check(lifetimes: Sequence[Lifetime], placement: Placement) -> None:
    """Raise if two blocks that live together overlap, or one leaves the arena.

    Raises:
        ValueError: says which two, or which.
    """
    alive: list[tuple[int, int]] = []  # (offset, block), ascending: only neighbours can overlap
    ends: list[tuple[int, int]] = []  # (last, block), a heap
    for block in sorted(range(len(lifetimes)), key=lambda k: lifetimes[k].first):
        one, offset = lifetimes[block], placement.offsets[block]
        if offset < 0 or offset + one.bytes > placement.total_bytes:
            raise ValueError(f"{one} at {offset} leaves the arena of {placement.total_bytes} bytes")
        while ends and ends[0][0] < one.first:
            other = heappop(ends)[1]
            del alive[bisect_left(alive, (placement.offsets[other], other))]
        if not one.bytes:
            continue
        here = bisect_left(alive, (offset, block))
        for place, other in alive[max(0, here - 1) : here + 1]:
            if offset < place + lifetimes[other].bytes and place < offset + one.bytes:
                raise ValueError(f"{one} at {offset} overlaps {lifetimes[other]} at {place}")
        alive.insert(here, (offset, block))
        heappush(ends, (one.last, block))


def place(lifetimes: Sequence[Lifetime], *, effort: int = _EFFORT) -> Placement:
    """The smallest arena found.

    Args:
        lifetimes: the blocks.
        effort: how many comparisons of two blocks may be spent on improving the best simple order.
    """
    sized = [k for k, one in enumerate(lifetimes) if one.bytes]
    found = _place([lifetimes[k] for k in sized], effort)
    offsets = [0] * len(lifetimes)
    for k, offset in zip(sized, found.offsets, strict=True):
        offsets[k] = offset
    return Placement(tuple(offsets), found.total_bytes, found.rule)


def _place(lifetimes: Sequence[Lifetime], effort: int) -> Placement:
    if not lifetimes:
        return Placement((), 0, "empty")
    bound = lower_bound_bytes(lifetimes)
    fits = _Fits(lifetimes)
    tried: list[tuple[int, int, list[int], int, Placement]] = []
    for name, order in _orders(lifetimes):
        for best, rule in ((0, "first fit"), (1, "best fit")):
            found = fits.fit(order, best, f"{rule}, {name} first")
            tried.append((found.total_bytes, len(tried), order, best, found))
            if found.total_bytes == bound:
                return found
    tried.sort(key=lambda one: one[:2])
    if len(lifetimes) <= _EXHAUSTIVE:
        return exhaustive(lifetimes)
    for _, _, order, best, found in tried[:_IMPROVED]:
        better = _improve(fits, order, best, found, bound, effort // _IMPROVED)
        if better.total_bytes < tried[0][0]:
            tried.insert(0, (better.total_bytes, -1, order, best, better))
        if better.total_bytes == bound:
            break
    return tried[0][-1]


def _orders(lifetimes: Sequence[Lifetime]) -> Iterable[tuple[str, list[int]]]:
    """Named orders in which blocks are placed; ties are broken by size, then by time."""
    keys = {
        "longest": [one.last - one.first for one in lifetimes],
        "largest": [one.bytes for one in lifetimes],
        "area": [(one.last - one.first + 1) * one.bytes for one in lifetimes],
        "earliest": [-one.first for one in lifetimes],
        "latest": [one.last for one in lifetimes],
    }
    for name, key in keys.items():
        yield (
            name,
            sorted(range(len(lifetimes)), key=lambda k: (-key[k], -lifetimes[k].bytes, lifetimes[k].first, k)),
        )


class _Fits:
    """The blocks as arrays, for placing them again and again."""

    def __init__(self, lifetimes: Sequence[Lifetime]) -> None:
        self.first, self.last, self.size = (
            np.array([getattr(one, name) for one in lifetimes], dtype=np.int64) for name in ("first", "last", "bytes")
        )
        self._offsets, self._placed = np.zeros_like(self.first), np.zeros_like(self.first)

    def fit(self, order: Sequence[int] | np.ndarray, best: int, rule: str) -> Placement:
        from ._fitting import fit  # compiled when first imported

        numbers = np.asarray(order, dtype=np.int64)
        total = int(fit(self.first, self.last, self.size, numbers, best, self._offsets, self._placed))
        return Placement(tuple(self._offsets.tolist()), total, rule)


def _improve(fits: _Fits, order: Sequence[int], best: int, found: Placement, bound: int, effort: int) -> Placement:
    """Place again and again, what stood above the others earlier each time, for as long as the effort lasts.

    A block that ends at the top goes to the front, or to a random place before its own; that is kept unless the arena
    grows, so that the search drifts over equal ones. Every placement costs the square of the number of blocks, so small
    blocks, for which there is room between large ones, are left out of the search and placed last.
    """
    draws = random.Random(0)
    searched = set(np.argsort(-fits.size, kind="stable")[:_SEARCHED].tolist())
    large, small = [k for k in order if k in searched], [k for k in order if k not in searched]
    rule = f"{found.rule}, improved"
    current, kept = large, fits.fit(large, best, rule)
    for _ in range(effort // max(1, len(large) ** 2)):
        tops = np.array(kept.offsets)[large] + fits.size[large]
        block = large[int(draws.choice(np.flatnonzero(tops == tops.max()).tolist()))]
        position = current.index(block)
        changed = current[:position] + current[position + 1 :]
        changed.insert(draws.choice((0, draws.randrange(position + 1))), block)
        tried = fits.fit(changed, best, rule)
        improves = tried.total_bytes < kept.total_bytes
        if tried.total_bytes <= kept.total_bytes or draws.random() < 0.02:
            current, kept = changed, tried
        if improves and tried.total_bytes < found.total_bytes:
            whole = fits.fit([*changed, *small], best, rule)
            found = min(found, whole, key=lambda one: one.total_bytes)
            if found.total_bytes == bound:
                break
    return found


def exhaustive(lifetimes: Sequence[Lifetime]) -> Placement:
    """The smallest arena there is; time grows exponentially with the number of blocks.

    Some optimal placement lets every block rest on the ground or on a block that it meets. Taken by ascending offset,
    such a placement puts every block exactly on the highest of the blocks taken before that it meets; so all choices
    of what comes next, at an offset not below the last, reach it.
    """
    count = len(lifetimes)
    meets = [[j for j in range(count) if j != k and lifetimes[k].meets(lifetimes[j])] for k in range(count)]
    times = sorted({one.first for one in lifetimes})
    alive = [[k for k, one in enumerate(lifetimes) if one.first <= time <= one.last] for time in times]
    best_total, best_offsets = sum(one.bytes for one in lifetimes) + 1, [0] * count
    offsets: list[int | None] = [None] * count
    floors = [0] * count

    def beaten() -> bool:
        """What is alive at one time and not placed stands on what is placed there, one upon the other."""
        for together in alive:
            rest = sum(lifetimes[k].bytes for k in together if offsets[k] is None)
            top = max((place + lifetimes[k].bytes for k in together if (place := offsets[k]) is not None), default=0)
            if top + rest >= best_total:
                return True
        return False

    def search(lowest: int, left: int) -> None:
        nonlocal best_total, best_offsets, floors
        if beaten():
            return
        if not left:
            best_offsets = [place or 0 for place in offsets]
            best_total = max((place + one.bytes for place, one in zip(best_offsets, lifetimes, strict=True)), default=0)
            return
        before = floors
        for k in sorted(
            (k for k in range(count) if offsets[k] is None and floors[k] >= lowest), key=floors.__getitem__
        ):
            offsets[k] = before[k]
            floors = list(before)
            for j in meets[k]:
                floors[j] = max(floors[j], before[k] + lifetimes[k].bytes)
            search(before[k], left - 1)
            offsets[k], floors = None, before

    search(0, count)
    return Placement(tuple(best_offsets), best_total, "exhaustive")
