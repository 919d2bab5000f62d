"""The recurrence for unequal chains, compiled. Arguments are those of `Costs`; see `unequal` for the mathematics.

Everything is in whole units of `unit` bytes: what an option needs or takes is rounded up, so that a value is never
better than what its room of m units really allows; or, for a lower bound, what it takes is rounded down.

Two flavours of a subproblem: COUNTED, carry s lies in its room and may be dropped; FREE, somebody outside keeps it.
Seconds are counted in ticks, whole numbers, because the minimum of integers is what compilers vectorise best. Those of
one subproblem, a non-increasing function of the room, are kept from the first room that suffices (`low`) to the first
from which nothing is gained (`high`), all in one pool.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._compiled import BOOL, INT, LIST, ROWS, compiled, types

COUNTED: Final = 0
FREE: Final = 1
NEVER: Final = 1 << 29
"""Ticks of what does not fit: two of them and what is between still fit into 32 bits."""
_TOGETHER_TICKS: Final = 1 << 25

Ticks = NDArray[np.int32]


# Rows of `Problem.stages`, one column for every carry, and of `Problem.ways`; most are fields of `Costs`.
CARRY, BASE, FORWARD, FASTEST, GRADIENTS, FIRST, IS_SITE, NEXT_SITE, COLUMN, TWIN_SHIFT, TWIN_REACH, WIDEST = range(12)
STOP, SECONDS, KEEP, ENTERING, NEED_FORWARD, NEED_BACKWARD = range(6)


class Problem(NamedTuple):
    """`Costs` in few arrays, seconds in ticks, and what follows from them. Every array more takes long to compile.

    `ends`: the carries that may be stored, but for carry 0, and the end of the chain: where subproblems end. They are
    the columns of all tables, t in column stages[COLUMN, t]; ends[stages[NEXT_SITE, s]] is the first after s.
    `passing`: by s and column, bytes for running from s to there without tape, besides carry s. For twins see
    `_unequal_tables`.
    """

    stages: NDArray[np.int64]
    ways: NDArray[np.int64]
    passing: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tables(NamedTuple):
    """Ticks by flavour, s, column of t, and room."""

    pool: Ticks
    offset: NDArray[np.int64]
    low: NDArray[np.int32]
    high: NDArray[np.int32]


_INT32S: Final[Any] = types.int32[::1]
_CUBE: Final[Any] = INT[:, :, ::1]
_CUBE32: Final[Any] = types.int32[:, :, ::1]
_PROBLEM: Final[Any] = types.NamedTuple((ROWS, ROWS, ROWS, LIST), Problem)
_TABLES: Final[Any] = types.NamedTuple((_INT32S, _CUBE, _CUBE32, _CUBE32), Tables)


@compiled(INT, INT, INT)
def _ceil(size: int, unit: int) -> int:
    return -((-size) // unit)


@compiled(INT, INT, INT, BOOL)
def _taken(size: int, unit: int, down: bool) -> int:
    return size // unit if down else -((-size) // unit)


@compiled(INT, _TABLES, *[INT] * 4)
def lookup(tables: Tables, flavour: int, s: int, column: int, room: int) -> int:
    """Ticks of a subproblem in a room of so many units."""
    low = tables.low[flavour, s, column]
    if room < low:
        return NEVER
    ticks: int = tables.pool[tables.offset[flavour, s, column] + min(room, tables.high[flavour, s, column]) - low]
    return ticks


@compiled(INT, _PROBLEM, *[INT] * 4)
def _recording(p: Problem, c: int, flavour: int, s: int, t: int) -> int:
    """Bytes of room that way c needs while it records and while it is consumed."""
    own = p.stages[CARRY, s] if flavour == COUNTED else 0
    extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
    later = p.stages[GRADIENTS, p.ways[STOP, c]] - p.stages[GRADIENTS, t]
    need: int = max(p.stages[BASE, t] + p.ways[NEED_FORWARD, c] + own, later + p.ways[NEED_BACKWARD, c] + extra)
    return need


@compiled(types.none, _INT32S, INT, INT, _INT32S, INT, INT, INT)
def _better(now: Ticks, row: int, right: int, pool: Ticks, left: int, size: int, w: int) -> None:
    """now[row …] ← min(now[row …], w + now[right …] + pool[left …]), `size` rooms.

    Only unsigned indices, which cannot mean places counted from the end, are compiled into vector instructions.
    """
    a, b, c, d = np.uint64(row), np.uint64(right), np.uint64(left), np.int32(w)
    for i in range(np.uint64(size)):
        now[a + i] = min(now[a + i], np.int32(np.int32(d + now[b + i]) + pool[c + i]))


@compiled(types.none, _INT32S, *[INT] * 4)
def _better_flat(now: Ticks, row: int, right: int, size: int, w: int) -> None:
    """now[row …] ← min(now[row …], w + now[right …]), `size` rooms."""
    a, b, d = np.uint64(row), np.uint64(right), np.int32(w)
    for i in range(np.uint64(size)):
        now[a + i] = min(now[a + i], np.int32(d + now[b + i]))


@compiled(types.none, _PROBLEM, _INT32S, *[INT] * 5, BOOL)
def _record(p: Problem, now: Ticks, rooms: int, flavour: int, s: int, t: int, unit: int, down: bool) -> None:
    """All ways to record from stage s on, before the rest up to t is solved from the recorded range's end."""
    length = p.stages.shape[1] - 1
    for c in range(p.stages[FIRST, s], p.stages[FIRST, s + 1]):
        j = p.ways[STOP, c]
        if j > t:
            continue
        extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
        shift = _taken(p.ways[KEEP, c] + extra, unit, down)
        low = max(_ceil(_recording(p, c, flavour, s, t), unit), shift)
        if low < rooms:
            row = (flavour * (length + 1) + s) * rooms + low
            rest = (FREE * (length + 1) + j) * rooms + low - shift
            _better_flat(now, row, rest, rooms - low, p.ways[SECONDS, c])


