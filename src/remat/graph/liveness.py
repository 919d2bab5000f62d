"""Exact bytes over time of a program: what is allocated, what is still needed, what is freed.

The rules, which are those of straight-line code that drops each value after its last use:

* an execution allocates its fresh storages and, while it runs, its workspace; its inputs are alive throughout;
* a storage is freed once no value that lives in it will be used any more; external ones are not counted;
* what the forward returns stays (its caller holds it);
* the state of a generator is kept while the operator that drew under it will be run again;
* tangents exist from the first step of the backward to their last use;
* the gradient of a parameter is added into `.grad` as soon as it exists and then freed, or, where there was no `.grad`,
  becomes it and stays; gradients of other inputs stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .graphs import Graph, Kind, Program


@dataclass(frozen=True, slots=True)
class Uses:
    """What a program's values are used for.

    Attributes:
        dead: steps whose value nothing uses before it is made anew: they can be left out.
        last: for each step, the nodes whose values are used there for the last time; the node that runs there itself
            if nothing uses its value.
        saved: nodes, inputs among them, whose values the backward takes from the forward.
        finished: for each step, gradients of inputs that are complete and used by no other node after it.
    """

    dead: frozenset[int]
    last: tuple[tuple[int, ...], ...]
    saved: tuple[int, ...]
    finished: tuple[tuple[int, ...], ...]


def uses(graph: Graph, program: Program) -> Uses:
    """Read the program from its end: a value is alive between an execution and the last use before the next one."""
    steps = len(program.order)
    alive: dict[int, int] = {}  # node -> the step that uses it last
    dead: list[int] = []
    last: list[tuple[int, ...]] = [()] * steps
    finished: list[tuple[int, ...]] = [()] * steps
    saved: tuple[int, ...] = ()
    final = set(graph.final_gradients)
    effects = {k for k, node in enumerate(graph.nodes) if node.writes}
    for step in range(steps - 1, -1, -1):
        if step == program.forward_steps - 1:
            saved = tuple(sorted(set(alive) - set(graph.tangents)))
            alive.update((output, step) for output in graph.outputs if output not in alive)
        index = program.order[step]
        end = alive.pop(index, None)
        if index in final:
            final.discard(index)
            finished[step if end is None else end] += (index,)
        elif end is None and index not in effects:
            dead.append(step)
            continue
        ending = [] if end is not None else [index]
        for source in graph.nodes[index].inputs:
            if source not in alive:
                alive[source] = step
                ending.append(source)
        last[step] = tuple(ending)
    return Uses(frozenset(dead), tuple(last), saved, tuple(finished))


def without_dead(graph: Graph, program: Program) -> Program:
    """The program without executions that nothing uses."""
    dead = uses(graph, program).dead
    order = tuple(k for step, k in enumerate(program.order) if step not in dead)
    return Program(order, program.forward_steps - sum(step < program.forward_steps for step in dead))


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes of a program over time.

    Attributes:
        during: for each step, bytes alive while it runs, its workspace included.
        after: for each step, bytes alive when it is over.
        peak_bytes: most bytes alive at any moment.
    """

    during: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""
        return max(self.during, default=0)


def liveness(
    graph: Graph, program: Program, *, gradients_exist: bool = False, in_place: Mapping[int, int] | None = None
) -> Liveness:
    """Bytes over time of a program without dead executions (`without_dead`).

    Args:
        graph: what is run.
        program: the order.
        gradients_exist: whether parameters have a `.grad` already, into which gradients are added.
        in_place: for a step, the node whose storage its result takes, see `inplace.plan`.
    """
    machine = Machine(graph, program, gradients_exist, in_place or {})
    machine.run_all()
    return Liveness(tuple(machine.during), tuple(machine.after))


def _drawn(graph: Graph, program: Program) -> dict[int, tuple[int, int]]:
    """Random nodes that run several times, with their first and last step."""
    steps: dict[int, tuple[int, int]] = {}
    for step, index in enumerate(program.order):
        if graph.nodes[index].state_bytes:
            steps[index] = (steps.get(index, (step, step))[0], step)
    return {index: ends for index, ends in steps.items() if ends[0] != ends[1]}


