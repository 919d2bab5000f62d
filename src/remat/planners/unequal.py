"""Unequal chains: the least seconds inside a budget, in bytes, for stages of any size with menus of tapes.

Appendix C of Gruslys et al. 2016, made tight. With the adjoint of carry t at hand and m bytes of room, stages s … t−1
are solved by the better of

    store carry s':            forward(s, s') + C(s', t, m − carry s) + C(s, s', m)
    record s … j−1 as entry e: seconds(s, j, e) + F(j, t, m − keep(s, j, e))

each only where the room suffices at every moment of it. C has carry s in its room and frees it once a tape of stage s
has taken over; F has it for free, because a recorded range or the caller keeps it, and pays nothing in the first line.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..chains import Chain
from ..errors import InfeasibleBudget
from ..schedules import Schedule
from . import _unequal_tables as tables
from ._unequal_costs import costs
from ._unequal_trace import trace


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and what is known about it.

    Attributes:
        schedule: the schedule.
        seconds: its time.
        peak_bytes: most bytes alive at any moment of it.
    """

    schedule: Schedule
    seconds: float
    peak_bytes: int


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """The fastest schedule found; see `solve`."""
    return solve(chain, budget_bytes).schedule


def solve(chain: Chain, budget_bytes: int, *, units: int = 500) -> Solution:
    """The fastest schedule inside the budget."""
    problem = costs(chain)
    flavour = tables.FREE if chain.caller_keeps_carry else tables.COUNTED
    room = budget_bytes - problem.fixed_bytes
    solved = tables.solve(problem, max(room, 1), units)
    smallest = solved.least.room[flavour, 0, chain.length]
    if room < smallest:
        raise InfeasibleBudget(budget_bytes, int(smallest) + problem.fixed_bytes, {})
    traced = trace(problem, solved.choose, flavour, room)
    return Solution(
        Schedule(chain.length, "unequal", traced.actions), traced.seconds, budget_bytes - traced.unused_bytes
    )