@compiled(types.none, _PROBLEM, _TABLES, _INT32S, _INT32S, *[INT] * 5, BOOL)
def _split(
    p: Problem,
    tables: Tables,
    now: Ticks,
    low_right: NDArray[np.int32],
    rooms: int,
    flavour: int,
    s: int,
    t: int,
    unit: int,
    down: bool,
) -> None:
    """All carries k to store: the forward runs on to k, k … t−1 is solved, then s … k−1 from carry s again."""
    length = p.stages.shape[1] - 1
    own = p.stages[CARRY, s] if flavour == COUNTED else 0
    shift = _taken(own, unit, down)
    row = (flavour * (length + 1) + s) * rooms
    least, end = p.stages[FASTEST, t] - p.stages[FASTEST, s], rooms
    offset, low_left, high_left = tables.offset[flavour, s], tables.low[flavour, s], tables.high[flavour, s]
    forward, passing, pool = p.stages[FORWARD], p.passing[s], tables.pool
    for column in range(p.stages[NEXT_SITE, s], p.stages[COLUMN, t]):
        k = p.ends[column]
        w = forward[k] - forward[s]
        made = p.stages[GRADIENTS, k] - p.stages[GRADIENTS, t]
        gone = _taken(made, unit, down) if made else 0
        low = max(low_right[k] + shift, low_left[column] + gone)
        need = p.stages[BASE, t] + own + passing[column]
        if need > low * unit:
            low = _ceil(need, unit)
        # Two parts take at least `least` between them, so rooms that have this or better already need no look. Both w
        # and the row only move towards each other, so neither do they for any later k.
        while end > 0 and now[row + end - 1] <= w + least:
            end -= 1
        flat = min(end, max(low, high_left[column] + gone))
        right = (COUNTED * (length + 1) + k) * rooms - shift
        left = offset[column] - low_left[column] - gone
        if low < flat:
            _better(now, row + low, right + low, pool, left + low, flat - low, w)
        if low < end and flat < end:
            rest = pool[left + high_left[column] + gone]
            _better_flat(now, row + flat, right + flat, end - flat, w + rest)


@compiled(INT, _TABLES, _INT32S, *[INT] * 6)
def _keep(tables: Tables, now: Ticks, row: int, rooms: int, flavour: int, s: int, column: int, used: int) -> int:
    """Put the part of a row that changes into the pool; returns how much of the pool is used then, −1 if too much."""
    low, high = row, row + rooms - 1
    while low < row + rooms and now[low] == NEVER:
        low += 1
    while high > low and now[high - 1] == now[high]:
        high -= 1
    size = 0 if low == row + rooms else high + 1 - low
    tables.low[flavour, s, column], tables.high[flavour, s, column] = low - row, high - row
    tables.offset[flavour, s, column] = used
    if used + size > len(tables.pool):
        return -1
    pool = tables.pool
    for i in range(size):
        pool[used + i] = now[low + i]
    return used + size


