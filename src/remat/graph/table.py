"""Chen's table: what one training step takes under each optimisation, and what it costs in time.

Chen et al. 2016, section 5, compare: no optimisation, in-place, sharing, both, dropping what is cheap, the sublinear
plans. Each is a program on the training graph, a decision about in-place, and an arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from . import inplace, strategies
from .arena import Lifetime, place
from .blocks import WORKSPACE, blocks
from .graphs import Graph, Program
from .liveness import liveness, without_dead
from .planning import Planner

SHARES: Final = (0.5, 0.3, 0.2, 0.1)
_EFFORT: Final = 2 * 10**7  # for the arena, whose simple orders come within a percent
_SUBLINEAR: Final = {
    "drop-cheap": "cheap results dropped",
    "sqrt": "√n segments",
    "budgeted": "segments by algorithm 3",
    "recursive": "recursion",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the step.

    Attributes:
        name: what it does.
        group: "Chen et al. 2016", "PyTorch" or "remat".
        bytes: what it takes: the arena where memory is shared statically, else the peak.
        seconds: time of all executions.
    """

    name: str
    group: str
    bytes: int
    seconds: float


class Table:
    """The rows for one graph.

    Args:
        graph: the training graph.
        candidates: what can be overwritten, from `inplace_ops.candidates`.
        gradients_exist: whether parameters have a `.grad` already.
    """

    def __init__(self, graph: Graph, candidates: Mapping[int, Sequence[int]], *, gradients_exist: bool = False) -> None:
        self.graph = graph
        self.candidates = candidates
        self.gradients_exist = gradients_exist
        self.plain = without_dead(graph, graph.plain)
        self.planner = Planner(graph, gradients_exist=gradients_exist, candidates=candidates)
        self.plain_bytes = liveness(graph, self.plain, gradients_exist=gradients_exist).peak_bytes

    def rows(self, shares: Iterable[float] = SHARES) -> Iterator[Row]:
        """All rows, in the order of the paper, then remat at shares of what plain PyTorch takes."""
        yield from self.chen()
        yield Row("freed at last use, nothing run again", "PyTorch", self.plain_bytes, self._seconds(self.plain))
        yield from self.remat(shares)

    def chen(self) -> Iterator[Row]:
        """The paper's: in-place, sharing, both, and on top of both what is dropped and run again."""
        seconds = self._seconds(self.plain)
        own, taken = self.lifetimes(self.plain, in_place=False), self.lifetimes(self.plain)
        for name, size in (
            ("no optimisation", _without_sharing(own)),
            ("in-place", _without_sharing(taken)),
            ("sharing", self._arena(own)),
            ("in-place + sharing", self._arena(taken)),
        ):
            yield Row(name, "Chen et al. 2016", size, seconds)
        for name, text in _SUBLINEAR.items():
            program = without_dead(self.graph, strategies.strategy(name)(self.graph))
            yield Row(text, "Chen et al. 2016", self._arena(self.lifetimes(program)), self._seconds(program))

    def remat(self, shares: Iterable[float]) -> Iterator[Row]:
        """The exact planner's, at shares of what plain PyTorch takes and at the smallest budget."""
        smallest = self.planner.smallest_bytes
        for share in shares:
            budget = int(share * self.plain_bytes)
            if budget >= smallest:
                yield self.within(budget, f"budget of {100 * share:.3g} %")
        yield self.within(smallest, "smallest budget")

    def within(self, budget_bytes: int, name: str = "") -> Row:
        """The exact planner's within a budget.

        Raises:
            InfeasibleBudget: there is no such plan.
        """
        found = self.planner.plan(budget_bytes)
        return Row(name, "remat", found.peak_bytes, found.seconds)

    def peak_bytes(self, name: str) -> int:
        """The peak of one of Chen's strategies, what can be overwritten in place overwritten."""
        program = without_dead(self.graph, strategies.strategy(name)(self.graph))
        found = inplace.planned(self.graph, program, self.candidates, gradients_exist=self.gradients_exist)
        return found[1].peak_bytes

    def lifetimes(self, program: Program, *, in_place: bool = True) -> list[Lifetime]:
        """The blocks of a program."""
        exist = self.gradients_exist
        taken = inplace.plan(self.graph, program, self.candidates, gradients_exist=exist) if in_place else {}
        return blocks(self.graph, program, gradients_exist=exist, in_place=taken)

    def _arena(self, lifetimes: Sequence[Lifetime]) -> int:
        return place(lifetimes, effort=_EFFORT).total_bytes

    def _seconds(self, program: Program) -> float:
        return self.graph.seconds_of(program)


def _without_sharing(lifetimes: Iterable[Lifetime]) -> int:
    """Every result has memory of its own throughout; workspaces follow one another in the largest."""
    found = list(lifetimes)
    workspace = max((one.bytes for one in found if one.kind == WORKSPACE), default=0)
    return workspace + sum(one.bytes for one in found if one.kind != WORKSPACE)
