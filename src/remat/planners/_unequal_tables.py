"""The solved recurrence of one chain: made by compiled code, asked by the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
    """Seconds of every subproblem by its room in whole units.

    Attributes:
        costs: the chain.
        problem: the same for compiled code.
        unit_bytes: one unit of room.
        rooms: the largest room solved, in units.
        down: whether sizes were rounded down, which makes the values lower bounds, not plans.
    """

    costs: Costs
    problem: Problem
    tables: Tables
    unit_bytes: int
    rooms: int
    down: bool = False

    @cached_property
    def least(self) -> Least:
        """The smallest rooms."""
        return Least(self.problem)

    def seconds(self, flavour: int, room_bytes: int) -> float:
        """Seconds of the whole chain in a room of so many bytes, at most `rooms` units; infinite if it does not fit."""
        from ._unequal_kernels import lookup

        units = -(-room_bytes // self.unit_bytes) if self.down else room_bytes // self.unit_bytes
        return float(lookup(self.tables, flavour, 0, self.costs.length, min(units, self.rooms)))

    def choose(self, flavour: int, s: int, t: int, room_bytes: int) -> int:
        """The option to take: way c, or −s' for storing carry s'. The room must suffice."""
        from ._unequal_kernels import choose

        seconds, option = choose(self.problem, self.tables, flavour, s, t, room_bytes, self.unit_bytes)
        return int(option) if seconds < np.inf else int(self.least.option[flavour, s, t])


def problem_of(costs: Costs) -> Problem:
    """The chain for compiled code."""
    from ._unequal_kernels import Problem

    shift, reach = _twins(costs)
    own = {name: getattr(costs, name) for name in Problem._fields if not name.startswith("twin_")}
    return Problem(**own, twin_shift=shift, twin_reach=reach)


def solve(costs: Costs, room_bytes: int, units: int, *, down: bool = False) -> Solved:
    """Solve every subproblem for all rooms up to `room_bytes`, in about `units` steps, fewer if memory is short."""
    from ._unequal_kernels import Tables, fill

    problem, exact = problem_of(costs), costs.unit()
    while True:
        unit = exact if room_bytes // exact <= units else -(-room_bytes // units)
        rooms = -(-room_bytes // unit) if down else room_bytes // unit
        shape = (2, costs.length, costs.length + 1)
        tables = Tables(
            pool=np.empty(min(_POOL_BYTES // 4, costs.length * (costs.length + 1) * (rooms + 1)), dtype=np.float32),
            offset=np.empty(shape, dtype=np.int64),
            low=np.empty(shape, dtype=np.int32),
            high=np.empty(shape, dtype=np.int32),
        )
        if fill(problem, tables, rooms, unit, down) >= 0:
            return Solved(costs, problem, tables, unit, rooms, down)
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
