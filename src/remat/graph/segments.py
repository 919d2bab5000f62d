"""The forward as a chain of segments, cut where little is alive, and the backward nodes that belong to each.

Between any two forward nodes some bytes cross: what was made before and is used by a later forward node. Cuts are taken
where few bytes cross, a minimum distance apart, so that residual networks are cut at their residual stream, and what
crosses is the *carry*. What crosses many cuts and is small (a mask, a table of positions) is kept throughout instead.

A value's *root* is the node that made its memory: views are free to make again and live in their root.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from .graphs import Graph, Kind

_STAGES: Final = 64  # about so many at most: the planner's time grows with the square
_KEPT_SHARE: Final = 0.005  # of all forward bytes: what is smaller and crosses many cuts is kept throughout
_MANY_CUTS: Final = 4


@dataclass(frozen=True)
class Segments:
    """A chain of segments over a graph.

    Attributes:
        graph: what was cut.
        forward: for each segment its forward nodes, in order.
        backward: for each segment the backward nodes that its tape serves, in the graph's order.
        carries: for each segment, and at the end, the roots that enter it from the segments before.
        kept: roots that stay alive from where they are made to the end.
        stage_of: the segment in which a forward node runs.
    """

    graph: Graph
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    carries: tuple[frozenset[int], ...]
    kept: frozenset[int]
    stage_of: dict[int, int]

    @property
    def segment_of(self) -> dict[int, int]:
        """The segment of every node that has one, forward or backward."""
        return self.stage_of | {k: number for number, part in enumerate(self.backward) for k in part}


def roots(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each node, the nodes that made the memory its value lives in; itself if it allocates, or takes no memory."""
    found: list[tuple[int, ...]] = []
    for index, node in enumerate(graph.nodes):
        if node.kind is not Kind.VIEW or node.projection or not node.storages:
            found.append((index,))
            continue
        mine = set(node.storages)
        sources = [s for s in node.inputs if mine & set(graph.nodes[s].storages)]
        found.append(tuple(dict.fromkeys(root for s in sources for root in found[s])) or (index,))
    return tuple(found)


def root_bytes(graph: Graph, nodes: Iterable[int]) -> int:
    """Bytes of the storages that some roots live in, each counted once, external ones not at all."""
    storages = {s for k in nodes for s in graph.nodes[k].storages}
    return sum(graph.storages[s].bytes for s in storages if not graph.storages[s].external)


def segment(graph: Graph, stages: int = _STAGES) -> Segments:
    """Cut the forward into at most about `stages` segments."""
    forward = graph.forward
    of = roots(graph)
    crossing = _crossing(graph, forward, of)
    sizes = [root_bytes(graph, roots_across) for roots_across in crossing]
    fresh = [sum(graph.storages[s].bytes for s in graph.nodes[k].fresh) for k in forward]
    cuts = _cuts(sizes, fresh, stages)
    carries, kept = _carries(graph, [crossing[c - 1] for c in cuts], max(sum(fresh), 1))
    bounds = [0, *cuts, len(forward)]
    parts = tuple(tuple(forward[a:b]) for a, b in pairwise(bounds))
    stage_of = {k: number for number, part in enumerate(parts) for k in part}
    backward = _backward(graph, stage_of, of, carries, kept, len(parts))
    return Segments(graph, parts, backward, (frozenset(), *carries, frozenset()), kept, stage_of)


def summed(segments: Segments) -> dict[int, int]:
    """Gradients of parameters that add up over several segments, each with the segment that completes it.

    Their sums so far, as large as they are themselves, cross from segment to segment.
    """
    graph, place = segments.graph, {k: number for number, part in enumerate(segments.backward) for k in part}
    of = roots(graph)
    found: dict[int, int] = {}
    for gradient, mine in graph.final_gradients.items():
        for root in of[gradient] if mine else ():
            before = [made for source in graph.nodes[root].inputs for made in of[source] if made in place]
            size = root_bytes(graph, (root,))
            if any(place[made] > place.get(root, 0) and root_bytes(graph, (made,)) == size for made in before):
                found[gradient] = place.get(root, 0)
    return found


def _crossing(graph: Graph, forward: Sequence[int], of: Sequence[tuple[int, ...]]) -> list[frozenset[int]]:
    """For each place behind a forward node, the roots made up to there that later forward nodes use."""
    place = {k: p for p, k in enumerate(forward)}
    last: dict[int, int] = {}
    for k in forward:
        for source in graph.nodes[k].inputs:
            for root in of[source]:
                if root in place:
                    last[root] = max(last.get(root, 0), place[k])
    ends: dict[int, list[int]] = {}
    for root, end in last.items():
        ends.setdefault(end, []).append(root)
    alive: set[int] = set()
    found: list[frozenset[int]] = []
    for p, k in enumerate(forward):
        if last.get(k, -1) > p:
            alive.add(k)
        alive.difference_update(ends.get(p, ()))
        found.append(frozenset(alive))
    return found


