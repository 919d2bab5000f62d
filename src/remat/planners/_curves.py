"""Costs as curves: integer functions of the number of stages, kept as runs of equal increments. Compiled.

A curve is an int64 array of rows (stages, cost there, increment from there on). Its last row ends the domain and has
the increment `NEVER`; beyond it the curve is infinite. All curves begin with 1 stage, which costs 1. Time and memory
of everything here grow with the number of rows, not with the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])

NEVER: Final = 1 << 60
RIGHT, LEFT, FIRST = 0, 1, 2  # kinds of candidates in `level`
BORN, COLUMNS = 4, 10


def _compiled(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True)(function))


def one_stage() -> Curve:
    """The curve of a single stage."""
    return np.array([(1, 1, NEVER)], np.int64)


def all_recorded(steps: int) -> Curve:
    """The curve of ranges that are recorded as a whole."""
    return np.array([(1, 1, 1), (steps, steps, NEVER)], np.int64) if steps > 1 else one_stage()


def after_one(curve: Curve | None) -> Curve:
    """One stage recorded, and then the curve's stages or none."""
    if curve is None:
        return one_stage()
    return np.concatenate((np.array([(1, 1, 1)], np.int64), curve + np.array([1, 1, 0])))


@_compiled
def value(curve: Curve, stages: int) -> int:
    """The cost of so many stages; `NEVER` outside the domain."""
    low, high = 0, len(curve) - 1
    if stages < 1 or stages > curve[high, 0]:
        return NEVER
    while low < high:
        middle = (low + high + 1) // 2
        if curve[middle, 0] <= stages:
            low = middle
        else:
            high = middle - 1
    cost: int = curve[low, 1]
    return cost + curve[low, 2] * (stages - curve[low, 0]) if stages > curve[low, 0] else cost


@_compiled
def _append(rows: Curve, count: int, at: int, cost: int, slope: int) -> int:
    """Write one more row, unless the last one goes on with the same increment; returns how many there are."""
    if count and rows[count - 1, 2] == slope:
        return count
    rows[count, 0], rows[count, 1], rows[count, 2] = at, cost, slope
    return count + 1