class Machine:
    """Instances of storages, by number, with how many values live in each."""

    def __init__(self, graph: Graph, program: Program, gradients_exist: bool, in_place: Mapping[int, int]) -> None:
        self.graph = graph
        self.program = program
        self.used = uses(graph, program)
        self.gradients_exist = gradients_exist
        self.in_place = in_place
        self.holds: dict[int, dict[int, int]] = {}  # node -> storage -> instance
        self.count: dict[int, int] = {}  # instance -> values
        self.size: dict[int, int] = {}
        self.bytes = 0
        self.made = 0
        self.drawn = _drawn(graph, program)
        self.states: dict[int, int] = {}  # node -> instance
        self.during: list[int] = []
        self.after: list[int] = []
        tangents = set(graph.tangents)
        for index, node in enumerate(graph.nodes):
            if node.kind is Kind.INPUT and index not in tangents:
                self._hold(index, {s: self._new(0) for s in node.storages})

    def run_all(self) -> None:
        """The whole program."""
        order = self.program.order
        for step, index in enumerate(order):
            if step == self.program.forward_steps:
                self.turn(order[step:])
            self.run(step, index)

    def _new(self, size: int) -> int:
        self.made += 1
        self.size[self.made] = size
        self.count[self.made] = 0
        self.bytes += size
        return self.made

    def _hold(self, index: int, instances: dict[int, int]) -> None:
        self._drop(index)
        self.holds[index] = instances
        self._pin(index)

    def _pin(self, index: int) -> None:
        for instance in self.holds.get(index, {}).values():
            self.count[instance] += 1

    def _drop(self, index: int) -> None:
        for instance in self.holds.pop(index, {}).values():
            self.count[instance] -= 1
            if not self.count[instance]:
                self._free(instance)

    def _free(self, instance: int) -> None:
        self.bytes -= self.size.pop(instance)
        del self.count[instance]

    def workspace_bytes(self, step: int, index: int) -> int:
        """What a step allocates and frees again; drawing again sets the generator's present state aside."""
        node = self.graph.nodes[index]
        again = index in self.drawn and step > self.drawn[index][0]
        return node.workspace_bytes + (node.state_bytes if again else 0)

    def run(self, step: int, index: int) -> None:
        graph = self.graph
        node = graph.nodes[index]
        held: dict[int, int] = {}
        for source in node.inputs:
            held.update(self.holds.get(source, {}))
        fresh = set(node.fresh)
        if step in self.in_place:
            (storage,), (instance,) = node.fresh, self.holds[self.in_place[step]].values()
            held[storage] = instance
            fresh.clear()
        made = {
            s: held[s] if s in held and s not in fresh else self._new(graph.storages[s].bytes) for s in node.storages
        }
        self._hold(index, made)
        first, final = self.drawn.get(index, (-1, -1))
        if step == first:
            self.states[index] = self._new(node.state_bytes)
        self.during.append(self.bytes + self.workspace_bytes(step, index))
        if step == final:
            self._free(self.states.pop(index))
        for gradient in self.used.finished[step]:
            if not (graph.final_gradients[gradient] and self.gradients_exist):
                self._pin(gradient)  # it becomes `.grad`, or is handed back
        for source in self.used.last[step]:
            self._drop(source)
        self.after.append(self.bytes)

    def turn(self, rest: Sequence[int]) -> None:
        """From forward to backward: what was returned stays, tangents arrive."""
        graph = self.graph
        for output in graph.outputs:
            self._pin(output)
        needed = {source for index in rest for source in graph.nodes[index].inputs}
        for output in set(graph.outputs) - needed:
            self._drop(output)
        for tangent in graph.tangents:
            self._hold(tangent, {s: self._new(graph.storages[s].bytes) for s in graph.nodes[tangent].storages})
            if tangent in graph.final_gradients:
                self._pin(tangent)
