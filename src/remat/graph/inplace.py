"""In place: which results of a program take the storage of an input that nothing reads any more.

Chen et al. 2016, section 3, let an elementwise result overwrite its input where no other node needs that. Here that is
decided for a program, recomputations included: a step may overwrite an input if

* its operator can (`inplace_ops` knows which inputs), and the storage is exactly as large as the result,
* every value that lives in the storage, views included, is used in this step for the last time,
* the storage was allocated by a step of the same half, forward or backward. So inputs and parameters, tangents, and
  what the backward takes from the forward are never overwritten: their holders may use them again, in a second
  backward for one,
* and it holds no gradient of an input, which leaves, and no output, which stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .graphs import Graph, Program
from .liveness import Liveness, Machine


def plan(
    graph: Graph, program: Program, candidates: Mapping[int, Sequence[int]], *, gradients_exist: bool = False
) -> dict[int, int]:
    """For each step whose result takes an input's storage, the node whose value that input is.

    Args:
        graph: what is run.
        program: without dead executions.
        candidates: for a node, the nodes whose values its operator can overwrite, preferred ones first.
        gradients_exist: as in `liveness`.
    """
    return planned(graph, program, candidates, gradients_exist=gradients_exist)[0]


def planned(
    graph: Graph, program: Program, candidates: Mapping[int, Sequence[int]], *, gradients_exist: bool = False
) -> tuple[dict[int, int], Liveness]:
    """What `plan` says, and the bytes over time of the program run so."""
    planner = _Planner(graph, program, candidates, gradients_exist)
    planner.run_all()
    return planner.taken, Liveness(tuple(planner.during), tuple(planner.after))


class _Planner(Machine):
    """Decides each step while it runs, knowing who lives in every instance."""

    def __init__(
        self, graph: Graph, program: Program, candidates: Mapping[int, Sequence[int]], gradients_exist: bool
    ) -> None:
        self.taken: dict[int, int] = {}
        self.candidates = candidates
        self.own: set[int] = set()  # instances made by steps of this half
        super().__init__(graph, program, gradients_exist, self.taken)

    def run(self, step: int, index: int) -> None:
        source = next((k for k in self.candidates.get(index, ()) if self._may_take(step, index, k)), None)
        if source is not None:
            self.taken[step] = source
        before = self.made
        super().run(step, index)
        self.own.update(range(before + 1, self.made + 1))

    def turn(self, rest: Sequence[int]) -> None:
        super().turn(rest)
        self.own.clear()

    def _may_take(self, step: int, index: int, source: int) -> bool:
        instances = set(self.holds.get(source, {}).values())
        fresh, nodes = self.graph.nodes[index].fresh, self.graph.nodes
        if len(instances) != 1 or len(fresh) != 1 or not instances <= self.own:
            return False
        (instance,) = instances
        if self.size[instance] != self.graph.storages[fresh[0]].bytes:
            return False
        ending = [k for k in self.used.last[step] if instance in self.holds.get(k, {}).values()]
        others = [k for k in nodes[index].inputs if k != source and instance in self.holds.get(k, {}).values()]
        leaving = any(k in self.graph.final_gradients for k in ending)
        return len(ending) == self.count[instance] and not others and not leaving
