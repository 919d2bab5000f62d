"""The solved recurrence of one chain: made by compiled code, asked by the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, log2
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ._unequal_costs import Costs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._unequal_kernels import Problem, Tables

COUNTED: Final = 0
FREE: Final = 1
_POOL_TICKS: Final = 350_000_000  # 1.4 GB; pages that are not written cost nothing
_TOGETHER: Final = 8  # ends are solved together, see `fill`; 1 where most segments equal an earlier one
_TRIPLES: Final = 40_000_000  # so many (start, carry to store, end) are looked at, about 200 ns each with 500 rooms


@dataclass(frozen=True)
class Solved:
    """Seconds of every subproblem by its room in whole units of bytes.

    Attributes:
        costs: the chain.
        problem: the same for compiled code.
        tables: the answers.
        tick_s: one tick of the tables, in seconds.
        unit_bytes: one unit of room.
        rooms: the largest room solved, in units.
        all_sites: whether every carry may be stored; long chains store only some.
        down: whether sizes were rounded down, which makes the values lower bounds, not plans.
    """

    costs: Costs
    problem: Problem
    tables: Tables
    tick_s: float
    unit_bytes: int
    rooms: int
    all_sites: bool
    down: bool

    @cached_property
    def _least(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        from ._unequal_kernels import least_rooms

        return least_rooms(self.problem)

    def least_room(self, flavour: int) -> int:
        """The smallest room of the whole chain, in exact bytes."""
        return int(self._least[0][flavour, 0, -1])

    def seconds(self, flavour: int, room_bytes: int) -> float:
        """Seconds of the whole chain in a room of so many bytes, at most `rooms` units; infinite if it does not fit."""
        units = -(-room_bytes // self.unit_bytes) if self.down else room_bytes // self.unit_bytes
        return float(self.curve(flavour)[min(units, self.rooms)]) if units >= 0 else inf

    def curve(self, flavour: int) -> NDArray[np.float64]:
        """Seconds of the whole chain for rooms of 0 … `rooms` units."""
        from ._unequal_kernels import NEVER

        low, high = (int(bound[flavour, 0, -1]) for bound in (self.tables.low, self.tables.high))
        seconds = np.full(self.rooms + 1, inf)
        if low <= self.rooms:
            offset = self.tables.offset[flavour, 0, -1]
            ticks = self.tables.pool[offset : offset + high + 1 - low].astype(np.float64)
            # Every stage is recorded once and its carry stored at most once, each rounded by at most one tick.
            ticks = np.maximum(ticks - 2 * self.costs.length * self.down, 0)
            seconds[low : high + 1] = np.where(ticks < NEVER, ticks * self.tick_s, inf)
            seconds[high + 1 :] = seconds[high]
        return seconds

    def choose(self, flavour: int, s: int, t: int, room_bytes: int, hope_bytes: int = 0) -> int:
        """The option to take: way c, or −k for storing carry k. The room must be at least the smallest."""
        from ._unequal_kernels import COLUMN, NEVER, choose

        least, option_in_least = self._least
        ticks, option = choose(self.problem, self.tables, least, flavour, s, t, room_bytes, self.unit_bytes, hope_bytes)
        return int(option) if ticks < NEVER else int(option_in_least[flavour, s, self.problem.stages[COLUMN, t]])


def solve(costs: Costs, room_bytes: int, units: int, *, down: bool = False) -> Solved:
    """Solve every subproblem for all rooms up to `room_bytes`, in `units` steps, or twice as many if that is exact."""
    from ._unequal_kernels import Tables, fill

    exact, tick_s = costs.unit(), _tick_s(costs)
    is_site = _sites(costs)
    together = _TOGETHER if _twins(costs, is_site, 1)[1].mean() < costs.length / 3 else 1
    problem = _problem(costs, tick_s, is_site, together)
    shape = (2, costs.length + 1, len(problem.ends))
    while True:
        unit = exact if room_bytes // exact <= 2 * units else -(-room_bytes // units)  # twice the work buys exactness
        rooms = -(-room_bytes // unit) if down else room_bytes // unit
        tables = Tables(
            pool=np.empty(min(_POOL_TICKS, shape[1] * shape[2] * 2 * (rooms + 1)), dtype=np.int32),
            offset=np.empty(shape, dtype=np.int64),
            low=np.empty(shape, dtype=np.int32),
            high=np.empty(shape, dtype=np.int32),
        )
        if fill(problem, tables, rooms + 1, unit, down, together) >= 0:
            all_sites = len(problem.ends) == costs.length
            return Solved(costs, problem, tables, tick_s, unit, rooms, all_sites, down)
        units = units * 3 // 4


def _problem(costs: Costs, tick_s: float, is_site: NDArray[np.bool_], together: int) -> Problem:
    """The chain for compiled code."""
    from . import _unequal_kernels as kernels

    everywhere = np.arange(costs.length + 1)
    ends = np.append(np.flatnonzero(is_site[1:]) + 1, costs.length)
    stages = np.empty((12, costs.length + 1), dtype=np.int64)
    stages[kernels.CARRY], stages[kernels.BASE], stages[kernels.GRADIENTS] = costs.carry, costs.base, costs.gradients
    stages[kernels.FORWARD], stages[kernels.FASTEST] = _ticks(costs.forward, tick_s), _ticks(costs.fastest, tick_s)
    stages[kernels.FIRST], stages[kernels.IS_SITE] = costs.first, is_site
    stages[kernels.NEXT_SITE] = np.searchsorted(ends, everywhere, side="right")
    stages[kernels.COLUMN] = np.searchsorted(ends, everywhere, side="left")
    stages[kernels.TWIN_SHIFT], stages[kernels.TWIN_REACH] = _twins(costs, is_site, together)
    starts = np.repeat(everywhere[:-1], np.diff(costs.first))
    stages[kernels.WIDEST] = (costs.stop - starts).max()
    ways = np.empty((6, len(costs.stop)), dtype=np.int64)
    ways[kernels.STOP], ways[kernels.SECONDS] = costs.stop, _ticks(costs.seconds, tick_s)
    ways[kernels.KEEP], ways[kernels.ENTERING] = costs.keep, costs.entering
    ways[kernels.NEED_FORWARD], ways[kernels.NEED_BACKWARD] = costs.need_forward, costs.need_backward
    return kernels.Problem(stages, ways, _passing(costs, ends), ends)


def _passing(costs: Costs, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """By s and column: most bytes, besides carry s, while stages from s to that end run without tape."""
    leaving = costs.carry[1:] + costs.workspace
    passing = np.zeros((costs.length, len(ends)), dtype=np.int64)
    for s in range(costs.length):
        steps = leaving[s:].copy()
        steps[1:] += costs.carry[s + 1 : -1]
        after = ends > s
        passing[s, after] = np.maximum.accumulate(steps)[ends[after] - s - 1]
    return passing


def _ticks(seconds: NDArray[np.float64], tick_s: float) -> NDArray[np.int64]:
    return np.rint(seconds / tick_s).astype(np.int64)


def _tick_s(costs: Costs) -> float:
    """So short that no schedule takes `NEVER` ticks: stage k is run without tape at most once for every later stage.

    It is a power of two, in which whole seconds are whole ticks.
    """
    slowest = np.maximum.reduceat(costs.seconds, costs.first[:-1]).sum()
    longest = float(costs.forward.sum() + slowest)
    return 2.0 ** ceil(log2(longest) - 28) if longest else 1.0


def _twins(costs: Costs, is_site: NDArray[np.bool_], together: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every t, a shift d and the largest reach r such that s … t−1 equals s−d … t−d−1 for all s ≥ t − r.

    Equal are segments of equal stages, with the same carries to store, that end in carries of equal size before the end
    of the chain. The earlier end must not be among the `together` that are solved with t.
    """
    column = np.cumsum(is_site)
    length, carry = costs.length, costs.carry
    kind = 2 * costs.kind + is_site[:-1]
    shift, reach = np.zeros(length + 1, dtype=np.int64), np.zeros(length + 1, dtype=np.int64)
    equal: NDArray[Any] = np.zeros(length + 1, dtype=np.int64)  # by d: how many stages before t equal those d earlier
    for t in range(2, length):
        d = np.arange(1, t)
        equal[d] = np.where(kind[t - 1] == kind[t - 1 - d], equal[d] + 1, 0)
        solved = is_site[t - d] & (column[t] - column[t - d] >= together)
        usable = np.where((carry[t - d] == carry[t]) & solved, equal[d], 0)
        best = int(usable.argmax())
        shift[t], reach[t] = best + 1, usable[best]
    return shift, reach


def _sites(costs: Costs) -> NDArray[np.bool_]:
    """Which carries may be stored: all, or, where that would be too much work, the smallest of every few."""
    length = costs.length
    all_of_them = np.ones(length + 1, dtype=np.bool_)
    all_of_them[length] = False
    rest = np.maximum(np.arange(length + 1) - _twins(costs, all_of_them, 1)[1], 0)  # starts of segments not met before
    if (rest * (2 * np.arange(length + 1) - rest)).sum() / 2 <= _TRIPLES:
        return all_of_them
    count = length
    while count**2 * (length + count) / 6 > _TRIPLES:
        count = count * 9 // 10
    chosen = np.zeros(length + 1, dtype=np.bool_)
    for window in np.array_split(np.arange(1, length), count):
        chosen[window[costs.carry[window].argmin()]] = True
    chosen[0] = True
    return chosen