@_compiled
def lower(a: Curve, b: Curve) -> Curve:
    """The smaller of two curves everywhere."""
    rows = np.empty((3 * (len(a) + len(b)) + 4, 3), np.int64)
    i = j = count = 0
    t, cost, end = 1, 1, max(a[-1, 0], b[-1, 0])
    while t < end:
        while i + 1 < len(a) and a[i + 1, 0] <= t:
            i += 1
        while j + 1 < len(b) and b[j + 1, 0] <= t:
            j += 1
        a_slope, b_slope = a[i, 2], b[j, 2]
        a_cost = NEVER if a_slope == NEVER else a[i, 1] + a_slope * (t - a[i, 0])
        b_cost = NEVER if b_slope == NEVER else b[j, 1] + b_slope * (t - b[j, 0])
        room = min(a[i + 1, 0] if a_slope < NEVER else end, b[j + 1, 0] if b_slope < NEVER else end) - t
        if b_cost < a_cost or (a_cost == b_cost and b_slope < a_slope):
            a_cost, b_cost, a_slope, b_slope = b_cost, a_cost, b_slope, a_slope
        if b_slope < a_slope:
            room = min(room, (b_cost - a_cost) // (a_slope - b_slope))
        if a_cost == cost and room > 0:
            slope = a_slope
        else:  # the curves cross within the next stage, or one that ended was the smaller
            room, slope = 1, min(a_cost + a_slope, b_cost + b_slope) - cost
        count = _append(rows, count, t, cost, slope)
        t, cost = t + room, cost + room * slope
    rows[count, 0], rows[count, 1], rows[count, 2] = t, cost, NEVER
    return rows[: count + 1].copy()


@_compiled
def capped(curve: Curve, cap: int) -> Curve:
    """The curve up to the last stage that it takes for an increment of at most `cap`."""
    last = len(curve) - 1
    while last > 0 and curve[last - 1, 2] > cap:
        last -= 1
    short = curve[: last + 1].copy()
    short[last, 2] = NEVER
    return short


@_compiled
def _cheapest_ahead(curve: Curve) -> NDArray[np.int64]:
    """For every row the least increment from it on."""
    least = curve[:, 2].copy()
    for row in range(len(least) - 2, -1, -1):
        least[row] = min(least[row], least[row + 1])
    return least


@_compiled
def is_kink(curve: Curve, row: int) -> bool:
    """Whether increments grow at this row; both ends of the domain count."""
    return row == 0 or curve[row, 2] > curve[row - 1, 2]


@_compiled
def _look(curve: Curve, count: int, row: int, stages: int, known: int) -> tuple[int, int, int, int]:
    """(row, cost, increment, end of it) at `stages`, looking from `row` on in a curve of which `known` stages exist."""
    while row + 1 < count and curve[row + 1, 0] <= stages:
        row += 1
    slope = curve[row, 2]
    if stages > curve[row, 0] and slope == NEVER:
        return row, NEVER, NEVER, NEVER
    cost = curve[row, 1] + (slope * (stages - curve[row, 0]) if stages > curve[row, 0] else 0)
    return row, cost, slope, curve[row + 1, 0] if row + 1 < count else known


@_compiled
def _last_within(curve: Curve, slope: int) -> int:
    """The last number of stages that takes an increment of at most `slope`; 1 if none does."""
    row = len(curve) - 1
    while row > 0 and curve[row - 1, 2] > slope:
        row -= 1
    stages: int = curve[row, 0]
    return stages


@_compiled
def level(first: Curve, right: Curve, cap: int, steps: int) -> Curve:
    """F(t) = min(first(t), min over 1 ≤ y < t of y + F(y) + right(t−y)), exact for every t that some optimum needs.

    The proofs of what is left out stand in `_Notes`.
    """
    rows = np.empty((64, 3), np.int64)
    rows[0, 0], rows[0, 1], rows[0, 2] = 1, 1, NEVER
    count, t, cost, reach, steepest = 0, 1, 1, 1, 1
    ahead, first_ahead = _cheapest_ahead(right), _cheapest_ahead(first)
    bounds = np.ones(cap + 2, np.int64)
    for s in range(1, cap + 2):
        bounds[s] = max(_last_within(right, s) + bounds[s - 1] + 1, _last_within(first, s))
    some = np.empty((64 + len(right), COLUMNS), np.int64)
    some[0] = (FIRST, 0, 0, 0, 2, 1, 1, first_ahead[0], NEVER, 0)
    some[1] = (LEFT, 1, 2, 0, 2, 3, 2, ahead[0], NEVER, 0)
    size = 2
    for row in range(len(right)):
        if is_kink(right, row):
            n, n_cost, before = right[row, 0], right[row, 1], right[row - 1, 2] if row else 0
            born = n + 1 if before <= 2 else NEVER
            some[size] = (RIGHT, n, n_cost, 0, born, n_cost + 2, n + 1, 2, NEVER if row == 0 else right[row, 2], before)
            size += 1
    while t < min(steps, max(right[-1, 0] + reach + 1, first[-1, 0])):
        size = _bury(some, size, t, right, ahead, bounds)
        best_slope, best_end = NEVER, t
        for c in range(size):
            if some[c, BORN] <= t and some[c, 5] + some[c, 7] * (t - some[c, 6]) <= cost:
                at, slope, end = _candidate(some, c, t, rows, count, right, ahead, first, first_ahead, bounds)
                if at == cost and slope < best_slope:
                    best_slope, best_end = slope, end
        room, slope = 0, best_slope
        if slope < NEVER:
            room = min(best_end, steps) - t
            room = _room(some, size, t, cost, slope, room, rows, count, right, ahead, first, first_ahead, bounds)
        if room == 0:
            least = NEVER
            for c in range(size):
                if some[c, BORN] <= t + 1 and some[c, 5] + some[c, 7] * (t + 1 - some[c, 6]) < least:
                    at, _, _ = _candidate(some, c, t + 1, rows, count, right, ahead, first, first_ahead, bounds)
                    least = min(least, at)
            room, slope = 1, least - cost
        if count + 2 > len(rows):
            rows = np.concatenate((rows, np.empty_like(rows)))
        before = rows[count - 1, 2] if count else 0
        count = _append(rows, count, t, cost, slope)
        if slope > before:
            if size == len(some):
                some = np.concatenate((some, np.empty_like(some)))
            if t > 1:
                # Not the best before `right` grows by as much as the left part would shrink.
                row = 0
                while row + 1 < len(right) and right[row, 2] < before + 1:
                    row += 1
                born = t + right[row, 0]
                some[size] = (LEFT, t, t + cost, 0, born, t + cost + right[row, 1], born, ahead[row], slope + 1, 0)
                size += 1
            if slope > steepest:
                steepest = slope
                for c in range(size):
                    if some[c, 0] == RIGHT and some[c, BORN] == NEVER and some[c, 9] <= slope + 1:
                        born = some[c, 1] + t
                        some[c, BORN], some[c, 5], some[c, 6] = born, some[c, 2] + t + cost, born
        t, cost = t + room, cost + room * slope
        if slope < cap:
            reach = t
    rows[count, 0], rows[count, 1], rows[count, 2] = t, cost, NEVER
    return rows[: count + 1].copy()


@_compiled
def _least_slope(bounds: NDArray[np.int64], stages: int) -> int:
    """The least increment that F can have from so many stages on."""
    s = 1
    while s < len(bounds) and bounds[s] <= stages:
        s += 1
    return s


@_compiled
def _bury(
    some: NDArray[np.int64], size: int, t: int, right: Curve, ahead: NDArray[np.int64], bounds: NDArray[np.int64]
) -> int:
    """Remove the candidates that cannot be the best at any later t; returns how many are left."""
    kept = 0
    for c in range(size):
        kind, part = some[c, 0], some[c, 1]
        dead = False
        if kind == RIGHT and some[c, 8] < NEVER:
            dead = t - part > 1 and 1 + _least_slope(bounds, t - part - 1) > some[c, 8]
        elif kind == LEFT:
            row = some[c, 3]
            dead = t - part > right[-1, 0] or (some[c, BORN] < t and some[c, 6] < t and ahead[row] > some[c, 8])
        if not dead:
            if kept < c:
                some[kept] = some[c]
            kept += 1
    return kept


@_compiled
def _candidate(
    some: NDArray[np.int64],
    c: int,
    t: int,
    rows: Curve,
    count: int,
    right: Curve,
    ahead: NDArray[np.int64],
    first: Curve,
    first_ahead: NDArray[np.int64],
    bounds: NDArray[np.int64],
) -> tuple[int, int, int]:
    """(cost, increment, end of it) of candidate c at t; its bound is drawn anew from there."""
    kind, part, part_cost = some[c, 0], some[c, 1], some[c, 2]
    if kind == RIGHT:
        # F is known up to t at least where this is asked for an increment, so one that is still growing ends with it.
        row, cost, slope, end = _look(rows, count, some[c, 3], t - part, t)
        cost, slope, end, least = cost + part_cost + t - part, slope + 1, end + part, 1 + _least_slope(bounds, t - part)
    elif kind == LEFT:
        row, cost, slope, end = _look(right, len(right), some[c, 3], t - part, NEVER)
        cost, end, least = cost + part_cost, end + part, ahead[row]
    else:
        row, cost, slope, end = _look(first, len(first), some[c, 3], t, NEVER)
        least = first_ahead[row]
    cost = min(cost, NEVER)
    some[c, 3], some[c, 5], some[c, 6], some[c, 7] = row, cost, t, min(least, 1 << 20)
    return cost, slope, end


@_compiled
def _room(
    some: NDArray[np.int64],
    size: int,
    t: int,
    cost: int,
    slope: int,
    room: int,
    rows: Curve,
    count: int,
    right: Curve,
    ahead: NDArray[np.int64],
    first: Curve,
    first_ahead: NDArray[np.int64],
    bounds: NDArray[np.int64],
) -> int:
    """For how many stages no candidate comes below the line of this slope through (t, cost)."""
    for c in range(size):
        gap = some[c, 5] + some[c, 7] * (t - some[c, 6]) - cost
        if some[c, BORN] == NEVER or slope <= some[c, 7] or gap // (slope - some[c, 7]) >= room:
            continue
        if some[c, BORN] > t:
            room = min(room, some[c, BORN] - 1 - t)
            continue
        at, other, end = _candidate(some, c, t, rows, count, right, ahead, first, first_ahead, bounds)
        if other < slope and (at - cost) // (slope - other) < end - t:
            room = min(room, (at - cost) // (slope - other))
        elif end < NEVER and slope > some[c, 7]:
            later = at - cost + (other - slope) * (end - t)
            room = min(room, end - t + max(0, later // (slope - some[c, 7])))
    return room


@_compiled
def find(curve: Curve, first: Curve, right: Curve, stages: int) -> int:
    """A y with y + F(y) + right(stages−y) = F(stages), where F is `curve`; 0 if F(stages) = first(stages)."""
    cost = value(curve, stages)
    if value(first, stages) == cost:
        return 0
    for row in range(len(right)):
        n: int = right[row, 0]
        if n >= stages:
            break
        if is_kink(right, row) and right[row, 1] + stages - n + value(curve, stages - n) == cost:
            return stages - n
    for row in range(len(curve)):
        y: int = curve[row, 0]
        if y >= stages:
            break
        if is_kink(curve, row) and y + curve[row, 1] + value(right, stages - y) == cost:
            return y
    raise RuntimeError("no decision has the cost of the table")
