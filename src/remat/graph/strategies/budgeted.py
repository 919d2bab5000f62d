"""Chen et al. 2016, algorithm 3: segments of about b bytes, and the search over b.

The algorithm walks along the forward, adds up what its results take, and cuts at the next candidate once the sum
exceeds b. It estimates the cost of its plan as x + y, where x is what the cuts keep and y the largest segment. A first
b gives B = √(x·y); the authors then search between B/√2 and √2·B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Final

from ..cuts import Forward
from ..graphs import Graph, Program
from ..replay import replayed
from .sqrt import kept_of

_TRIED: Final = 12  # budgets between B/√2 and √2·B, in equal ratios


@dataclass(frozen=True, slots=True)
class Segments:
    """A plan of the algorithm.

    Attributes:
        cuts: positions of the forward.
        kept_bytes: the algorithm's x, what crosses the cuts.
        largest_bytes: its y, the results of the largest segment.
    """

    cuts: tuple[int, ...]
    kept_bytes: int
    largest_bytes: int

    @property
    def estimate_bytes(self) -> int:
        """What the authors take the plan to cost."""
        return self.kept_bytes + self.largest_bytes


def plan(graph: Graph) -> Program:
    """The plan with the smallest estimate."""
    forward = Forward.of(graph)
    return replayed(forward, kept_of(forward, search(forward).cuts))


def search(forward: Forward) -> Segments:
    """The best plan over several b."""
    results = sum(forward.graph.storages[s].bytes for s in forward.born)
    first = segments(forward, results // max(1, isqrt(len(forward.candidates) + 1)))
    return min((segments(forward, budget) for budget in (0, *_budgets(first))), key=lambda one: one.estimate_bytes)


def _budgets(first: Segments) -> Iterator[int]:
    middle = (first.kept_bytes * first.largest_bytes) ** 0.5
    for k in range(_TRIED + 1):
        yield int(middle * 2 ** (k / _TRIED - 0.5))


def segments(forward: Forward, budget_bytes: int) -> Segments:
    """Algorithm 3 itself: cut at the first candidate after the running sum has passed the budget."""
    graph, candidates = forward.graph, frozenset(forward.candidates)
    cuts: list[int] = []
    running = largest = 0
    kept: set[int] = set()
    for position, k in enumerate(forward.steps):
        if position in candidates and running > budget_bytes:
            cuts.append(position)
            kept |= forward.crossing(position)
            running = 0
        running += sum(graph.storages[s].bytes for s in graph.nodes[k].fresh)
        largest = max(largest, running)
    return Segments(tuple(cuts), sum(graph.storages[s].bytes for s in kept), largest)
