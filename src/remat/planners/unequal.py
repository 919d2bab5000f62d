"""Unequal chains: the least seconds inside a budget, in bytes, for stages of any size with menus of tapes.

Appendix C of Gruslys et al. 2016, made tight. With the adjoint of carry t at hand and m bytes of room, stages s … t−1
are solved by the better of

    store carry k:             forward(s, k) + C(k, t, m − carry s) + C(s, k, m)
    record s … j−1 as entry e: seconds(s, j, e) + F(j, t, m − keep(s, j, e))

each only where the room suffices at every moment of it. C has carry s in its room and frees it once a tape of stage s
has taken over; F has it for free, because a recorded range or the caller keeps it, and pays nothing in the first line.

*Optimal* means: no schedule is faster that finishes what is right of a stored carry, backward included, before it runs
anything left of it. Others exist (put a backward off until stages before it have been recorded, or keep a carry for a
while and make it again). An exhaustive search over all legal schedules of random chains with adversarial sizes found
one that is better at 3 of 2214 budgets for chains of two or three stages; longer chains have more of them, how many is
not known. See `tests/planners/test_unequal.py`.

That optimum is met exactly if all sizes are whole numbers of a unit of which the budget has no more than twice `units`,
and is approached otherwise: sizes are then rounded up, and long chains (of more than some 500 different stages) store
only some carries. `Solution` says so, and gives a bound that holds for every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..chains import Chain
from ..errors import InfeasibleBudget
from ..schedules import Schedule
from . import _unequal_tables as tables
from ._unequal_bounds import keep_all, lower_bound_s
from ._unequal_costs import Costs, costs
from ._unequal_trace import Traced, trace

_UNITS: Final = 500
_HOPES: Final = (0.0, 0.01, 0.03, 0.06, 0.1, 0.15)  # shares of the room that rounding may have wasted


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and what is known about it.

    Attributes:
        schedule: the schedule.
        seconds: its time.
        peak_bytes: most bytes alive at any moment of it.
        lower_bound_s: no legal schedule within the budget is faster.
        exact: whether nothing was rounded and every carry could be stored: the schedule is optimal.
        unit_bytes: the size of the units in which the room was divided; 0 if that was not needed.
    """

    schedule: Schedule
    seconds: float
    peak_bytes: int
    lower_bound_s: float
    exact: bool
    unit_bytes: int

    @property
    def gap(self) -> float:
        """By how much of the lower bound the schedule may be slower than the fastest."""
        return self.seconds / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """The fastest schedule within the budget, of those that finish what is right before what is left.

    Raises:
        InfeasibleBudget: there is none; carries the smallest budget with which there is.
    """
    return solve(chain, budget_bytes).schedule


def solve(chain: Chain, budget_bytes: int, *, units: int = _UNITS) -> Solution:
    """The same with what is known about it. The budget is divided into `units`, or up to twice as many if exact.

    Raises:
        InfeasibleBudget: as `plan`.
    """
    problem = costs(chain)
    flavour = flavour_of(chain)
    room = budget_bytes - problem.fixed_bytes
    everything = keep_all(problem, flavour)
    if everything.room <= room:
        traced = trace(problem, everything.choose, flavour, room)
        return _solution(chain, budget_bytes, traced, lower_bound_s(problem, flavour, room), exact=True, unit_bytes=0)
    solved = tables.solve(problem, max(room, 1), units)
    smallest = solved.least_room(flavour)
    if room < smallest:
        raise infeasible(problem, budget_bytes, smallest)
    exact = solved.all_sites and solved.unit_bytes == problem.unit()
    traced = _best(problem, solved, flavour, room, (0.0,) if exact else _HOPES)
    bound = lower_bound_s(problem, flavour, room)
    return _solution(chain, budget_bytes, traced, bound, exact=exact, unit_bytes=solved.unit_bytes)


def flavour_of(chain: Chain) -> int:
    """Whether carry 0 is counted."""
    return tables.FREE if chain.caller_keeps_carry else tables.COUNTED


def infeasible(problem: Costs, budget_bytes: int, smallest_room: int) -> InfeasibleBudget:
    """The error for a budget that leaves too little room."""
    parts = {"outputs and fixed gradients": problem.fixed_bytes, "carries, tapes and workspace": smallest_room}
    return InfeasibleBudget(budget_bytes, problem.fixed_bytes + smallest_room, parts)


def _best(problem: Costs, solved: tables.Solved, flavour: int, room: int, hopes: tuple[float, ...]) -> Traced:
    """The fastest of what comes out when so much rounding is taken to have been wasted; all stay inside the room."""

    def traced(hope: float) -> Traced:
        hope_bytes = int(hope * room)
        return trace(problem, lambda f, s, t, m: solved.choose(f, s, t, m, hope_bytes), flavour, room)

    return min((traced(hope) for hope in hopes), key=lambda found: found.seconds)


def _solution(
    chain: Chain, budget_bytes: int, traced: Traced, bound: float, *, exact: bool, unit_bytes: int
) -> Solution:
    schedule = Schedule(chain.length, "unequal", traced.actions)
    return Solution(schedule, traced.seconds, budget_bytes - traced.unused_bytes, bound, exact, unit_bytes)
