"""Planners: functions from a chain and a budget to a schedule, one strategy a file, by name in a registry.

To add one: a file with a function of the `Planner` signature, a line in `_HOMES`, an entry in the shared test suite.
"""

from __future__ import annotations

from typing import Final, Protocol

from ..chains import Chain
from ..schedules import Schedule
from ._registry import plan_of


class Planner(Protocol):
    """One strategy."""

    def __call__(self, chain: Chain, budget_bytes: int) -> Schedule:
        """The strategy's best schedule for `chain` whose simulated peak is at most `budget_bytes`.

        Raises:
            InfeasibleBudget: the strategy has no such schedule; carries the smallest budget with which it has one.
            UnsupportedChain: the strategy cannot plan this kind of chain.
        """
        ...


_HOMES: Final[dict[str, str]] = {
    "tight": "tight",
    "keep-all": "keep_all",
    "constant": "constant",
    "sqrt": "sqrt",
    "recursive": "recursive",
    "hsm": "hsm",
    "ism": "ism",
    "msm": "msm",
    "unequal": "unequal",
}


def names() -> tuple[str, ...]:
    """All planners' names."""
    return tuple(_HOMES)


def planner(name: str) -> Planner:
    """The planner of this name, imported when first asked for.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    found: Planner = plan_of(__name__, _HOMES, name, "planner")
    return found
