"""From a chain's schedule to a program: which node runs when, and what is made again right before it is used.

Actions of a schedule are about segments; a program is about nodes. What a schedule keeps (carries in slots, tapes by
their menu entry) stays *at hand*; everything else that a node needs is made again just before it, from what is at hand,
in the graph's own order. Executions that come out unused are left out at the end, so that running a segment again never
runs what only its leaving carry needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..schedules import Action, Advance, Backward, Drop, Load, Record, Store
from .graphs import Graph, Kind, Program
from .liveness import without_dead
from .segments import Segments, roots


class Emitter:
    """A program as it grows, and the nodes whose values are at hand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order: list[int] = []
        self.executed: set[int] = set()
        self.inputs = {k for k, node in enumerate(graph.nodes) if node.kind is Kind.INPUT}
        self.at_hand = set(self.inputs)
        self._projections = [
            tuple(user for user in graph.users[k] if graph.nodes[user].projection) for k in range(len(graph.nodes))
        ]

    def run(self, index: int) -> None:
        """Execute one node, and what is missing for it before."""
        for missing in self.missing(self.graph.nodes[index].inputs):
            self._execute(missing)
        self._execute(index)

    def ensure(self, targets: Iterable[int]) -> None:
        """Make values again until all of these are at hand."""
        for missing in self.missing(targets):
            self._execute(missing)

    def missing(self, targets: Iterable[int]) -> list[int]:
        """What has to run for these to be at hand, in the graph's order."""
        found: set[int] = set()
        todo = [k for k in targets if k not in self.at_hand]
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += [source for source in self.graph.nodes[index].inputs if source not in self.at_hand]
        return sorted(found)

    def _execute(self, index: int) -> None:
        if self.graph.nodes[index].projection and index in self.at_hand:
            return
        self.order.append(index)
        self.executed.add(index)
        if not self._projections[index]:
            self.at_hand.add(index)
        for projection in self._projections[index]:
            if projection not in self.at_hand:
                self.order.append(projection)
                self.executed.add(projection)
                self.at_hand.add(projection)


def program(segments: Segments, actions: Iterable[Action], tapes: Sequence[Sequence[frozenset[int]]]) -> Program:
    """The program that carries a schedule out.

    Args:
        segments: the chain's segments; stage k of the schedule is segment k.
        actions: the schedule.
        tapes: for each segment and entry, the roots that recording it keeps.
    """
    walk = _Walk(segments, tapes)
    for action in actions:
        walk.do(action)
    return walk.finish()


class _Walk:
    """What a schedule holds at a moment, and the program so far."""

    def __init__(self, segments: Segments, tapes: Sequence[Sequence[frozenset[int]]]) -> None:
        self.segments = segments
        self.tapes = tapes
        self.emitter = Emitter(segments.graph)
        self.roots = roots(segments.graph)
        nodes = segments.graph.nodes
        self.once = frozenset(k for k, node in enumerate(nodes) if not node.kind.repeatable)
        self.stays = self.once | segments.graph.backward | self.emitter.inputs
        self.slots: set[int] = set()
        self.recorded: dict[int, int] = {}  # segment -> entry
        self.ends: dict[int, int] = {}  # first segment of a recorded range -> the carry at its end
        self.live: int | None = 0
        self.forward_steps: int | None = None
        self.always = segments.kept | {root for o in segments.graph.outputs for root in self.roots[o]}

    def do(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._forward(start, stop)
            case Record(start, stop, entry):
                self.recorded.update(dict.fromkeys(range(start, stop), entry))
                self.ends[start] = stop
                self._forward(start, stop)
            case Store(at):
                self.slots.add(at)
            case Load(at):
                self.live = at
                self.emitter.ensure(self.segments.carries[at])
            case Drop(at):
                self.slots.discard(at)
            case Backward(start, stop):
                self._backward(start, stop)

    def _forward(self, start: int, stop: int) -> None:
        """Run segments up to `stop`: all of their nodes the first time, later what the newest carry and tapes need."""
        for stage in range(start, stop):
            fresh = [k for k in self.segments.forward[stage] if k not in self.emitter.executed]
            for k in fresh:
                if k not in self.emitter.executed:
                    self.emitter.run(k)
            keep = self.tapes[stage][self.recorded[stage]] if stage in self.recorded else frozenset()
            self.emitter.ensure((self.segments.carries[stage + 1] | keep) - self._gone())
            self.live = stage + 1
            self._forget()

    def _gone(self) -> frozenset[int]:
        """Values that may not be made again are at hand or never needed."""
        return self.once & self.emitter.executed

    def _backward(self, start: int, stop: int) -> None:
        if self.forward_steps is None:
            self.forward_steps = len(self.emitter.order)
        self.live = None
        self.ends.pop(start, None)
        for stage in reversed(range(start, stop)):
            for k in self.segments.backward[stage]:
                self.emitter.run(k)
            self.recorded.pop(stage, None)
            self._forget()

    def _forget(self) -> None:
        """Keep at hand what the schedule holds, views of it, and what belongs to the backward."""
        held = set(self.always)
        for at in (*self.slots, *self.ends.values(), *(() if self.live is None else (self.live,))):
            held |= self.segments.carries[at]
        for stage, entry in self.recorded.items():
            held |= self.tapes[stage][entry]
        held |= self.emitter.inputs
        at_hand = self.emitter.at_hand
        self.emitter.at_hand = {
            k for k in at_hand - self.stays if held.issuperset(self.roots[k])
        } | at_hand & self.stays

    def finish(self) -> Program:
        """What is left to do: gradients that need no tangent."""
        steps = len(self.emitter.order) if self.forward_steps is None else self.forward_steps
        for gradient in self.segments.graph.final_gradients:
            if gradient not in self.emitter.executed and gradient not in self.emitter.inputs:
                self.emitter.ensure((gradient,))
        return without_dead(self.segments.graph, Program(tuple(self.emitter.order), steps))
