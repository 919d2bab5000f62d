"""The strategies of Chen et al. 2016 on a training graph: one a file, each a function from a graph to a program.

None knows a budget, and none knows how a program is judged: `liveness` says what it takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, Protocol

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
    if name not in _HOMES:
        raise ValueError(f"no strategy is called {name!r}; there are {', '.join(_HOMES)}")
    found: Strategy = import_module(f".{_HOMES[name]}", __name__).plan
    return found
