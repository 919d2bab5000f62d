"""The recurrence for unequal chains, compiled. Arguments are those of `Costs`; see `unequal` for the mathematics.

Everything is in whole units of `unit` bytes: what an option needs or takes is rounded up, so that a value is never
better than what its room of m units really allows; or, for a lower bound, what it takes is rounded down.

Two flavours of a subproblem: COUNTED, carry s lies in its room and may be dropped; FREE, somebody outside keeps it.
Seconds are counted in ticks, whole numbers, because the minimum of integers is what compilers vectorise best. Those of
one subproblem, a non-increasing function of the room, are kept from the first room that suffices (`low`) to the first
from which nothing is gained (`high`), all in one pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])

COUNTED: Final = 0
FREE: Final = 1
NEVER: Final = 1 << 29
"""Ticks of what does not fit: two of them and what is between still fit into 32 bits."""
_TOGETHER: Final = 8

Ticks = NDArray[np.int32]


def _compiled(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


# Rows of `Problem.stages`, one column for every carry, and of `Problem.ways`; most are fields of `Costs`.
CARRY, BASE, FORWARD, FASTEST, GRADIENTS, FIRST, IS_SITE, NEXT_SITE, TWIN_SHIFT, TWIN_REACH = range(10)
STOP, SECONDS, KEEP, ENTERING, NEED_FORWARD, NEED_BACKWARD = range(6)


class Problem(NamedTuple):
    """`Costs` in few arrays, seconds in ticks, and what follows from them. Compiling takes seconds for every array more.

    `passing[s, k]`: bytes for running from s to k without tape, besides carry s. `sites`: the carries that may be
    stored; sites[stages[NEXT_SITE, s]] is the first after s. `ends`: those, and the end of the chain. For twins see
    `_unequal_tables`.
    """

    stages: NDArray[np.int64]
    ways: NDArray[np.int64]
    passing: NDArray[np.int64]
    sites: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tables(NamedTuple):
    """Ticks by flavour, s, t and room."""

    pool: Ticks
    offset: NDArray[np.int64]
    low: NDArray[np.int32]
    high: NDArray[np.int32]


@_compiled
def _ceil(size: int, unit: int) -> int:
    return -((-size) // unit)


@_compiled
def _taken(size: int, unit: int, down: bool) -> int:
    return size // unit if down else -((-size) // unit)


@_compiled
def lookup(tables: Tables, flavour: int, s: int, t: int, room: int) -> int:
    """Ticks of a subproblem in a room of so many units."""
    low = tables.low[flavour, s, t]
    if room < low:
        return NEVER
    ticks: int = tables.pool[tables.offset[flavour, s, t] + min(room, tables.high[flavour, s, t]) - low]
    return ticks


@_compiled
def _better(now: Ticks, row: int, right: int, pool: Ticks, left: int, size: int, w: int) -> None:
    """now[row …] ← min(now[row …], w + now[right …] + pool[left …]), `size` rooms.

    Only unsigned indices, which cannot mean places counted from the end, are compiled into vector instructions.
    """
    a, b, c, d = np.uint64(row), np.uint64(right), np.uint64(left), np.int32(w)
    for i in range(np.uint64(size)):
        now[a + i] = min(now[a + i], np.int32(np.int32(d + now[b + i]) + pool[c + i]))


@_compiled
def _better_flat(now: Ticks, row: int, right: int, size: int, w: int) -> None:
    """now[row …] ← min(now[row …], w + now[right …]), `size` rooms."""
    a, b, d = np.uint64(row), np.uint64(right), np.int32(w)
    for i in range(np.uint64(size)):
        now[a + i] = min(now[a + i], np.int32(d + now[b + i]))


@_compiled
def _record(p: Problem, now: Ticks, rooms: int, flavour: int, s: int, t: int, unit: int, down: bool) -> None:
    """All ways to record from stage s on, before the rest up to t is solved from the recorded range's end."""
    length = p.stages.shape[1] - 1
    for c in range(p.stages[FIRST, s], p.stages[FIRST, s + 1]):
        j = p.ways[STOP, c]
        if j > t:
            continue
        extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
        while_recording = (
            p.stages[BASE, t] + p.ways[NEED_FORWARD, c] + (p.stages[CARRY, s] if flavour == COUNTED else 0)
        )
        while_consuming = p.stages[GRADIENTS, j] - p.stages[GRADIENTS, t] + p.ways[NEED_BACKWARD, c] + extra
        shift = _taken(p.ways[KEEP, c] + extra, unit, down)
        low = max(_ceil(max(while_recording, while_consuming), unit), shift)
        if low < rooms:
            row = (flavour * (length + 1) + s) * rooms + low
            rest = (FREE * (length + 1) + j) * rooms + low - shift
            _better_flat(now, row, rest, rooms - low, p.ways[SECONDS, c])


