"""The strategies of Chen et al. 2016 on a training graph: one a file, each a function from a graph to a program.

None knows a budget, and none knows how a program is judged: `liveness` says what it takes.
"""

from __future__ import annotations

from typing import Final, Protocol

from ...planners._registry import plan_of
from ..graphs import Graph, Program


class Strategy(Protocol):
    """What every strategy's `plan` is."""

    def __call__(self, graph: Graph) -> Program:
        """An order of executions, recomputations included, after which all gradients have been made."""
        ...


_HOMES: Final = {
    "drop-cheap": "drop_cheap",
    "sqrt": "sqrt",
    "budgeted": "budgeted",
    "recursive": "recursive",
}


def names() -> tuple[str, ...]:
    """All strategies' names."""
    return tuple(_HOMES)


def strategy(name: str) -> Strategy:
    """The strategy of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    found: Strategy = plan_of(__name__, _HOMES, name, "strategy")
    return found
