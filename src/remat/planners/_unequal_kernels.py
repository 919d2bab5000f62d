"""The recurrence for unequal chains, compiled. Arguments are those of `Costs`; see `unequal` for the mathematics.

Everything is in whole units of `unit` bytes: what an option needs or takes is rounded up, so that a value is never
better than what its room of m units really allows; or, for a lower bound, what it takes is rounded down.

Two flavours of a subproblem: COUNTED, carry s lies in its room and may be dropped; FREE, somebody outside keeps it.
The seconds of one subproblem, a non-increasing function of the room, are kept from the first room that suffices (`low`)
to the first from which nothing is gained (`high`), all in one pool.
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
_BLOCK: Final = 64  # rooms that are skipped or computed together


def _compiled(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


class Problem(NamedTuple):
    """The fields of `Costs` that kernels read, and where equal segments were met before (see `twins`)."""

    carry: NDArray[np.int64]
    base: NDArray[np.int64]
    workspace: NDArray[np.int64]
    forward: NDArray[np.float64]
    fastest: NDArray[np.float64]
    gradients: NDArray[np.int64]
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    seconds: NDArray[np.float64]
    keep: NDArray[np.int64]
    entering: NDArray[np.int64]
    need_forward: NDArray[np.int64]
    need_backward: NDArray[np.int64]
    twin_shift: NDArray[np.int64]
    twin_reach: NDArray[np.int64]


class Tables(NamedTuple):
    """Seconds by flavour, s, t and room."""

    pool: NDArray[np.float32]
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
def lookup(tables: Tables, flavour: int, s: int, t: int, room: int) -> float:
    """Seconds of a subproblem in a room of so many units."""
    low = tables.low[flavour, s, t]
    if room < low:
        return np.inf
    seconds: float = tables.pool[tables.offset[flavour, s, t] + min(room, tables.high[flavour, s, t]) - low]
    return seconds


@_compiled
def _better(row: NDArray[np.float32], right: NDArray[np.float32], left: NDArray[np.float32], w: np.float32) -> None:
    """row ← min(row, w + right + left), skipping blocks of rooms whose best candidate does not beat their worst value.

    All three decrease with the room, so a block's best candidate is its last and its worst value its first.
    """
    size = len(row)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        if w + right[stop - 1] + left[stop - 1] < row[start]:
            a, b, c = row[start:stop], right[start:stop], left[start:stop]
            for i in range(stop - start):
                value = w + b[i] + c[i]
                a[i] = value if value < a[i] else a[i]


@_compiled
def _better_flat(row: NDArray[np.float32], right: NDArray[np.float32], w: np.float32) -> None:
    """row ← min(row, w + right), likewise."""
    size = len(row)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        if w + right[stop - 1] < row[start]:
            a, b = row[start:stop], right[start:stop]
            for i in range(stop - start):
                value = w + b[i]
                a[i] = value if value < a[i] else a[i]


@_compiled
def _first_at_most(row: NDArray[np.float32], value: float) -> int:
    """The first room whose seconds are at most `value`; one past the last if there is none."""
    a, b = 0, len(row)
    while a < b:
        middle = (a + b) // 2
        if row[middle] <= value:
            b = middle
        else:
            a = middle + 1
    return a


@_compiled
def _record(p: Problem, now: NDArray[np.float32], flavour: int, s: int, t: int, unit: int, down: bool) -> None:
    """All ways to record from stage s on, before the rest up to t is solved from the recorded range's end."""
    row = now[flavour, s]
    for c in range(p.first[s], p.first[s + 1]):
        j = p.stop[c]
        if j > t:
            continue
        extra = p.entering[c] if flavour == COUNTED else 0
        while_recording = p.base[t] + p.need_forward[c] + (p.carry[s] if flavour == COUNTED else 0)
        while_consuming = p.gradients[j] - p.gradients[t] + p.need_backward[c] + extra
        shift = _taken(p.keep[c] + extra, unit, down)
        low = max(_ceil(max(while_recording, while_consuming), unit), shift)
        if low < len(row):
            _better_flat(row[low:], now[FREE, j, low - shift : len(row) - shift], np.float32(p.seconds[c]))


