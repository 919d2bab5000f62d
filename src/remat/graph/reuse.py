"""Chen's sharing: whole buffers are handed on, by counting references or by colouring. The baseline of `arena`.

Chen et al. 2016, section 3: walk the graph in topological order; a result takes a buffer whose last user has run, or a
new one. A buffer is as large as the largest result that ever sits in it, and buffers lie side by side. How close the
sizes of a result and of the buffer it takes must be is searched over, as in the authors' system (nnvm's plan_memory):
sizes within a factor of 1, 2, 4, 8 or 16, larger buffers first, the closest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from .arena import Lifetime, Placement

_RANGES: Final = (1, 2, 4, 8, 16)


def reference_counting(lifetimes: Sequence[Lifetime], ranges: Sequence[int] = _RANGES) -> Placement:
    """Buffers handed on when the last user has run; the best of several ranges of sizes that may share."""
    return min((_counted(lifetimes, factor) for factor in ranges), key=lambda one: one.total_bytes)


def _counted(lifetimes: Sequence[Lifetime], factor: int) -> Placement:
    """One walk: what was freed before a result is allocated may be taken by it."""
    events = sorted(
        [(one.first, 1, k) for k, one in enumerate(lifetimes)]
        + [(one.last + 1, 0, k) for k, one in enumerate(lifetimes)]
    )
    sizes: list[int] = []  # of the buffers
    free: list[tuple[int, int]] = []  # (size, buffer), ascending
    taken = [0] * len(lifetimes)
    for _, allocates, k in events:
        if not allocates:
            insort(free, (sizes[taken[k]], taken[k]))
            continue
        taken[k] = _take(free, sizes, lifetimes[k].bytes, factor)
    return _laid_out(lifetimes, taken, sizes, "reference counting")


def _take(free: list[tuple[int, int]], sizes: list[int], wanted: int, factor: int) -> int:
    """The closest larger free buffer, else the closest smaller one, which grows, else a new one."""
    place = bisect_left(free, (wanted, -1))
    if place < len(free) and free[place][0] <= wanted * factor:
        return free.pop(place)[1]
    if place and free[place - 1][0] * factor >= wanted:
        buffer = free.pop(place - 1)[1]
        sizes[buffer] = wanted
        return buffer
    sizes.append(wanted)
    return len(sizes) - 1


def colouring(lifetimes: Sequence[Lifetime]) -> Placement:
    """Buffers as colours of the graph of blocks that meet, largest first: each takes the first buffer free for it."""
    buffers: list[list[tuple[int, int]]] = []  # the times taken, ascending
    sizes: list[int] = []
    taken = [0] * len(lifetimes)
    for k in sorted(range(len(lifetimes)), key=lambda k: (-lifetimes[k].bytes, lifetimes[k].first)):
        one = lifetimes[k]
        buffer = next((number for number, spans in enumerate(buffers) if _is_free(spans, one)), len(buffers))
        if buffer == len(buffers):
            buffers.append([])
            sizes.append(one.bytes)
        insort(buffers[buffer], (one.first, one.last))
        taken[k] = buffer
    return _laid_out(lifetimes, taken, sizes, "colouring")


def _is_free(spans: list[tuple[int, int]], one: Lifetime) -> bool:
    place = bisect_left(spans, (one.first, one.last))
    after = place < len(spans) and spans[place][0] <= one.last
    return not after and not (place and spans[place - 1][1] >= one.first)


def _laid_out(lifetimes: Sequence[Lifetime], taken: Sequence[int], sizes: Sequence[int], rule: str) -> Placement:
    """Buffers side by side. The baseline never claims more than it has: its blocks sit in buffers that hold them."""
    starts = list(accumulate(sizes, initial=0))
    assert all(one.bytes <= sizes[buffer] for one, buffer in zip(lifetimes, taken, strict=True))
    return Placement(tuple(starts[buffer] for buffer in taken), starts[-1], rule)
