"""The numbers behind the figures, in the papers' units: forward runs, memory in hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import comb, isqrt

from ..chains import Chain
from ..errors import InfeasibleBudget, RematError
from ..planners import hsm, ism, planner
from ..planners._every_room import every_room
from ..planners._mixed import Node
from ..planners._units import Units
from ..planners.room import Room, slots_budget_bytes
from ..simulator import simulate


@cache
def mixed(steps: int, alpha: int, most: int, *, tight: bool) -> tuple[int, ...]:
    """Forward runs of mixed memorization with 1, 2, …, `most` units, those that help; the paper's or the tight one."""
    units = Units.of(Room.of(Chain.in_paper_units(steps, alpha)), most - 1)
    return tuple(every_room(units, Node.FROM_SLOT, tight=tight))


def least_memory(steps: int, alpha: int, runs_a_step: int, *, tight: bool) -> int:
    """The fewest units with which mixed memorization takes at most so many forward runs a step."""
    most = 64
    while True:
        costs = mixed(steps, alpha, most, tight=tight)
        for units, cost in enumerate(costs, 1):
            if cost <= runs_a_step * steps:
                return units
        most *= 2


def chen(steps: int, alpha: int, segment: int) -> int:
    """Chen's memory with segments of so many steps: their starts, and one segment's internal states."""
    return -(-steps // segment) + segment * alpha


def chen_sqrt(steps: int, alpha: int) -> int:
    """With segments of √t steps."""
    return chen(steps, alpha, round(steps**0.5))


def chen_tuned(steps: int, alpha: int) -> int:
    """With the segment that takes least."""
    return min(chen(steps, alpha, segment) for segment in range(1, steps + 1))


def by_rule(name: str, steps: int, alpha: int) -> list[tuple[int, float]]:
    """(units, forward runs a step) of the distinct plans of a planner that goes by rule, simulated.

    Units are counted as for mixed memorization: what the simulated peak has beyond that with one unit.
    """
    chain = Chain.in_paper_units(steps, alpha)
    one = slots_budget_bytes(chain, 1)
    make = planner(name)
    budget, found = one + 2 * (chen_sqrt(steps, alpha) + alpha), list[tuple[int, float]]()
    while True:
        try:
            judged = simulate(chain, make(chain, budget))
        except InfeasibleBudget:
            return found[::-1]
        found.append((judged.peak_bytes - one + 1, judged.forward_runs / steps))
        budget = judged.peak_bytes - 1


# ---- upper bounds, Gruslys et al. 2016, Appendix B


def general_bound(steps: int, slots: int) -> float:
    """m·t^(1+1/m), an upper bound of C(t, m)."""
    return float(slots * steps ** (1 + 1 / slots))


def binomial_order(steps: int, slots: int, *, internal: bool) -> int:
    """The least a for which t ≤ T(a, m): binom(m+a, a), for internal states one less."""
    a = 0
    while comb(slots + a, a) - internal < steps:
        a += 1
    return a


def binomial_bound(steps: int, slots: int, *, internal: bool) -> int:
    """(a+1)·t for hidden states, a·t for internal ones, where t ≤ T(a, m)."""
    a = binomial_order(steps, slots, internal=internal)
    return (a if internal else a + 1) * steps


def crossed(steps: int, slots: int) -> Iterator[str]:
    """What an exact cost exceeds, in whole numbers, so that no rounding decides."""
    hidden, internal = hsm.cost(steps, slots), ism.cost(steps, slots)
    for name, cost in (("HSM", hidden), ("ISM", internal)):
        if cost**slots > slots**slots * steps ** (slots + 1):
            yield f"{name} C({steps}, {slots}) = {cost} exceeds m·t^(1+1/m) = {general_bound(steps, slots):.6g}"
        bound = binomial_bound(steps, slots, internal=name == "ISM")
        if cost > bound:
            yield f"{name} C({steps}, {slots}) = {cost} exceeds the binomial bound {bound}"


def check_bounds(lengths: Sequence[int], slots: Sequence[int]) -> int:
    """How many exact costs were compared with their bounds, none of which they may exceed."""
    for m in slots:
        for t in lengths:
            for complaint in crossed(t, m):
                raise RematError(f"internal error: {complaint}; please report it")
    return 2 * len(lengths) * len(slots)


def lengths_up_to(longest: int, points: int = 60) -> list[int]:
    """Whole numbers from 1 in about equal ratios."""
    wanted = {round(longest ** (k / points)) for k in range(points + 1)}
    return sorted(wanted | {isqrt(longest), longest})