@compiled(types.none, _TABLES, _INT32S, *[INT] * 7)
def _copy(
    tables: Tables, now: Ticks, row: int, rooms: int, flavour: int, s: int, column: int, twin: int, its_column: int
) -> None:
    """The row of a segment that equals one met before, which starts at `twin`; where `row` < 0 not into `now`."""
    low, high = tables.low[flavour, twin, its_column], tables.high[flavour, twin, its_column]
    offset, pool = tables.offset[flavour, twin, its_column], tables.pool
    tables.low[flavour, s, column], tables.high[flavour, s, column] = low, high
    tables.offset[flavour, s, column] = offset
    if row < 0:
        return
    for room in range(low):
        now[row + room] = NEVER
    if low < rooms:
        for i in range(high + 1 - low):
            now[row + low + i] = pool[offset + i]
        for room in range(high + 1, rooms):
            now[row + room] = pool[offset + high - low]


@compiled(INT, _PROBLEM, _TABLES, _INT32S, _INT32S, *[INT] * 4, BOOL, INT)
def _solve(
    p: Problem,
    tables: Tables,
    now: Ticks,
    low: NDArray[np.int32],
    rooms: int,
    s: int,
    t: int,
    unit: int,
    down: bool,
    used: int,
) -> int:
    """Solve s … t−1 in both flavours when everything later that ends in t is solved; returns as `_keep` does."""
    length, column = p.stages.shape[1] - 1, p.stages[COLUMN, t]
    shift, equal = p.stages[TWIN_SHIFT, t], s >= t - p.stages[TWIN_REACH, t]
    for flavour in range(2):
        if flavour == COUNTED and not p.stages[IS_SITE, s]:
            continue
        row = (flavour * (length + 1) + s) * rooms
        if equal:
            # A free start is looked up by what is recorded up to it, from some stage that has no twin.
            if flavour == FREE and s > t - p.stages[TWIN_REACH, t] + p.stages[WIDEST, t]:
                row = -1
            _copy(tables, now, row, rooms, flavour, s, column, s - shift, p.stages[COLUMN, t - shift])
            continue
        for room in range(rooms):
            now[row + room] = NEVER
        _record(p, now, rooms, flavour, s, t, unit, down)
        _split(p, tables, now, low, rooms, flavour, s, t, unit, down)
        used = _keep(tables, now, row, rooms, flavour, s, column, used)
        if used < 0:
            return used
    low[s] = tables.low[COUNTED, s, column]
    return used