def _cuts(sizes: Sequence[int], fresh: Sequence[int], stages: int) -> list[int]:
    """Places (number of forward nodes before them) in order, the cheapest first taken, none too near another."""
    along = list(accumulate(fresh))  # bytes made up to each place: the measure of distance
    if not along:
        return []
    apart = along[-1] / stages
    taken: list[int] = []
    for place in sorted(range(len(sizes) - 1), key=lambda p: (sizes[p], p)):
        spot = bisect_right(taken, place)
        if spot and along[place] - along[taken[spot - 1]] < apart:
            continue
        if spot < len(taken) and along[taken[spot]] - along[place] < apart:
            continue
        if along[place] >= apart / 2 and along[-1] - along[place] >= apart / 2:
            taken.insert(spot, place)
    return [place + 1 for place in _worthwhile(taken, sizes, along)]


def _worthwhile(taken: list[int], sizes: Sequence[int], along: Sequence[int]) -> list[int]:
    """Without cuts that as many bytes cross as are made between their neighbours: storing there spares nothing."""
    kept = list(taken)
    for place in sorted(taken, key=lambda p: -sizes[p]):
        spot = kept.index(place)
        before = along[kept[spot - 1]] if spot else 0
        after = along[kept[spot + 1]] if spot + 1 < len(kept) else along[-1]
        if 4 * sizes[place] > after - before:
            kept.remove(place)
    return kept


def _carries(graph: Graph, crossing: list[frozenset[int]], total: int) -> tuple[list[frozenset[int]], frozenset[int]]:
    count: dict[int, int] = {}
    for across in crossing:
        for root in across:
            count[root] = count.get(root, 0) + 1
    kept = frozenset(
        root for root, n in count.items() if n >= _MANY_CUTS and root_bytes(graph, (root,)) <= _KEPT_SHARE * total
    )
    return [across - kept for across in crossing], kept


def _backward(
    graph: Graph,
    stage_of: dict[int, int],
    of: Sequence[tuple[int, ...]],
    carries: Sequence[frozenset[int]],
    kept: frozenset[int],
    stages: int,
) -> tuple[tuple[int, ...], ...]:
    """A backward node runs where the values that it reads are at hand: in their segment, or in those they cross to.

    Of these segments it belongs to the last, for there it runs first, but to none after what it is made from, nor
    before what needs it. Only who needs whom counts, not the order in which the graph has them: there segments
    interleave, and a node would have its own segment run again in the midst of a later one. What draws or has effects
    keeps its order.
    """
    until = {root: number + 1 for number, across in enumerate(carries) for root in across}
    needed = [k for k in graph.needed_for(tuple(graph.final_gradients)) if k in graph.backward]
    reads = [read - kept for read in _reads(graph, stage_of, of)]
    least: dict[int, int] = {}
    ordered = 0
    for k in reversed(needed):
        least[k] = max([0, *(stage_of[root] for root in reads[k]), *(least[u] for u in graph.users[k] if u in least)])
        if _keeps_order(graph, k):
            least[k] = ordered = max(least[k], ordered)
    part_of: dict[int, int] = {}
    parts: list[list[int]] = [[] for _ in range(stages)]
    for k in needed:
        last = [until.get(root, stage_of[root]) for root in reads[k]]
        last += [part_of[source] for source in graph.nodes[k].inputs if source in part_of]
        part_of[k] = least[k] if _keeps_order(graph, k) else max(least[k], min(last, default=0))
        parts[part_of[k]].append(k)
    return tuple(map(tuple, parts))


def _reads(graph: Graph, stage_of: dict[int, int], of: Sequence[tuple[int, ...]]) -> list[frozenset[int]]:
    """For each node the roots of the forward that it reads, itself or through what is made for the backward only.

    That is what depends on no tangent and no output needs, such as the derivative of a `tanh` at its result.
    """
    found: list[frozenset[int]] = []
    for node in graph.nodes:
        read: set[int] = set()
        for source in node.inputs:
            if source in graph.backward:
                continue
            inside = [root for root in of[source] if root in stage_of]
            read.update(inside or (() if source in stage_of else found[source]))
        found.append(frozenset(read))
    return found


def _keeps_order(graph: Graph, node: int) -> bool:
    found = graph.nodes[node].kind
    return found is Kind.RANDOM or not found.repeatable
