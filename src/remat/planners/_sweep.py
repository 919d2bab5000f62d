"""One level of a mixed recurrence, swept over all lengths at once. Compiled.

F(t) = min(first(t), min over 1 ≤ y < t of y + F(y) + right(t−y)), swept from t = 1 upwards. No convexity is assumed,
for F has none where tapes are kept.

1. A sum u(y) + v(t−y) is least at an end, or where the increments of u or of v grow: elsewhere one of the neighbours
   is no worse. So the candidates for F(t) are `first`, a right part at a kink of `right`, and a left part at a kink
   of F. Each is a curve in t, and F is the lowest of them: the sweep follows the lowest for as long as no other can
   come below it. A *bound*, a line known to lie below a candidate, says when to look at it again.
2. With y and n = t−y the best, F(t) − F(t−1) is at least the last increment of `right` before n, because n−1 was
   possible for t−1, and one more than that of F before y. So what needs no increment above `cap` is made of parts
   that need none, and sums with dearer parts are left out. Other values may come out too high, but none
   of them is asked for.
3. By the same two inequalities F(t+1) − F(t) ≤ s only up to bounds[s] stages, known before the sweep.
4. Moving y by one must not pay: a left part of y stages can be the best only while `right` grows by at least as much
   as the left part would shrink, and only if it would grow by as much as `right` has. So candidates are born late and
   buried early. Values that are too high by note 2 only make these conditions weaker.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from ._compiled import INT, LIST, ROWS, compiled, types
from ._curves import NEVER, Curve, append

RIGHT, LEFT, FIRST = 0, 1, 2  # kinds of candidates in `level`
# Columns of a candidate: kind, fixed part, its cost, increments around it, row looked at last, first t, and its bound.
KIND, PART, PART_COST, BEFORE, AFTER, ROW, BORN, AT, COST, SLOPE, COLUMNS = range(11)
_STEEP: Final = 1 << 20  # no bound needs to be steeper


@compiled(types.UniTuple(INT, 4), ROWS, INT, INT, INT, INT)
def _look(curve: Curve, count: int, row: int, stages: int, known: int) -> tuple[int, int, int, int]:
    """(row, cost, increment, end of it) at `stages`, looking from `row` on in a curve of which `known` stages exist."""
    while row + 1 < count and curve[row + 1, 0] <= stages:
        row += 1
    slope = curve[row, 2]
    if stages > curve[row, 0] and slope == NEVER:
        return row, NEVER, NEVER, NEVER
    cost = curve[row, 1] + (slope * (stages - curve[row, 0]) if stages > curve[row, 0] else 0)
    return row, cost, slope, curve[row + 1, 0] if row + 1 < count else known


class _Problem(NamedTuple):
    """The curves of a level, their least increments from every row on, and bounds[s] of note 3."""

    first: Curve
    first_ahead: Curve
    right: Curve
    right_ahead: Curve
    bounds: Curve


_PROBLEM: Final[Any] = types.NamedTuple((ROWS, LIST, ROWS, LIST, LIST), _Problem)


@compiled(types.none, ROWS, LIST)
def _look_ahead(curve: Curve, least: Curve) -> None:
    """Write down for every row the least increment from it on."""
    smallest = NEVER
    for row in range(len(curve) - 1, -1, -1):
        smallest = min(smallest, curve[row, 2])
        least[row] = smallest


@compiled(INT, ROWS, INT)
def _last_within(curve: Curve, slope: int) -> int:
    """The last number of stages that takes an increment of at most `slope`; 1 if none does."""
    row = len(curve) - 1
    while row > 0 and curve[row - 1, 2] > slope:
        row -= 1
    stages: int = curve[row, 0]
    return stages


@compiled(types.none, ROWS, *[INT] * 7)
def _put(some: Curve, c: int, kind: int, part: int, part_cost: int, before: int, after: int, born: int) -> None:
    some[c, KIND], some[c, PART], some[c, PART_COST], some[c, ROW], some[c, BORN] = kind, part, part_cost, 0, born
    some[c, BEFORE], some[c, AFTER] = before, after


@compiled(types.none, ROWS, INT, INT, INT, INT)
def _bound(some: Curve, c: int, t: int, cost: int, slope: int) -> None:
    """From t on, candidate c costs at least this much, and at least `slope` more for every further stage."""
    some[c, AT], some[c, COST], some[c, SLOPE] = t, cost, min(slope, _STEEP)


@compiled(INT, ROWS, INT, _PROBLEM)
def _begin(some: Curve, cap: int, level: _Problem) -> int:
    """Write down bounds and the candidates before the sweep; returns how many these are."""
    first, right = level.first, level.right
    _look_ahead(first, level.first_ahead)
    _look_ahead(right, level.right_ahead)
    level.bounds[0] = 1
    for s in range(1, cap + 2):
        level.bounds[s] = max(_last_within(right, s) + level.bounds[s - 1] + 1, _last_within(first, s))
    _put(some, 0, FIRST, 0, 0, 0, NEVER, 2)
    _bound(some, 0, 1, 1, level.first_ahead[0])
    _put(some, 1, LEFT, 1, 2, 0, NEVER, 2)
    _bound(some, 1, 2, 3, level.right_ahead[0])
    size, before = 2, 0
    for row in range(len(right)):
        n, after = right[row, 0], right[row, 2]
        if after > before or row == 0:
            # A right part of one stage is always there, so that F is never without a value.
            _put(some, size, RIGHT, n, right[row, 1], before, after if row else NEVER, n + 1 if before <= 2 else NEVER)
            _bound(some, size, n + 1, right[row, 1] + 2, 2)
            size += 1
        before = after
    return size


@compiled(types.none, ROWS, INT, INT, INT, INT, INT, _PROBLEM)
def _bear_left(some: Curve, c: int, t: int, cost: int, before: int, after: int, level: _Problem) -> None:
    """A left part of t stages, where F's increments grow from `before` to `after`."""
    row, right = 0, level.right
    while row + 1 < len(right) and right[row, 2] < before + 1:
        row += 1
    _put(some, c, LEFT, t, t + cost, 0, after + 1, t + right[row, 0])
    _bound(some, c, t + right[row, 0], t + cost + right[row, 1], level.right_ahead[row])


