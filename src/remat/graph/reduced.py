"""A training graph without what is free: the nodes that take time or memory, which read and make storages.

Views cost nothing and are left out: who reads a view reads its storages. The turn from forward to backward is a node
too: it needs the outputs and allocates the tangents. What is decided here, an order of such *units*, becomes a program
again by making every view right before it is read, unless the one made last still lives in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .cuts import Forward
from .graphs import Graph, Kind, Program
from .liveness import without_dead
from .replay import replayed


@dataclass(frozen=True)
class Reduced:
    """The units of a graph, in an order that can be run; one of them is the turn.

    Attributes:
        graph: what was reduced.
        nodes: the node behind each unit; -1 is the turn.
        turn: the turn's place among them.
        needs: the storages that each reads, external ones left out.
        fresh: the storages that each allocates.
    """

    graph: Graph
    nodes: tuple[int, ...]
    turn: int
    needs: tuple[frozenset[int], ...]
    fresh: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph) -> Reduced:
        """The units of the plain program."""
        forward = Forward.of(graph)
        plain = without_dead(graph, replayed(forward, forward.born))
        order = [k for k in plain.order if graph.nodes[k].kind is not Kind.VIEW]
        turn = sum(graph.nodes[k].kind is not Kind.VIEW for k in plain.order[: plain.forward_steps])
        order.insert(turn, -1)
        own = {s for k in (*order, *graph.tangents) if k >= 0 for s in graph.nodes[k].storages}
        own = {s for s in own if not graph.storages[s].external}
        tangents = tuple(dict.fromkeys(s for k in graph.tangents for s in graph.nodes[k].storages))

        def reads(k: int) -> frozenset[int]:
            sources = graph.outputs if k < 0 else graph.nodes[k].inputs
            return frozenset(s for i in sources for s in graph.nodes[i].storages) & own

        return cls(
            graph,
            tuple(order),
            turn,
            tuple(map(reads, order)),
            tuple(tangents if k < 0 else graph.nodes[k].fresh for k in order),
        )

    @property
    def is_whole(self) -> bool:
        """Whether storages say all about who needs whom: nothing is changed in place, nothing returns a number."""
        nodes = (self.graph.nodes[k] for k in self.nodes if k >= 0)
        return all(node.fresh and set(node.fresh) == set(node.storages) and not node.writes for node in nodes)

    @cached_property
    def unit_of(self) -> dict[int, int]:
        """The unit of each node that is one."""
        return {k: unit for unit, k in enumerate(self.nodes) if k >= 0}

    @cached_property
    def producer(self) -> dict[int, int]:
        """The unit that makes each storage."""
        return {s: unit for unit, storages in enumerate(self.fresh) for s in storages}

    @cached_property
    def _views_of(self) -> tuple[frozenset[int], ...]:
        """All views of what each unit makes."""
        nodes, users = self.graph.nodes, self.graph.users
        result = []
        for k in self.nodes:
            found, todo = set[int](), list(self.graph.tangents if k < 0 else (k,))
            while todo:
                views = [user for user in users[todo.pop()] if nodes[user].kind is Kind.VIEW and user not in found]
                found.update(views)
                todo += views
            result.append(frozenset(found))
        return tuple(result)

    @cached_property
    def _gradients_of(self) -> dict[int, tuple[int, ...]]:
        """Gradients of inputs that are views of what each unit makes."""
        found: dict[int, tuple[int, ...]] = {}
        for gradient in self.graph.final_gradients:
            node = self.graph.nodes[gradient]
            makers = {self.producer.get(s, -1) for s in node.storages}
            if node.kind is Kind.VIEW and len(makers) == 1 and (unit := makers.pop()) >= 0:
                found[unit] = (*found.get(unit, ()), gradient)
        return found

    @cached_property
    def outputs(self) -> frozenset[int]:
        """Storages of the forward's outputs: they stay."""
        return self.needs[self.turn]

    def units(self, program: Program) -> list[int]:
        """A program as an order of units."""
        order = program.order
        before = [self.unit_of[k] for k in order[: program.forward_steps] if k in self.unit_of]
        after = [self.unit_of[k] for k in order[program.forward_steps :] if k in self.unit_of]
        return [*before, self.turn, *after]

    def program(self, units: Sequence[int]) -> Program:
        """An order of units as a program: each after the views that it reads, before what is taken out of it."""
        graph, order, steps = self.graph, list[int](), 0
        made: set[int] = set()  # views that live in the newest memory of what they view
        ran: set[int] = set()
        final = {unit: place for place, unit in enumerate(units)}

        def view(targets: Iterable[int]) -> None:
            found = [k for k in self.views(targets) if k not in made]
            order.extend(found)
            made.update(found)

        for place, unit in enumerate(units):
            node = self.nodes[unit]
            view(graph.outputs if node < 0 else graph.nodes[node].inputs)
            if node < 0:
                steps = len(order)
            else:
                order.append(node)
                order += self._taken_out(node, again=node in ran)
                ran.add(node)
                made -= self._views_of[unit]
            if final[unit] == place:
                view(self._gradients_of.get(unit, ()))
        view(graph.final_gradients)
        return without_dead(graph, Program(tuple(order), steps))

    def _taken_out(self, node: int, *, again: bool) -> list[int]:
        """What is taken out of a result. What of it is returned, the first run has given: statistics of batch norm."""
        nodes = self.graph.nodes
        found = [user for user in self.graph.users[node] if nodes[user].projection]
        return [k for k in found if not (again and nodes[k].storages and self.outputs.issuperset(nodes[k].storages))]

    def views(self, targets: Iterable[int]) -> list[int]:
        """The views that have to be made for some values, in order; what is taken out of a result follows that."""
        graph = self.graph
        found: set[int] = set()
        todo = list(targets)
        while todo:
            k = todo.pop()
            node = graph.nodes[k]
            taken_out = node.projection and graph.nodes[node.inputs[0]].kind is not Kind.VIEW
            if node.kind is Kind.VIEW and not taken_out and k not in found:
                found.add(k)
                todo += node.inputs
        return sorted(found)
