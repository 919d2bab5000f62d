"""Chen et al. 2016, section 4.2: √n segments of equally many layers; only what crosses their borders is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isqrt

from ..cuts import Forward
from ..graphs import Graph, Program
from ..replay import replayed


def plan(graph: Graph) -> Program:
    """Cut into √n segments, where n is how many pieces the forward could be cut into at most."""
    forward = Forward.of(graph)
    return replayed(forward, kept_of(forward, every(forward.candidates, isqrt(len(forward.candidates) + 1))))


def every(candidates: Sequence[int], segments: int) -> tuple[int, ...]:
    """Cuts that make so many segments of about equally many pieces."""
    pieces = len(candidates) + 1
    places = (round(k * pieces / segments) for k in range(1, segments))
    return tuple(sorted({candidates[place - 1] for place in places if place}))


def kept_of(forward: Forward, cuts: Iterable[int]) -> frozenset[int]:
    """What crosses the cuts, and all of the last segment, whose backward begins at once."""
    cuts = tuple(cuts)
    last = {s for k in forward.steps[max(cuts, default=0) :] for s in forward.graph.nodes[k].fresh}
    return frozenset(last.union(*map(forward.crossing, cuts)))
