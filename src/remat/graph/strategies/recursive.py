"""Chen et al. 2016, section 4.3: segments of segments. Memory g(n) = k + g(n / (k+1)), with k = 1 of order log n.

The forward keeps what crosses the k cuts of the whole. When the backward needs something of a segment, the segment is
run from its border, keeping what crosses its own k cuts, and so on down to pieces that no candidate cuts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..cuts import Forward
from ..graphs import Graph, Program
from ..replay import Replay
from .sqrt import every


def plan(graph: Graph, cuts: int = 1) -> Program:
    """Recursion with so many cuts a level."""
    forward = Forward.of(graph)
    top = _inside(forward, 0, len(forward.steps), cuts)
    kept = frozenset().union(*map(forward.crossing, top))
    return _Recursion(forward, kept, cuts).finish()


def _inside(forward: Forward, start: int, stop: int, cuts: int) -> tuple[int, ...]:
    """Where to cut the segment of positions start … stop−1."""
    candidates = forward.candidates
    inner = candidates[bisect_right(candidates, start) : bisect_left(candidates, stop)]
    return every(inner, min(cuts, len(inner)) + 1)


class _Recursion(Replay):
    """Makes a missing value available by going down to its piece, level by level."""

    def __init__(self, forward: Forward, kept: frozenset[int], cuts: int) -> None:
        super().__init__(forward, kept)
        self.cuts = cuts
        self._targets: dict[int, frozenset[int]] = {}

    def provide(self, targets: Sequence[int]) -> None:
        """Latest first: what an earlier one needs is on the way to it."""
        position = self.forward.position
        for target in sorted(targets, reverse=True):
            inside = [position[k] for k in self.missing([target]) if k in position]
            if inside:
                self._descend(max(inside))
            super().provide([target])

    def _descend(self, place: int) -> None:
        """Keep what crosses the cuts on the way to a position, on all levels."""
        start, stop = 0, len(self.forward.steps)
        while cuts := _inside(self.forward, start, stop, self.cuts):
            before = [cut for cut in cuts if cut <= place]
            for cut in before:
                self._run_to(cut)
            start, stop = max((start, *before)), min((stop, *(cut for cut in cuts if cut > place)))

    def _run_to(self, cut: int) -> None:
        """Make what crosses the cut available, and nothing else."""
        targets = self._crossing(cut)
        run = self.missing(targets)
        self.run(run)
        self.forget(set(run) - targets)

    def _crossing(self, cut: int) -> frozenset[int]:
        """The values that live in what crosses a cut."""
        if cut not in self._targets:
            forward, nodes = self.forward, self.graph.nodes
            crossing = forward.crossing(cut) | self.kept
            self._targets[cut] = frozenset(
                k for k in forward.steps[:cut] if nodes[k].storages and crossing.issuperset(nodes[k].storages)
            )
        return self._targets[cut]
