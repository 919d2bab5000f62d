"""The forward of a graph as a chain: what crosses each of its positions, and where little does.

Position p lies before the p-th step of the forward. What crosses it are the storages that steps before it have made and
steps from it on still read; outputs that are finished do not cross, although they stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from .graphs import Graph, Kind


@dataclass(frozen=True)
class Forward:
    """The forward as positions.

    Attributes:
        graph: whose.
        steps: its nodes in order, with the projections that the backward needs directly after what they are taken from.
    """

    graph: Graph
    steps: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph) -> Forward:
        """The forward of a graph."""
        forward = set(graph.forward)
        for k in graph.needed_for(tuple(graph.final_gradients)):
            node = graph.nodes[k]
            if node.projection and node.inputs[0] in forward:
                forward.add(k)
        return cls(graph, tuple(sorted(forward)))

    @cached_property
    def position(self) -> dict[int, int]:
        """Of every node of the forward."""
        return {node: place for place, node in enumerate(self.steps)}

    @cached_property
    def born(self) -> dict[int, int]:
        """The position at which each storage of the forward is made."""
        return {storage: place for place, node in enumerate(self.steps) for storage in self.graph.nodes[node].fresh}

    @cached_property
    def last_read(self) -> dict[int, int]:
        """The last position that reads each storage in the forward, itself or through a view."""
        return {
            storage: place
            for place, node in enumerate(self.steps)
            for source in self.graph.nodes[node].inputs
            for storage in self.graph.nodes[source].storages
            if storage in self.born
        }

    def crossing(self, position: int) -> frozenset[int]:
        """The storages that cross a position."""
        return frozenset(s for s, last in self.last_read.items() if self.born[s] < position <= last)

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """Bytes that cross each position, 0 … number of steps."""
        change = [0] * (len(self.steps) + 2)
        for storage, last in self.last_read.items():
            change[self.born[storage] + 1] += self.graph.storages[storage].bytes
            change[last + 1] -= self.graph.storages[storage].bytes
        total, result = 0, []
        for step in change[: len(self.steps) + 1]:
            total += step
            result.append(total)
        return tuple(result)

    @cached_property
    def background(self) -> frozenset[int]:
        """Storages that cross more than half of all positions, such as a mask that every layer reads."""
        half = len(self.steps) / 2
        return frozenset(s for s, last in self.last_read.items() if last - self.born[s] > half)

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Positions where cutting is cheap.

        Those that a single storage crosses, as in Chen et al., and those where less crosses than before and after, as
        between the steps of a recurrent network, which has no articulation points. The background does not count.
        """
        single = [0] * (len(self.steps) + 2)
        for storage in self.last_read.keys() - self.background:
            single[self.born[storage] + 1] += 1
            single[self.last_read[storage] + 1] -= 1
        found = {place for place, count in enumerate(accumulate(single)) if count <= 1}
        place, before = 0, -1
        runs = [(size, len(list(equal))) for size, equal in groupby(self.crossing_bytes)]
        for number, (size, count) in enumerate(runs):
            after = runs[number + 1][0] if number + 1 < len(runs) else -1
            if before > size < after:
                found.add(place)
            place, before = place + count, size
        return tuple(self._working(sorted(p for p in found if 0 < p < len(self.steps))))

    def _working(self, positions: Iterable[int]) -> Iterable[int]:
        """Those with a step that takes time between each and the one before."""
        since = 0
        for position in positions:
            if any(self.graph.nodes[k].kind is not Kind.VIEW for k in self.steps[since:position]):
                yield position
                since = position
