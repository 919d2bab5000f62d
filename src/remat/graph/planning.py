"""A program within a budget: the segments as a chain, the exact planner's schedule, judged by the graph's own bytes.

The chain is a model of the graph: it knows segments, carries and tapes, not every node. So what it is asked for is
moved until the program that comes out, of which every byte is known, is the fastest found that stays inside the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec

from ..chains import Chain, Stage
from ..errors import InfeasibleBudget
from ..plans import plan as plan_chain
from .graphs import Graph, Program
from .inplace import planned
from .liveness import without_dead
from .menus import Menu, menu, piece
from .programs import program
from .refinement import Refiner
from .segments import root_bytes, segment, summed
from .strategies import strategy

_TRIALS: Final = 8
_SMALLER: Final = 4  # programs for budgets down to this part of the one at hand are made faster, too,
_STARTS: Final = 16  # but so many at most
WAITING_SHARE: Final = 1000  # gradients are handed out once they make up this part of the budget
_RULES: Final = ("drop-cheap", "sqrt", "budgeted", "recursive")  # of Chen's strategies
_CLOSE: Final = 0.995  # of the budget used: no more is asked for


@dataclass(frozen=True)
class GraphPlan:
    """A program for a graph, and what is known about it.

    Attributes:
        graph: what is run.
        program: the order of executions.
        budget_bytes: what its peak had to stay within.
        peak_bytes: most bytes alive at any moment, over those at the start.
        seconds: time of all executions.
        plain_peak_bytes: the peak without recomputation.
        plain_s: the time without.
        in_place: for a step of the program, the node whose storage its result takes.
    """

    graph: Graph
    program: Program
    budget_bytes: int
    peak_bytes: int
    seconds: float
    plain_peak_bytes: int
    plain_s: float
    in_place: Mapping[int, int] = field(default_factory=dict)

    @property
    def time_ratio(self) -> float:
        """Predicted time over that without recomputation."""
        return self.seconds / self.plain_s if self.plain_s else 1.0


class Planner:
    """Plans one graph for any budget; what all budgets share is computed once.

    Args:
        graph: what is planned.
        gradients_exist: whether gradients of parameters are added into a `.grad` that is there already.
        candidates: what each node may overwrite, see `inplace.plan`; without, nothing is.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        gradients_exist: bool = False,
        candidates: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.graph = graph
        self.gradients_exist = gradients_exist
        self.candidates = candidates or {}
        self.plain = self._judged(without_dead(graph, graph.plain))
        self.segments = segment(graph)
        self.menus, self.tapes = self._menus()
        self.chain = self._chain()
        self._known: dict[int, tuple[Program, int, float] | None] = {}
        self._refined: list[tuple[Program, int, float]] = []
        self._least_asked = 1  # the chain makes nothing of less

    def _judged(self, made: Program) -> tuple[Program, int, float]:
        _, found = planned(self.graph, made, self.candidates, gradients_exist=self.gradients_exist)
        return made, found.peak_bytes, self.graph.seconds_of(made)

    @cached_property
    def _by_rule(self) -> tuple[tuple[Program, int, float], ...]:
        """What Chen's rules make of it: where a graph is hardly a chain, they may find what the chain misses."""
        return tuple(self._judged(without_dead(self.graph, strategy(name)(self.graph))) for name in _RULES)

    def _menus(self) -> tuple[list[Menu], list[list[frozenset[int]]]]:
        known: dict[object, Menu] = {}
        menus, tapes = [], []
        for stage in range(len(self.segments.forward)):
            part = piece(self.segments, stage)
            carry_bytes = root_bytes(self.graph, self.segments.carries[stage])
            key = (part.graph, part.forward, part.backward, part.entering, carry_bytes)
            if key not in known:
                known[key] = menu(part, carry_bytes, gradients_exist=self.gradients_exist)
            menus.append(known[key])
            tapes.append([frozenset(part.nodes[k] for k in tape) for tape in known[key].tapes])
        return menus, tapes

    def _chain(self) -> Chain:
        graph, sums = self.graph, summed(self.segments)
        runs: list[tuple[Stage, int]] = []
        for number, found in enumerate(self.menus):
            stage = found.stage
            own = root_bytes(graph, [gradient for gradient, at in sums.items() if at == number])
            if own and stage.gradient_bytes:  # counted below
                stage = msgspec.structs.replace(stage, gradient_bytes=max(0, stage.gradient_bytes - own))
            if runs and runs[-1][0] == stage:
                runs[-1] = (stage, runs[-1][1] + 1)
            else:
                runs.append((stage, 1))
        other = [g for g, mine in graph.final_gradients.items() if not mine]
        return Chain(
            tuple(runs),
            output_bytes=root_bytes(graph, {*graph.outputs, *self.segments.kept}),
            output_gradient_bytes=root_bytes(graph, graph.tangents),
            input_gradient_bytes=root_bytes(graph, other),
            parameter_gradient_bytes=root_bytes(graph, sums),
        )

    @property
    def plain_bytes(self) -> int:
        """The smallest budget for which nothing is recomputed."""
        return with_reserve(self.plain[1])

    def plan(self, budget_bytes: int) -> GraphPlan:
        """The fastest program found within the budget.

        Raises:
            InfeasibleBudget: none was found; carries the smallest budget for which one is.
        """
        room = budget_bytes - reserve_bytes(budget_bytes)
        if self.plain[1] <= room:
            return self._result(budget_bytes, self.plain)
        self._search(room)
        found = self._best(room)
        if found is None:
            smallest = self._smallest_peak_bytes
            found = self._best(room)
        if found is not None:
            self._refine(room)
            found = self._best(room)
        if found is None:
            parts = {"outputs and gradients": self._fixed_bytes}
            parts["values alive at once"] = smallest - parts["outputs and gradients"]
            raise InfeasibleBudget(budget_bytes, with_reserve(smallest), parts)
        return self._result(budget_bytes, found)

    def _fitting(self, room: int) -> list[tuple[Program, int, float]]:
        """What fits, the fastest first."""
        candidates = (*self._by_rule, *self._refined, *(found for found in self._known.values() if found is not None))
        return sorted((found for found in candidates if found[1] <= room), key=lambda found: (found[2], found[1]))

    def _best(self, room: int) -> tuple[Program, int, float] | None:
        return next(iter(self._fitting(room)), None)

    @cached_property
    def _refiner(self) -> Refiner:
        return Refiner(self.graph, gradients_exist=self.gradients_exist, candidates=self.candidates)

    def _refine(self, room: int) -> None:
        """Make programs faster, by single nodes and exact bytes.

        From slower ones with room to spare too, those for smaller budgets among them: they often end up faster.
        """
        asked = self.plain[1]
        while asked > max(room // _SMALLER, self._least_asked):
            if asked < room:
                self._try(asked)
            asked = asked * 4 // 5  # the same ones for all budgets
        distinct = {(peak, seconds): made for made, peak, seconds in self._fitting(room)}
        starts = list(distinct.values())[:_STARTS]
        self._refined.append(self._judged(self._refiner.refined(starts, room)))

    def _result(self, budget_bytes: int, found: tuple[Program, int, float]) -> GraphPlan:
        made, peak_bytes, seconds = found
        in_place, _ = planned(self.graph, made, self.candidates, gradients_exist=self.gradients_exist)
        _, plain_peak_bytes, plain_s = self.plain
        return GraphPlan(
            self.graph, made, budget_bytes, peak_bytes, seconds, plain_peak_bytes, plain_s, in_place=in_place
        )

    @property
    def _fixed_bytes(self) -> int:
        graph = self.graph
        stays = [g for g, mine in graph.final_gradients.items() if not (mine and self.gradients_exist)]
        return root_bytes(graph, {*graph.outputs, *stays})

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget for which a program is found."""
        return with_reserve(self._smallest_peak_bytes)

    @property
    def _smallest_peak_bytes(self) -> int:
        self._try(1)
        self._try(self._least_asked)
        tried = (found[1] for found in self._known.values() if found is not None)
        return min(self.plain[1], *(found[1] for found in self._by_rule), *tried)

    def _try(self, asked_bytes: int) -> tuple[Program, int, float] | None:
        """The program for what the chain makes of a budget; None if it makes nothing of it."""
        if asked_bytes not in self._known:
            try:
                schedule = plan_chain(self.chain, asked_bytes).schedule
            except InfeasibleBudget as error:
                self._known[asked_bytes] = None
                self._least_asked = error.smallest_budget_bytes
            else:
                self._known[asked_bytes] = self._judged(program(self.segments, schedule, self.tapes))
        return self._known[asked_bytes]

    def _search(self, room: int) -> None:
        """Ask the chain for more while the program has room, for less while it has not."""
        low, high, asked = 0, 0, max(room, 1)
        for _ in range(_TRIALS):
            found = self._try(asked)
            if found is None:
                asked = self._least_asked
                found = self._try(asked)
            if found is not None and found[1] > room:
                high = asked
            else:
                low = max(low, asked)
                if found is not None and found[1] >= _CLOSE * room:
                    break
            if high and high <= self._least_asked:
                break
            if not high:
                asked = asked * 5 // 4
            elif not low:
                asked = asked * 4 // 5
            else:
                asked = (low + high) // 2
            if high and high - low < room // 200:
                break


def reserve_bytes(budget_bytes: int) -> int:
    """Kept free of a budget: gradients that wait for others to be handed out with, and the key of the run."""
    return budget_bytes // WAITING_SHARE + 1024


def with_reserve(peak_bytes: int) -> int:
    """The smallest budget that leaves so many bytes."""
    budget = (peak_bytes + 1024) * WAITING_SHARE // (WAITING_SHARE - 1)
    while budget - reserve_bytes(budget) < peak_bytes:
        budget += 1
    return budget