@_compiled
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
    for index in range(p.stages[NEXT_SITE, s], p.stages[NEXT_SITE, t - 1]):
        k = p.sites[index]
        w = forward[k] - forward[s]
        made = p.stages[GRADIENTS, k] - p.stages[GRADIENTS, t]
        gone = _taken(made, unit, down) if made else 0
        low = max(low_right[k] + shift, low_left[k] + gone)
        need = p.stages[BASE, t] + own + passing[k]
        if need > low * unit:
            low = _ceil(need, unit)
        # Two parts take at least `least` between them, so rooms that have this or better already need no look. Both w
        # and the row only move towards each other, so neither do they for any later k.
        while end > 0 and now[row + end - 1] <= w + least:
            end -= 1
        flat = min(end, max(low, high_left[k] + gone))
        right = (COUNTED * (length + 1) + k) * rooms - shift
        left = offset[k] - low_left[k] - gone
        if low < flat:
            _better(now, row + low, right + low, pool, left + low, flat - low, w)
        if low < end and flat < end:
            rest = pool[left + high_left[k] + gone]
            _better_flat(now, row + flat, right + flat, end - flat, w + rest)


@_compiled
def _keep(tables: Tables, now: Ticks, row: int, rooms: int, flavour: int, s: int, t: int, used: int) -> int:
    """Put the part of a row that changes into the pool; returns how much of the pool is used then, −1 if too much."""
    low, high = row, row + rooms - 1
    while low < row + rooms and now[low] == NEVER:
        low += 1
    while high > low and now[high - 1] == now[high]:
        high -= 1
    size = 0 if low == row + rooms else high + 1 - low
    tables.low[flavour, s, t], tables.high[flavour, s, t], tables.offset[flavour, s, t] = low - row, high - row, used
    if used + size > len(tables.pool):
        return -1
    pool = tables.pool
    for i in range(size):
        pool[used + i] = now[low + i]
    return used + size


@_compiled
def _copy(tables: Tables, now: Ticks, row: int, rooms: int, flavour: int, s: int, t: int, shift: int) -> None:
    """The row of a segment that equals the one `shift` stages earlier."""
    low, high = tables.low[flavour, s - shift, t - shift], tables.high[flavour, s - shift, t - shift]
    offset = tables.offset[flavour, s - shift, t - shift]
    tables.low[flavour, s, t], tables.high[flavour, s, t], tables.offset[flavour, s, t] = low, high, offset
    pool = tables.pool
    for room in range(rooms):
        now[row + room] = NEVER if room < low else pool[offset + min(room, high) - low]


@_compiled
def fill(p: Problem, tables: Tables, rooms: int, unit: int, down: bool) -> int:
    """Solve every subproblem for rooms 0 … rooms−1; returns how much of the pool is used, −1 if it is too small.

    A few ends t are taken together, so that what lies in the pool of a stage s is read once for all of them.
    """
    length = p.stages.shape[1] - 1
    rows = 2 * (length + 1) * rooms
    now = np.full(_TOGETHER * rows, NEVER, dtype=np.int32)
    low = np.zeros(_TOGETHER * (length + 1), dtype=np.int32)
    used = 0
    for first in range(0, len(p.ends), _TOGETHER):
        ends = p.ends[first : first + _TOGETHER]
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


@_compiled
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
    length = p.stages.shape[1] - 1
    for flavour in range(2):
        if flavour == COUNTED and not p.stages[IS_SITE, s]:
            continue
        row = (flavour * (length + 1) + s) * rooms
        if s >= t - p.stages[TWIN_REACH, t]:
            _copy(tables, now, row, rooms, flavour, s, t, p.stages[TWIN_SHIFT, t])
            continue
        for room in range(rooms):
            now[row + room] = NEVER
        _record(p, now, rooms, flavour, s, t, unit, down)
        _split(p, tables, now, low, rooms, flavour, s, t, unit, down)
        used = _keep(tables, now, row, rooms, flavour, s, t, used)
        if used < 0:
            return used
    low[s] = tables.low[COUNTED, s, t]
    return used