@compiled(types.none, ROWS, INT, INT, INT, INT)
def _bear_right(some: Curve, size: int, t: int, cost: int, slope: int) -> None:
    """The right parts that begin to be of use now that F has an increment as large as `slope`, at t."""
    for c in range(size):
        if some[c, KIND] == RIGHT and some[c, BORN] == NEVER and some[c, BEFORE] <= slope + 1:
            some[c, BORN] = some[c, PART] + t
            _bound(some, c, some[c, BORN], some[c, PART_COST] + t + cost, 2)


@compiled(INT, LIST, INT)
def _least_slope(bounds: Curve, stages: int) -> int:
    """The least increment that F can have from so many stages on."""
    s = 1
    while s < len(bounds) and bounds[s] <= stages:
        s += 1
    return s


@compiled(INT, ROWS, INT, INT, _PROBLEM)
def _bury(some: Curve, size: int, t: int, level: _Problem) -> int:
    """Remove the candidates that cannot be the best at any later t; returns how many are left."""
    kept = 0
    for c in range(size):
        other = t - some[c, PART]  # stages of the part that is not fixed
        dead = False
        if some[c, KIND] == RIGHT and some[c, AFTER] < NEVER:
            dead = other > 1 and 1 + _least_slope(level.bounds, other - 1) > some[c, AFTER]
        elif some[c, KIND] == LEFT:
            looked = some[c, AT] < t and some[c, BORN] < t
            dead = other > level.right[-1, 0] or (looked and level.right_ahead[some[c, ROW]] > some[c, AFTER])
        if not dead:
            if kept < c:
                for column in range(COLUMNS):
                    some[kept, column] = some[c, column]
            kept += 1
    return kept


@compiled(types.UniTuple(INT, 3), ROWS, INT, INT, ROWS, INT, _PROBLEM)
def _candidate(some: Curve, c: int, t: int, rows: Curve, count: int, level: _Problem) -> tuple[int, int, int]:
    """(cost, increment, end of it) of candidate c at t; its bound is drawn anew from there."""
    kind, part = some[c, KIND], some[c, PART]
    # F is known up to t where this is asked for an increment, so one that is still growing ends with it.
    curve, count, known = (rows, count, t) if kind == RIGHT else (level.first, len(level.first), NEVER)
    if kind == LEFT:
        curve, count = level.right, len(level.right)
    row, cost, slope, end = _look(curve, count, some[c, ROW], t - part, known)
    cost, end = cost + some[c, PART_COST], end + part
    if kind == RIGHT:
        cost, slope, least = cost + t - part, slope + 1, 1 + _least_slope(level.bounds, t - part)
    else:
        least = level.right_ahead[row] if kind == LEFT else level.first_ahead[row]
    some[c, ROW] = row
    _bound(some, c, t, min(cost, NEVER), least)
    return min(cost, NEVER), slope, end


