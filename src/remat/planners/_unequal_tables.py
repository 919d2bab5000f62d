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
_POOL_BYTES: Final = 1_500_000_000  # pages that are not written cost nothing


class Least:
    """The smallest room of every subproblem, in exact bytes, and how to do with it."""

    def __init__(self, problem: Problem) -> None:
        from ._unequal_kernels import least_rooms

        self.room, self.seconds, self.option = least_rooms(problem)


@dataclass(frozen=True)
class Solved:
    """Seconds of every subproblem by its room in whole units of bytes.

    Attributes:
        costs: the chain.
        problem: the same for compiled code.
        tick_s: one tick of the tables, in seconds.
        unit_bytes: one unit of room.
        rooms: the largest room solved, in units.
        down: whether sizes were rounded down, which makes the values lower bounds, not plans.
    """

    costs: Costs
    problem: Problem
    tables: Tables
    tick_s: float
    unit_bytes: int
    rooms: int
    down: bool = False

    @cached_property
    def least(self) -> Least:
        """The smallest rooms."""
        return Least(self.problem)

    def seconds(self, flavour: int, room_bytes: int) -> float:
        """Seconds of the whole chain in a room of so many bytes, at most `rooms` units; infinite if it does not fit."""
        from ._unequal_kernels import NEVER, lookup

        units = -(-room_bytes // self.unit_bytes) if self.down else room_bytes // self.unit_bytes
        ticks = int(lookup(self.tables, flavour, 0, self.costs.length, min(units, self.rooms)))
        if ticks >= NEVER:
            return inf
        # A schedule is at most one split and one recording a stage, and each was rounded by half a tick at most twice.
        return max(0, ticks - 2 * self.costs.length * self.down) * self.tick_s

    def choose(self, flavour: int, s: int, t: int, room_bytes: int) -> int:
        """The option to take: way c, or −s' for storing carry s'. The room must suffice."""
        from ._unequal_kernels import NEVER, choose

        ticks, option = choose(self.problem, self.tables, flavour, s, t, room_bytes, self.unit_bytes)
        return int(option) if ticks < NEVER else int(self.least.option[flavour, s, t])


def _problem(costs: Costs, tick_s: float) -> Problem:
    """The chain for compiled code."""
    from . import _unequal_kernels as kernels

    shift, reach = _twins(costs)
    is_site = np.ones(costs.length + 1, dtype=np.bool_)
    is_site[costs.length] = False
    sites = np.flatnonzero(is_site)
    stages = np.empty((10, costs.length + 1), dtype=np.int64)
    stages[kernels.CARRY], stages[kernels.BASE], stages[kernels.GRADIENTS] = costs.carry, costs.base, costs.gradients
    stages[kernels.FORWARD], stages[kernels.FASTEST] = _ticks(costs.forward, tick_s), _ticks(costs.fastest, tick_s)
    stages[kernels.FIRST], stages[kernels.IS_SITE] = costs.first, is_site
    stages[kernels.NEXT_SITE] = np.searchsorted(sites, np.arange(costs.length + 1), side="right")
    stages[kernels.TWIN_SHIFT], stages[kernels.TWIN_REACH] = shift, reach
    ways = np.empty((6, len(costs.stop)), dtype=np.int64)
    ways[kernels.STOP], ways[kernels.SECONDS] = costs.stop, _ticks(costs.seconds, tick_s)
    ways[kernels.KEEP], ways[kernels.ENTERING] = costs.keep, costs.entering
    ways[kernels.NEED_FORWARD], ways[kernels.NEED_BACKWARD] = costs.need_forward, costs.need_backward
    return kernels.Problem(stages, ways, _passing(costs), sites, np.append(sites[sites > 0], costs.length))


def _passing(costs: Costs) -> NDArray[np.int64]:
    """By s and k: most bytes, besides carry s, while stages s … k−1 run without tape."""
    length, carry = costs.length, costs.carry
    leaving = carry[1:] + costs.workspace
    passing = np.zeros((length, length + 1), dtype=np.int64)
    for s in range(length):
        steps = leaving[s:].copy()
        steps[1:] += carry[s + 1 : -1]
        np.maximum.accumulate(steps, out=passing[s, s + 1 :])
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


def solve(costs: Costs, room_bytes: int, units: int, *, down: bool = False) -> Solved:
    """Solve every subproblem for all rooms up to `room_bytes`, in about `units` steps, fewer if memory is short."""
    from ._unequal_kernels import Tables, fill

    tick_s, exact = _tick_s(costs), costs.unit()
    problem = _problem(costs, tick_s)
    while True:
        unit = exact if room_bytes // exact <= units else -(-room_bytes // units)
        rooms = -(-room_bytes // unit) if down else room_bytes // unit
        shape = (2, costs.length, costs.length + 1)
        tables = Tables(
            pool=np.empty(min(_POOL_BYTES // 4, costs.length * (costs.length + 1) * (rooms + 1)), dtype=np.int32),
            offset=np.empty(shape, dtype=np.int64),
            low=np.empty(shape, dtype=np.int32),
            high=np.empty(shape, dtype=np.int32),
        )
        if fill(problem, tables, rooms + 1, unit, down) >= 0:
            return Solved(costs, problem, tables, tick_s, unit, rooms, down)
        units = units * 3 // 4


def _twins(costs: Costs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every t, a shift d and the largest reach r such that s … t−1 equals s−d … t−d−1 for all s ≥ t − r.

    Equal are segments of equal stages that end in carries of equal size before the end of the chain.
    """
    length, kind, carry = costs.length, costs.kind, costs.carry
    shift, reach = np.zeros(length + 1, dtype=np.int64), np.zeros(length + 1, dtype=np.int64)
    equal: NDArray[Any] = np.zeros(length + 1, dtype=np.int64)  # by d: how many stages before t equal those d earlier
    for t in range(2, length):
        d = np.arange(1, t)
        equal[d] = np.where(kind[t - 1] == kind[t - 1 - d], equal[d] + 1, 0)
        usable = np.where(carry[t - d] == carry[t], equal[d], 0)
        best = int(usable.argmax())
        shift[t], reach[t] = best + 1, usable[best]
    return shift, reach
