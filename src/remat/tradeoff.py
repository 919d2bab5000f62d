"""`tradeoff(chain)`: bytes against seconds, the whole curve, from one table instead of one plan per budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Final

import numpy as np

from .chains import INTERNAL_STATE, Chain
from .planners import _unequal_bounds as bounds
from .planners import hsm, ism, keep_all, planner
from .planners._every_room import forward_runs
from .planners._unequal_costs import costs
from .planners._unequal_tables import Solved, solve
from .planners._unequal_trace import trace
from .planners.room import Room, smallest
from .planners.unequal import flavour_of
from .simulator import simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORT: Final = 100  # so many equal stages take no longer than unequal ones, whose tables leave nothing to a reserve
_SAMPLES: Final = 200
_ROWS: Final = 24  # of a table


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """What a budget buys: budgets in ascending order, with the seconds of one iteration, which descend.

    Attributes:
        budgets_bytes: the budgets at which something is gained, from the smallest feasible one to that from which on
            nothing is run twice and every stage is recorded in its fastest way.
        seconds: what an iteration takes with each of them and up to the next.
        unit_bytes: how finely budgets were told apart.
        exact: whether that is fine enough to lose nothing.
    """

    budgets_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    unit_bytes: int
    exact: bool

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.budgets_bytes.tolist(), self.seconds.tolist(), strict=True)

    def __len__(self) -> int:
        return len(self.budgets_bytes)

    @property
    def smallest_budget_bytes(self) -> int:
        """The smallest budget with which there is a schedule."""
        return int(self.budgets_bytes[0])

    @property
    def largest_budget_bytes(self) -> int:
        """The budget beyond which nothing is gained."""
        return int(self.budgets_bytes[-1])

    def at(self, budget_bytes: int) -> float:
        """Seconds of an iteration with this budget; infinite if there is no schedule."""
        index = int(np.searchsorted(self.budgets_bytes, budget_bytes, side="right")) - 1
        return float(self.seconds[index]) if index >= 0 else float("inf")

    @property
    def knee(self) -> tuple[int, float]:
        """The budget, and its seconds, from which less memory costs ever more and more memory gains ever less.

        It is the point farthest below the straight line between the ends, both axes logarithmic: where doubling and
        halving the budget are worth the same share of the way.
        """
        if len(self) < 3 or self.seconds[-1] <= 0 or self.budgets_bytes[0] <= 0:
            return self.largest_budget_bytes, float(self.seconds[-1])
        x = np.log(self.budgets_bytes / self.budgets_bytes[0]) / log(self.budgets_bytes[-1] / self.budgets_bytes[0])
        y = np.log(self.seconds / self.seconds[-1]) / log(self.seconds[0] / self.seconds[-1])
        best = int(np.argmin(x + y))
        return int(self.budgets_bytes[best]), float(self.seconds[best])

    def selected(self, most: int = _ROWS) -> list[tuple[int, float]]:
        """Both ends, the knee, and points between them in about equal ratios of bytes."""
        wanted = np.geomspace(max(1, self.smallest_budget_bytes), max(1, self.largest_budget_bytes), most - 1)
        indices = np.searchsorted(self.budgets_bytes, wanted * (1 + 1e-9), side="right") - 1
        knee = int(np.searchsorted(self.budgets_bytes, self.knee[0]))
        kept = sorted({0, knee, len(self) - 1, *np.clip(indices, 0, None).tolist()})
        return [(int(self.budgets_bytes[k]), float(self.seconds[k])) for k in kept]

    def name_of(self, budget_bytes: int) -> str:
        """What one of its budgets is called; empty for most."""
        names = {
            self.smallest_budget_bytes: "the smallest",
            self.knee[0]: "the knee",
            self.largest_budget_bytes: "more gains nothing",
        }
        return names.get(budget_bytes, "")


def tradeoff(chain: Chain, *, units: int = 500, quick: bool = False) -> Tradeoff:
    """The curve of bytes against seconds: for one repeated stage that of `tight`, else that of `unequal`.

    Args:
        chain: stages and what they cost.
        units: how many budgets to tell apart; fewer if fewer are exact.
        quick: of one repeated stage only what the closed forms of `hsm` and `ism` tell, which takes no longer for a
            million stages than for a thousand; a plan may be faster than that.
    """
    if len(chain.runs) == 1 and (chain.length > _SHORT or chain.stage(0).menu[0].name == INTERNAL_STATE):
        return _repeated(chain, units, quick=quick)
    problem, flavour = costs(chain), flavour_of(chain)
    most = bounds.keep_all(problem, flavour)
    solved = solve(problem, max(1, most.room), units)
    least = solved.least_room(flavour)
    points = [(problem.fixed_bytes + most.room, float(problem.fastest[-1]))]
    if least < most.room:
        points.append((problem.fixed_bytes + least, trace(problem, solved.choose, flavour, least).seconds))
        points += _table_points(solved, flavour, least, most.room)
    exact = solved.all_sites and solved.unit_bytes == problem.unit()
    return _curve(points, solved.unit_bytes, exact=exact)


def _table_points(solved: Solved, flavour: int, least: int, most: int) -> Iterator[tuple[int, float]]:
    fixed, unit = solved.costs.fixed_bytes, solved.unit_bytes
    for room, seconds in enumerate(solved.curve(flavour)):
        if least <= room * unit < most and seconds < np.inf:
            yield fixed + room * unit, float(seconds)


def _curve(points: list[tuple[int, float]], unit_bytes: int, *, exact: bool) -> Tradeoff:
    """The points that are faster than all with a smaller budget."""
    kept: list[tuple[int, float]] = []
    for budget, seconds in sorted(points):
        if not kept or seconds < kept[-1][1]:
            kept.append((budget, seconds))
    budgets = np.array([budget for budget, _ in kept], dtype=np.int64)
    return Tradeoff(budgets, np.array([seconds for _, seconds in kept]), unit_bytes, exact)


def _repeated(chain: Chain, units: int, *, quick: bool) -> Tradeoff:
    """One repeated stage: every menu entry's table of all rooms, and what needs no table."""
    papers = chain.stage(0).menu[0].name == INTERNAL_STATE  # there the paper's m says what may be used
    least = smallest(chain).peak_bytes
    points = [] if quick else [(least, simulate(chain, planner("constant")(chain, least)).seconds)]
    if not papers:
        points += [(keep_all.peak_bytes(chain, e), keep_all.seconds(chain, e)) for e in keep_all.entries(chain)]
    unit_bytes, exact = 0, len(chain.stage(0).menu) == 1 and not quick
    for entry in range(len(chain.stage(0).menu)):
        room = Room.of(chain, entry)
        unit, found = (0, iter(())) if quick else forward_runs(room, units)
        unit_bytes, exact = max(unit_bytes, unit), exact and unit > 0
        start = -room.keep(0)
        points += [(start + keep, room.seconds(runs)) for keep, runs in found]
        points += [(start + keep, room.seconds(runs)) for keep, runs in _closed_forms(room)]
        if quick:
            points.append((least, room.seconds(chain.length * (chain.length + 1) // 2)))  # always from the start again
    largest = min(budget for budget, seconds in points if seconds == min(seconds for _, seconds in points))
    points = [point for point in points if point[0] <= largest]
    return _curve(points, unit_bytes or -(-largest // units), exact=exact)


def _closed_forms(room: Room) -> Iterator[tuple[int, int]]:
    """(bytes kept, forward runs) of HSM and ISM, which round nothing, for numbers of slots in equal ratios."""
    each = max(room.alone, room.more)
    for slots in np.unique(np.geomspace(1, room.steps, _SAMPLES).astype(np.int64)).tolist():
        yield (slots - 1) * room.carry, hsm.cost(room.steps, slots)
        yield (slots - 1) * each, ism.cost(room.steps, slots)
