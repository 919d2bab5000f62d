"""What is kept, as a program: the forward once, then the backward, each of its nodes after what it needs is back.

Chen et al. 2016, algorithms 1 and 2, run a *mirror* of every dropped node in the backward. Here the mirror is run right
before the first node that reads it, and together with the others that it needs and that are not there, in the order of
the graph; when it is freed is left to its last use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .cuts import Forward
from .graphs import Graph, Kind, Program


def pinned(forward: Forward) -> frozenset[int]:
    """Storages that are kept whatever is dropped: outputs, and what no second execution may make."""
    graph = forward.graph
    nodes = (*graph.outputs, *(k for k in forward.steps if not graph.nodes[k].kind.repeatable))
    return frozenset(s for k in nodes for s in graph.nodes[k].storages)


class Replay:
    """A program while it is built. A value is *available* if a later step can still read it.

    Args:
        forward: the forward, run once at the start.
        kept: storages that stay from the forward to their last use in the backward; `pinned` ones always do.
    """

    def __init__(self, forward: Forward, kept: Collection[int]) -> None:
        self.forward = forward
        self.graph: Graph = forward.graph
        self.order: list[int] = list(forward.steps)
        self.kept = frozenset(kept) | pinned(forward)
        self.available = {k for k, node in enumerate(self.graph.nodes) if node.kind is Kind.INPUT}
        self.available.update(k for k in forward.steps if self.is_kept(k))

    def is_kept(self, node: int) -> bool:
        """Whether all that a value of the forward lives in is kept."""
        storages, nodes = self.graph.storages, self.graph.nodes
        return all(s in self.kept or storages[s].external for s in nodes[node].storages)

    def missing(self, targets: Iterable[int]) -> list[int]:
        """What has to run for `targets` to be available, themselves included, in order."""
        todo = [k for k in targets if k not in self.available]
        found = set(todo)
        while todo:
            for source in self.graph.nodes[todo.pop()].inputs:
                if source not in self.available and source not in found:
                    found.add(source)
                    todo.append(source)
        return sorted(found)

    def run(self, nodes: Iterable[int]) -> None:
        """Append executions; what they make is available from then on."""
        for k in nodes:
            self.order.append(k)
            self.available.add(k)

    def forget(self, nodes: Iterable[int]) -> None:
        """Values that are to be made anew if they are needed again."""
        self.available.difference_update(nodes)

    def provide(self, targets: Sequence[int]) -> None:
        """Make `targets` available."""
        self.run(self.missing(targets))

    def finish(self) -> Program:
        """Append the backward, and hand out the program."""
        graph, forward = self.graph, self.forward.position
        steps = len(self.order)
        for k in graph.needed_for(tuple(graph.final_gradients)):
            is_gradient = k in graph.backward or k in graph.final_gradients
            if k in self.available or k in forward or not is_gradient:
                continue
            self.provide(graph.nodes[k].inputs)
            self.run([k])
        return Program(tuple(self.order), steps)


def replayed(forward: Forward, kept: Collection[int]) -> Program:
    """The program that keeps these storages, and runs again once whatever else the backward needs."""
    return Replay(forward, kept).finish()