@compiled(INT, ROWS, INT, INT)
def _below(some: Curve, c: int, t: int) -> int:
    """What candidate c costs at least at t."""
    least: int = some[c, COST] + some[c, SLOPE] * (t - some[c, AT])
    return least


@compiled(INT, ROWS, INT, INT, ROWS, INT, _PROBLEM)
def _next_cost(some: Curve, size: int, t: int, rows: Curve, count: int, level: _Problem) -> int:
    """F(t), where F is known up to t − 1."""
    least = NEVER
    for c in range(size):
        if some[c, BORN] <= t and _below(some, c, t) < least:
            least = min(least, _candidate(some, c, t, rows, count, level)[0])
    return least


@compiled(types.UniTuple(INT, 2), ROWS, INT, INT, INT, INT, ROWS, INT, _PROBLEM)
def _straight(
    some: Curve, size: int, t: int, cost: int, steps: int, rows: Curve, count: int, level: _Problem
) -> tuple[int, int]:
    """(for how many stages, with which increment) F goes on evenly from t on; 0 stages if that is not known."""
    slope, room = NEVER, 0
    for c in range(size):
        if some[c, BORN] <= t and _below(some, c, t) <= cost:
            at, other, end = _candidate(some, c, t, rows, count, level)
            if at == cost and other < slope:
                slope, room = other, min(end, steps) - t
    for c in range(size):
        least = some[c, SLOPE]
        if room == 0:
            break
        if some[c, BORN] == NEVER or slope <= least or (_below(some, c, t) - cost) // (slope - least) >= room:
            continue
        if some[c, BORN] > t:
            room = min(room, some[c, BORN] - 1 - t)
            continue
        at, other, end = _candidate(some, c, t, rows, count, level)
        least = some[c, SLOPE]
        if other < slope and (at - cost) // (slope - other) < end - t:
            room = min(room, (at - cost) // (slope - other))
        elif end < NEVER and slope > least:
            later = at - cost + (other - slope) * (end - t)
            room = min(room, end - t + max(0, later // (slope - least)))
    return room, slope


def level(first: Curve, right: Curve, cap: int, steps: int) -> Curve:
    """F for up to `steps` stages, exact wherever an increment of at most `cap` leads to."""
    ahead = np.empty(len(first), np.int64), np.empty(len(right), np.int64)
    level = _Problem(first, ahead[0], right, ahead[1], np.empty(cap + 2, np.int64))
    rows, some = np.empty((64, 3), np.int64), np.empty((64 + len(right), COLUMNS), np.int64)
    state = np.array([0, 1, 1, 1, 1, 0], np.int64)
    while not _sweep(level, cap, steps, rows, some, state):
        rows, some = _with_space(rows, state[0]), _with_space(some, state[-1])
    return rows[: state[0]].copy()


def _with_space(rows: Curve, used: int) -> Curve:
    """The array, with more rows if hardly one is left."""
    return rows if used + 3 < len(rows) else np.concatenate((rows, rows, rows))


@compiled(types.boolean, _PROBLEM, INT, INT, ROWS, ROWS, LIST, inner=False)
def _sweep(level: _Problem, cap: int, steps: int, rows: Curve, some: Curve, state: Curve) -> bool:
    """Sweep on from where `state` says, write F to `rows`, candidates to `some`; False when one of them is full."""
    count, t, cost, reach, steepest, size = state[0], state[1], state[2], state[3], state[4], state[5]
    if t == 1:
        rows[0, 2] = NEVER  # F of one stage, until it is known how it goes on
        rows[0, 0], rows[0, 1] = 1, 1
        size = _begin(some, cap, level)
    ready = True
    while t < min(steps, max(level.right[-1, 0] + reach + 1, level.first[-1, 0])):
        if count + 3 >= len(rows) or size + 3 >= len(some):
            ready = False
            break
        size = _bury(some, size, t, level)
        room, slope = _straight(some, size, t, cost, steps, rows, count, level)
        if room == 0:
            room, slope = 1, _next_cost(some, size, t + 1, rows, count, level) - cost
        before = rows[count - 1, 2] if count else 0
        count = append(rows, count, t, cost, slope)
        if slope > before and t > 1:
            _bear_left(some, size, t, cost, before, slope, level)
            size += 1
        if slope > steepest:
            steepest = slope
            _bear_right(some, size, t, cost, slope)
        t, cost = t + room, cost + room * slope
        if slope < cap:
            reach = t
    if ready:
        count = append(rows, count, t, cost, NEVER)
    state[0], state[1], state[2], state[3], state[4], state[5] = count, t, cost, reach, steepest, size
    return ready
