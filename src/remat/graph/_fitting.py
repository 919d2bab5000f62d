"""Compiled: blocks of memory put one after another into the lowest gap that takes them."""

from __future__ import annotations

from typing import Any, Final

from ..planners._compiled import INT, LIST, compiled

_NO_GAP: Final = 2**62


@compiled(INT, LIST, LIST, LIST, LIST, INT, LIST, LIST, inner=False)
def fit(first: Any, last: Any, size: Any, order: Any, best: int, offsets: Any, placed: Any) -> int:
    """Give every block of `order` an offset; the smallest arena that holds them all comes out.

    A block goes into the lowest gap that is large enough between the blocks alive at some time of its own, or, where
    `best` is not 0, into the smallest such gap; above all of them if there is none. `placed` is room for as many
    numbers as there are blocks: those placed so far, ascending by offset.
    """
    total = 0
    for count in range(len(order)):
        block = order[count]
        top, offset, spare = 0, -1, _NO_GAP
        for k in range(count):
            other = placed[k]
            if first[other] > last[block] or first[block] > last[other]:
                continue
            gap = offsets[other] - top - size[block]
            if 0 <= gap < spare:
                offset, spare = top, gap
                if best == 0:
                    break
            top = max(top, offsets[other] + size[other])
        if offset < 0:
            offset = top
        offsets[block] = offset
        total = max(total, offset + size[block])
        k = count
        while k > 0 and offsets[placed[k - 1]] > offset:
            placed[k] = placed[k - 1]
            k -= 1
        placed[k] = block
    return total