@_compiled
def _split(
    p: Problem, tables: Tables, now: NDArray[np.float32], flavour: int, s: int, t: int, unit: int, down: bool
) -> None:
    """All carries s' to store: the forward runs on to s', s' … t is solved, then s … s' from carry s again."""
    row = now[flavour, s]
    rooms = len(row)
    own = p.carry[s] if flavour == COUNTED else 0
    shift = _taken(own, unit, down)
    need = own + p.carry[s + 1] + p.workspace[s]
    least = p.fastest[t] - p.fastest[s]
    for k in range(s + 1, t):
        if k > s + 1:
            need = max(need, own + p.carry[k - 1] + p.carry[k] + p.workspace[k - 1])
        w = p.forward[k] - p.forward[s]
        gone = _taken(p.gradients[k] - p.gradients[t], unit, down)
        low_left = tables.low[flavour, s, k]
        low = max(_ceil(p.base[t] + need, unit), tables.low[COUNTED, k, t] + shift, low_left + gone)
        # Two parts take at least `least` between them, so rooms that have this or better already need no look.
        end = low + _first_at_most(row[low:], w + least) if low < rooms else low
        flat = min(end, max(low, tables.high[flavour, s, k] + gone))
        start = tables.offset[flavour, s, k] - low_left - gone
        right = now[COUNTED, k]
        if low < flat:
            left = tables.pool[start + low : start + flat]
            _better(row[low:flat], right[low - shift : flat - shift], left, np.float32(w))
        if flat < end:
            rest = tables.pool[start + tables.high[flavour, s, k] + gone]
            _better_flat(row[flat:end], right[flat - shift : end - shift], np.float32(w + rest))


@_compiled
def _keep(tables: Tables, row: NDArray[np.float32], flavour: int, s: int, t: int, used: int) -> int:
    """Put the part of a row that changes into the pool; returns how much of the pool is used then, −1 if too much."""
    rooms = len(row)
    low = 0
    while low < rooms and row[low] == np.inf:
        low += 1
    high = rooms - 1
    while high > low and row[high - 1] == row[rooms - 1]:
        high -= 1
    tables.low[flavour, s, t], tables.high[flavour, s, t], tables.offset[flavour, s, t] = low, high, used
    if low == rooms:
        return used
    if used + high + 1 - low > len(tables.pool):
        return -1
    tables.pool[used : used + high + 1 - low] = row[low : high + 1]
    return used + high + 1 - low


@_compiled
def _copy(tables: Tables, row: NDArray[np.float32], flavour: int, s: int, t: int, shift: int) -> None:
    """The row of a segment that equals the one `shift` stages earlier."""
    low, high = tables.low[flavour, s - shift, t - shift], tables.high[flavour, s - shift, t - shift]
    offset = tables.offset[flavour, s - shift, t - shift]
    tables.low[flavour, s, t], tables.high[flavour, s, t], tables.offset[flavour, s, t] = low, high, offset
    row[:low] = np.inf
    if low < len(row):
        row[low : high + 1] = tables.pool[offset : offset + high + 1 - low]
        row[high + 1 :] = row[high]


@_compiled
def fill(p: Problem, tables: Tables, rooms: int, unit: int, down: bool) -> int:
    """Solve every subproblem for rooms 0 … `rooms`; returns how much of the pool is used, −1 if it is too small."""
    length = len(p.carry) - 1
    now = np.empty((2, length + 1, rooms + 1), dtype=np.float32)
    used = 0
    for t in range(1, length + 1):
        now[FREE, t] = 0.0
        for s in range(t - 1, -1, -1):
            for flavour in range(2):
                if s >= t - p.twin_reach[t]:
                    _copy(tables, now[flavour, s], flavour, s, t, p.twin_shift[t])
                    continue
                now[flavour, s] = np.inf
                _record(p, now, flavour, s, t, unit, down)
                _split(p, tables, now, flavour, s, t, unit, down)
                used = _keep(tables, now[flavour, s], flavour, s, t, used)
                if used < 0:
                    return used
    return used