@_compiled
def choose(p: Problem, tables: Tables, flavour: int, s: int, t: int, room_bytes: int, unit: int) -> tuple[int, int]:
    """The best option of a subproblem in a room of so many bytes: its ticks and way c, or −s' for storing carry s'.

    Needs are compared in bytes, only what is left afterwards is rounded down to whole units.
    """
    own = p.stages[CARRY, s] if flavour == COUNTED else 0
    best, option = NEVER, 0
    for c in range(p.stages[FIRST, s], p.stages[FIRST, s + 1]):
        j = p.ways[STOP, c]
        extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
        if j > t or room_bytes < p.stages[BASE, t] + p.ways[NEED_FORWARD, c] + own:
            continue
        if room_bytes < p.stages[GRADIENTS, j] - p.stages[GRADIENTS, t] + p.ways[NEED_BACKWARD, c] + extra:
            continue
        rest = 0 if j == t else lookup(tables, FREE, j, t, (room_bytes - p.ways[KEEP, c] - extra) // unit)
        if p.ways[SECONDS, c] + rest < best:
            best, option = p.ways[SECONDS, c] + rest, c
    for index in range(p.stages[NEXT_SITE, s], p.stages[NEXT_SITE, t - 1]):
        k = p.sites[index]
        if room_bytes < p.stages[BASE, t] + own + p.passing[s, k]:
            break
        left = lookup(tables, flavour, s, k, (room_bytes - p.stages[GRADIENTS, k] + p.stages[GRADIENTS, t]) // unit)
        right = lookup(tables, COUNTED, k, t, (room_bytes - own) // unit)
        if p.stages[FORWARD, k] - p.stages[FORWARD, s] + left + right < best:
            best, option = p.stages[FORWARD, k] - p.stages[FORWARD, s] + left + right, -k
    return best, option


@_compiled
def least_rooms(p: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The smallest room of every subproblem in bytes, the fewest ticks found with it, and the option to take."""
    length = p.stages.shape[1] - 1
    need = np.zeros((2, length + 1, length + 1), dtype=np.int64)
    seconds = np.zeros((2, length + 1, length + 1), dtype=np.int64)
    option = np.zeros((2, length + 1, length + 1), dtype=np.int64)
    for t in range(1, length + 1):
        for s in range(t - 1, -1, -1):
            for flavour in range(2):
                need[flavour, s, t] = np.iinfo(np.int64).max
                _least_recording(p, need, seconds, option, flavour, s, t)
                _least_splitting(p, need, seconds, option, flavour, s, t)
    return need, seconds, option


@_compiled
def _least_recording(
    p: Problem,
    need: NDArray[np.int64],
    seconds: NDArray[np.int64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    own = p.stages[CARRY, s] if flavour == COUNTED else 0
    for c in range(p.stages[FIRST, s], p.stages[FIRST, s + 1]):
        j = p.ways[STOP, c]
        if j > t:
            continue
        extra = p.ways[ENTERING, c] if flavour == COUNTED else 0
        room = max(
            p.stages[BASE, t] + p.ways[NEED_FORWARD, c] + own,
            p.stages[GRADIENTS, j] - p.stages[GRADIENTS, t] + p.ways[NEED_BACKWARD, c] + extra,
        )
        if j < t:
            room = max(room, p.ways[KEEP, c] + extra + need[FREE, j, t])
        time = p.ways[SECONDS, c] + seconds[FREE, j, t]
        if room < need[flavour, s, t] or (room == need[flavour, s, t] and time < seconds[flavour, s, t]):
            need[flavour, s, t], seconds[flavour, s, t], option[flavour, s, t] = room, time, c


@_compiled
def _least_splitting(
    p: Problem,
    need: NDArray[np.int64],
    seconds: NDArray[np.int64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    own = p.stages[CARRY, s] if flavour == COUNTED else 0
    for k in range(s + 1, t):
        room = max(p.stages[BASE, t] + own + p.passing[s, k], own + need[COUNTED, k, t])
        room = max(room, p.stages[GRADIENTS, k] - p.stages[GRADIENTS, t] + need[flavour, s, k])
        time = p.stages[FORWARD, k] - p.stages[FORWARD, s] + seconds[COUNTED, k, t] + seconds[flavour, s, k]
        if room < need[flavour, s, t] or (room == need[flavour, s, t] and time < seconds[flavour, s, t]):
            need[flavour, s, t], seconds[flavour, s, t], option[flavour, s, t] = room, time, -k