@compiled(INT, _PROBLEM, _TABLES, INT, INT, BOOL, INT, inner=False)
def fill(p: Problem, tables: Tables, rooms: int, unit: int, down: bool, together: int) -> int:
    """Solve every subproblem for rooms 0 … rooms−1; returns how much of the pool is used, −1 if it is too small.

    `together` ends t are taken at once, so that what lies in the pool of a stage s is read once for all of them; twins
    must have ended before.
    """
    length = p.stages.shape[1] - 1
    rows = 2 * (length + 1) * rooms
    together = max(1, min(together, _TOGETHER_TICKS // rows))
    now = np.empty(together * rows, dtype=np.int32)
    low = np.empty(together * (length + 1), dtype=np.int32)
    used = 0
    for first in range(0, len(p.ends), together):
        ends = p.ends[first : first + together]
        for i in range(len(ends)):
            for room in range(rooms):
                now[i * rows + (FREE * (length + 1) + ends[i]) * rooms + room] = 0
        for s in range(ends[len(ends) - 1] - 1, -1, -1):
            for i in range(len(ends)):
                if ends[i] > s:
                    here = now[i * rows : (i + 1) * rows]
                    used = _solve(p, tables, here, low[i * (length + 1) :], rooms, s, ends[i], unit, down, used)
                    if used < 0:
                        return used
    return used


@compiled(types.UniTuple(INT, 2), _PROBLEM, _TABLES, _CUBE, *[INT] * 6, inner=False)
def choose(
    p: Problem, tables: Tables, least: NDArray[np.int64], flavour: int, s: int, t: int, room: int, unit: int, hope: int
) -> tuple[int, int]:
    """The best option of a subproblem in a room of so many bytes: its ticks and way c, or −k for storing carry k.

    Whether an option is possible is decided in bytes, with the `least` rooms of what remains; how good it is, by the
    tables, as if what remains had `hope` bytes more: some of what was lost by rounding comes back.
    """
    own = p.stages[CARRY, s] if flavour == COUNTED else 0
    end = p.stages[COLUMN, t]
    best, option = 4 * NEVER, 0
    for c in range(p.stages[FIRST, s], p.stages[FIRST, s + 1]):
        j = p.ways[STOP, c]
        extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
        rest = room - p.ways[KEEP, c] - extra
        if j > t or room < _recording(p, c, flavour, s, t) or (j < t and rest < least[FREE, j, end]):
            continue
        after = 0 if j == t else lookup(tables, FREE, j, end, (rest + hope) // unit)
        if p.ways[SECONDS, c] + after < best:
            best, option = p.ways[SECONDS, c] + after, c
    for column in range(p.stages[NEXT_SITE, s], end):
        k = p.ends[column]
        if room < p.stages[BASE, t] + own + p.passing[s, column]:
            break
        before = room - p.stages[GRADIENTS, k] + p.stages[GRADIENTS, t]
        if before < least[flavour, s, column] or room - own < least[COUNTED, k, end]:
            continue
        left = lookup(tables, flavour, s, column, (before + hope) // unit)
        right = lookup(tables, COUNTED, k, end, (room - own + hope) // unit)
        ticks = p.stages[FORWARD, k] - p.stages[FORWARD, s] + left + right
        if ticks < best:
            best, option = ticks, -k
    return best, option


@compiled(types.none, _PROBLEM, _CUBE, _CUBE, _CUBE, *[INT] * 3)
def _copy_least(
    p: Problem,
    room: NDArray[np.int64],
    ticks: NDArray[np.int64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    """As for an equal segment met before; options are ways and stages of this one."""
    shift = p.stages[TWIN_SHIFT, t]
    twin, end, its_end = s - shift, p.stages[COLUMN, t], p.stages[COLUMN, t - shift]
    found = option[flavour, twin, its_end]
    room[flavour, s, end], ticks[flavour, s, end] = room[flavour, twin, its_end], ticks[flavour, twin, its_end]
    way = found + p.stages[FIRST, s] - p.stages[FIRST, twin]
    option[flavour, s, end] = found - shift if found < 0 else way


@compiled(types.none, _PROBLEM, _CUBE, _CUBE, _CUBE, *[INT] * 3)
def _least_recording(
    p: Problem,
    room: NDArray[np.int64],
    ticks: NDArray[np.int64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    end = p.stages[COLUMN, t]
    for c in range(p.stages[FIRST, s], p.stages[FIRST, s + 1]):
        j = p.ways[STOP, c]
        if j > t:
            continue
        need, time = _recording(p, c, flavour, s, t), p.ways[SECONDS, c]
        if j < t:
            extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
            need, time = max(need, p.ways[KEEP, c] + extra + room[FREE, j, end]), time + ticks[FREE, j, end]
        if need < room[flavour, s, end] or (need == room[flavour, s, end] and time < ticks[flavour, s, end]):
            room[flavour, s, end], ticks[flavour, s, end], option[flavour, s, end] = need, time, c


@compiled(types.none, _PROBLEM, _CUBE, _CUBE, _CUBE, *[INT] * 3)
def _least_splitting(
    p: Problem,
    room: NDArray[np.int64],
    ticks: NDArray[np.int64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    own, end = p.stages[CARRY, s] if flavour == COUNTED else 0, p.stages[COLUMN, t]
    for column in range(p.stages[NEXT_SITE, s], end):
        k = p.ends[column]
        need = own + max(p.stages[BASE, t] + p.passing[s, column], room[COUNTED, k, end])
        need = max(need, p.stages[GRADIENTS, k] - p.stages[GRADIENTS, t] + room[flavour, s, column])
        time = p.stages[FORWARD, k] - p.stages[FORWARD, s] + ticks[COUNTED, k, end] + ticks[flavour, s, column]
        if need < room[flavour, s, end] or (need == room[flavour, s, end] and time < ticks[flavour, s, end]):
            room[flavour, s, end], ticks[flavour, s, end], option[flavour, s, end] = need, time, -k


@compiled(types.UniTuple(_CUBE, 2), _PROBLEM, inner=False)
def least_rooms(p: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The smallest room of every subproblem in bytes, and what to do in it; of several, what takes the fewest ticks."""
    length = p.stages.shape[1] - 1
    shape = (2, length + 1, len(p.ends))
    room, ticks, option = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for end in range(len(p.ends)):
        t = p.ends[end]
        for s in range(t - 1, -1, -1):
            for flavour in range(2):
                if flavour == COUNTED and not p.stages[IS_SITE, s]:
                    continue
                if s >= t - p.stages[TWIN_REACH, t]:
                    _copy_least(p, room, ticks, option, flavour, s, t)
                    continue
                room[flavour, s, end] = np.iinfo(np.int64).max
                _least_recording(p, room, ticks, option, flavour, s, t)
                _least_splitting(p, room, ticks, option, flavour, s, t)
    return room, option