@_compiled
def choose(p: Problem, tables: Tables, flavour: int, s: int, t: int, room_bytes: int, unit: int) -> tuple[float, int]:
    """The best option of a subproblem in a room of so many bytes: its seconds and way c, or −s' for storing carry s'.

    Needs are compared in bytes, only what is left afterwards is rounded down to whole units.
    """
    own = p.carry[s] if flavour == COUNTED else 0
    best, option = np.inf, 0
    for c in range(p.first[s], p.first[s + 1]):
        j = p.stop[c]
        extra = p.entering[c] if flavour == COUNTED else 0
        if j > t or room_bytes < p.base[t] + p.need_forward[c] + own:
            continue
        if room_bytes < p.gradients[j] - p.gradients[t] + p.need_backward[c] + extra:
            continue
        rest = 0.0 if j == t else lookup(tables, FREE, j, t, (room_bytes - p.keep[c] - extra) // unit)
        if p.seconds[c] + rest < best:
            best, option = p.seconds[c] + rest, c
    need = 0
    for k in range(s + 1, t):
        need = max(need, (p.carry[k - 1] if k > s + 1 else 0) + p.carry[k] + p.workspace[k - 1])
        if room_bytes < p.base[t] + own + need:
            break
        left = lookup(tables, flavour, s, k, (room_bytes - p.gradients[k] + p.gradients[t]) // unit)
        right = lookup(tables, COUNTED, k, t, (room_bytes - own) // unit)
        if p.forward[k] - p.forward[s] + left + right < best:
            best, option = p.forward[k] - p.forward[s] + left + right, -k
    return best, option


@_compiled
def least_rooms(p: Problem) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """The smallest room of every subproblem in bytes, the least seconds found with it, and the option to take."""
    length = len(p.carry) - 1
    need = np.zeros((2, length + 1, length + 1), dtype=np.int64)
    seconds = np.zeros((2, length + 1, length + 1), dtype=np.float64)
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
    seconds: NDArray[np.float64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    own = p.carry[s] if flavour == COUNTED else 0
    for c in range(p.first[s], p.first[s + 1]):
        j = p.stop[c]
        if j > t:
            continue
        extra = p.entering[c] if flavour == COUNTED else 0
        room = max(p.base[t] + p.need_forward[c] + own, p.gradients[j] - p.gradients[t] + p.need_backward[c] + extra)
        if j < t:
            room = max(room, p.keep[c] + extra + need[FREE, j, t])
        time = p.seconds[c] + seconds[FREE, j, t]
        if room < need[flavour, s, t] or (room == need[flavour, s, t] and time < seconds[flavour, s, t]):
            need[flavour, s, t], seconds[flavour, s, t], option[flavour, s, t] = room, time, c


@_compiled
def _least_splitting(
    p: Problem,
    need: NDArray[np.int64],
    seconds: NDArray[np.float64],
    option: NDArray[np.int64],
    flavour: int,
    s: int,
    t: int,
) -> None:
    own = p.carry[s] if flavour == COUNTED else 0
    running = 0
    for k in range(s + 1, t):
        running = max(running, (p.carry[k - 1] if k > s + 1 else 0) + p.carry[k] + p.workspace[k - 1])
        room = max(p.base[t] + own + running, own + need[COUNTED, k, t])
        room = max(room, p.gradients[k] - p.gradients[t] + need[flavour, s, k])
        time = p.forward[k] - p.forward[s] + seconds[COUNTED, k, t] + seconds[flavour, s, k]
        if room < need[flavour, s, t] or (room == need[flavour, s, t] and time < seconds[flavour, s, t]):
            need[flavour, s, t], seconds[flavour, s, t], option[flavour, s, t] = room, time, -k
