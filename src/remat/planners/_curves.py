"""Costs as curves: integer functions of the number of stages, kept as runs of equal increments. Compiled.

A curve is an int64 array of rows (stages, cost there, increment from there on). Its last row ends the domain and has
the increment `NEVER`; beyond it the curve is infinite. All curves begin with 1 stage, which costs 1. Time and memory
of everything here grow with the number of rows, not with the number of stages.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ._compiled import BOOL, INT, ROWS, compiled

Curve = NDArray[np.int64]

NEVER: Final = 1 << 60


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


@compiled(INT, ROWS, INT, inner=False)
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


@compiled(INT, ROWS, INT, INT, INT, INT)
def append(rows: Curve, count: int, at: int, cost: int, slope: int) -> int:
    """Write one more row, unless the last one goes on with the same increment; returns how many there are."""
    if count and rows[count - 1, 2] == slope:
        return count
    rows[count, 0], rows[count, 1], rows[count, 2] = at, cost, slope
    return count + 1


def lower(a: Curve, b: Curve) -> Curve:
    """The smaller of two curves everywhere."""
    rows = np.empty((3 * (len(a) + len(b)) + 5, 3), np.int64)
    return rows[: _lower(a, b, rows)].copy()


@compiled(INT, ROWS, ROWS, ROWS, inner=False)
def _lower(a: Curve, b: Curve, rows: Curve) -> int:
    """Write that curve to `rows`; returns how many rows it has."""
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
        count = append(rows, count, t, cost, slope)
        t, cost = t + room, cost + room * slope
    return append(rows, count, t, cost, NEVER)


def capped(curve: Curve, cap: int) -> Curve:
    """The curve up to the last stage that it takes for an increment of at most `cap`."""
    rows = np.flatnonzero(curve[:, 2] <= cap)
    last = rows[-1] + 1 if len(rows) else 0
    shorter = curve[: last + 1].copy()
    shorter[last, 2] = NEVER
    return shorter


@compiled(BOOL, ROWS, INT)
def is_kink(curve: Curve, row: int) -> bool:
    """Whether increments grow at this row; both ends of the domain count."""
    return row == 0 or curve[row, 2] > curve[row - 1, 2]


@compiled(INT, ROWS, ROWS, ROWS, INT, inner=False)
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
