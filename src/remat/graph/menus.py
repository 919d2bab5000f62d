"""What a segment may keep for its backward: from all that it needs to nothing, each with its bytes and seconds.

A segment is taken out of the graph as a small graph of its own, in which equal layers are equal, so that each kind of
layer is looked at once. Entries come from a descent: beginning with everything the backward reads, the value is given
up that costs the fewest seconds of recomputation per byte, alone or in exchange for a smaller one that it can be made
from. So cheap results go first (Chen's *drop cheap*), products last, and every entry lies near the frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ..chains import Stage, Tape
from .graphs import Graph, Kind, Node, Program, Storage
from .liveness import liveness, without_dead
from .programs import Emitter
from .segments import Segments, root_bytes, roots

_ENTRIES: Final = 8
_CANDIDATES: Final = 32  # values that may be kept; the smallest are not given up where there are more
_STEP: Final = 1e-9  # seconds: so that of two values that cost nothing to make the larger goes first


@dataclass(frozen=True)
class Piece:
    """A segment as a graph of its own.

    Attributes:
        graph: the carry and what else comes from outside are its inputs, adjoints from later segments its tangents.
        nodes: for each of its nodes, the node of the whole graph; -1 for what stands for nothing there.
        forward: its forward nodes, in order.
        backward: its backward nodes, in order.
        entering: the inputs that are the carry.
    """

    graph: Graph
    nodes: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    entering: frozenset[int]


def piece(segments: Segments, stage: int) -> Piece:
    """Segment `stage` by itself. Equal segments give equal graphs."""
    whole = segments.graph
    inside = set(segments.forward[stage]) | set(segments.backward[stage])
    helpers, outside = _surroundings(segments, inside)
    inside |= helpers
    order = [*sorted(outside), *sorted(inside)]
    index = {old: new for new, old in enumerate(order)}
    numbers: dict[int, int] = {}
    storages: list[Storage] = []

    def renumber(found: tuple[int, ...], *, external: bool) -> tuple[int, ...]:
        for s in found:
            if s not in numbers:
                numbers[s] = len(storages)
                known = whole.storages[s]
                storages.append(Storage(0 if known.external else known.bytes, external or known.external))
        return tuple(numbers[s] for s in found)

    nodes: list[Node] = []
    for old in order:
        node = whole.nodes[old]
        if old in outside:
            own = renumber(node.storages, external=old not in whole.backward)
            nodes.append(Node("", "", Kind.INPUT, storages=own))
            continue
        nodes.append(
            msgspec.structs.replace(
                node,
                name="",
                inputs=tuple(index[s] for s in node.inputs),
                storages=renumber(node.storages, external=False),
                fresh=renumber(node.fresh, external=False),
                writes=(),
            )
        )
    leaving = segments.carries[stage + 1] | segments.kept | set(whole.outputs)
    outputs = tuple(index[k] for k in segments.forward[stage] if k in leaving)
    gradients, parameters = _gradients(segments, stage, index)
    dummies = tuple(range(len(nodes), len(nodes) + len(gradients)))
    nodes += [Node("", "", Kind.INPUT)] * len(gradients)
    graph = Graph(
        tuple(nodes),
        tuple(storages),
        dummies,
        tuple(index[k] for k in sorted(outside & whole.backward)),
        outputs,
        gradients,
        frozenset(dummy for dummy, mine in zip(dummies, parameters, strict=True) if mine),
    )
    return Piece(
        graph,
        (*order, *[-1] * len(gradients)),
        tuple(index[k] for k in segments.forward[stage]),
        tuple(index[k] for k in segments.backward[stage]),
        frozenset(index[k] for k in outside & segments.carries[stage]),
    )


def _surroundings(segments: Segments, inside: set[int]) -> tuple[set[int], set[int]]:
    """Nodes that are run only for these (transposed weights and the like), and what comes from elsewhere."""
    whole, helpers, outside = segments.graph, set[int](), set[int]()
    todo = list(inside)
    while todo:
        for source in whole.nodes[todo.pop()].inputs:
            if source in inside or source in helpers:
                continue
            elsewhere = source in segments.stage_of or source in whole.backward
            if elsewhere or whole.nodes[source].kind is Kind.INPUT:
                outside.add(source)
                continue
            helpers.add(source)
            todo.append(source)
    return helpers, outside


def _gradients(segments: Segments, stage: int, index: dict[int, int]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Backward values that leave: to earlier segments, and as gradients; whether they go to `.grad`."""
    whole, mine = segments.graph, set(segments.backward[stage])
    found: dict[int, bool] = {}
    for k in segments.backward[stage]:
        if any(user not in mine and user in whole.backward for user in whole.users[k]):
            found[index[k]] = False
        if k in whole.final_gradients:
            found[index[k]] = found.get(index[k], True) and whole.final_gradients[k]
    return tuple(found), tuple(found.values())


@dataclass(frozen=True)
class Menu:
    """What a segment costs, and what each of its entries keeps.

    Attributes:
        stage: the costs.
        tapes: for each entry the nodes of the piece's graph that are kept, those of the entering carry included.
    """

    stage: Stage
    tapes: tuple[frozenset[int], ...]


def menu(of: Piece, carry_bytes: int, *, gradients_exist: bool) -> Menu:
    """The segment as a stage of a chain."""
    chooser = _Chooser(of)
    leaving = frozenset(of.graph.outputs)
    entries, tapes = [], []
    for kept in chooser.entries():
        entries.append(_tape(of, chooser, kept, leaving, gradients_exist=gradients_exist))
        tapes.append(kept | chooser.read_of_carry(kept))
    plain_s = sum(of.graph.nodes[k].seconds for k in of.graph.needed_for(of.graph.outputs))
    stays = [g for g, mine in of.graph.final_gradients.items() if mine and not gradients_exist]
    stage = Stage(
        carry_bytes,
        tuple(entries),
        plain_s,
        max(entry.workspace_bytes for entry in entries[-1:]),
        root_bytes(of.graph, stays),
    )
    return Menu(stage, tuple(tapes))


def _tape(
    of: Piece, chooser: _Chooser, kept: frozenset[int], leaving: frozenset[int], *, gradients_exist: bool
) -> Tape:
    """An entry's costs, from the exact bytes of the segment by itself, recorded this way and run backward at once."""
    graph = of.graph
    program = chooser.program(kept)
    bytes_over_time = liveness(graph, program, gradients_exist=gradients_exist)
    steps = program.forward_steps
    leaving_bytes = root_bytes(graph, leaving)
    after_forward = bytes_over_time.after[steps - 1] if steps else 0
    tape_bytes = root_bytes(graph, kept - leaving)
    adjoint_bytes = root_bytes(graph, graph.tangents)
    forward_peak = max(bytes_over_time.during[:steps], default=0)
    backward_peak = max(bytes_over_time.during[steps:], default=0)
    forward_s = sum(graph.nodes[k].seconds for k in program.order[:steps])
    return Tape(
        tape_bytes,
        entering_bytes=root_bytes_external(graph, chooser.read_of_carry(kept)),
        leaving_bytes=root_bytes(graph, kept & leaving),
        forward_s=forward_s,
        backward_s=sum(graph.nodes[k].seconds for k in program.order[steps:]),
        workspace_bytes=max(0, forward_peak - tape_bytes - leaving_bytes),
        backward_workspace_bytes=max(0, backward_peak - after_forward - adjoint_bytes),
        name=f"{len(kept)} of {len(chooser.everything)} values",
    )


def root_bytes_external(graph: Graph, nodes: frozenset[int]) -> int:
    """Bytes of the storages of these inputs, which the segment does not own."""
    return sum(graph.storages[s].bytes for s in {s for k in nodes for s in graph.nodes[k].storages})


class _Chooser:
    """The descent from everything to nothing."""

    def __init__(self, of: Piece) -> None:
        self.piece = of
        self.graph = of.graph
        self.roots = roots(of.graph)
        self.own = set(of.forward)
        backward = set(of.backward)
        self.targets = tuple(
            dict.fromkeys(s for k in of.backward for s in of.graph.nodes[k].inputs if s not in backward)
        )
        self.base = Emitter(of.graph).at_hand
        self.must = frozenset(k for k in of.forward if not of.graph.nodes[k].kind.repeatable)
        direct = {root for target in self.targets for root in self.roots[target]} & self.own
        self.everything = frozenset(direct | self._pinned())
        self.candidates = self._candidates()

    def _pinned(self) -> frozenset[int]:
        """What may not be made again and is needed when nothing is kept."""
        found: set[int] = set()
        for index in self.missing(frozenset()):
            node = self.graph.nodes[index]
            if index in self.must or (node.projection and node.inputs[0] in self.must):
                found.add(index)
        return frozenset(k for k in found if k in self.own and self.graph.nodes[k].storages)

    def _candidates(self) -> tuple[int, ...]:
        tuples = {self.graph.nodes[k].inputs[0] for k in self.own if self.graph.nodes[k].projection}
        found = [
            k
            for k in self.missing(frozenset())
            if k in self.own and k not in tuples and self.roots[k] == (k,) and root_bytes(self.graph, (k,))
        ]
        return tuple(sorted(found, key=lambda k: -root_bytes(self.graph, (k,)))[:_CANDIDATES])

    def missing(self, kept: frozenset[int]) -> list[int]:
        """What has to run again if these are kept."""
        emitter = Emitter.__new__(Emitter)
        emitter.graph = self.graph
        emitter.at_hand = self.base | kept
        return emitter.missing(self.targets)

    def seconds(self, kept: frozenset[int]) -> float:
        again = self.missing(kept)
        pinned = any(k in self.must for k in again)
        return float("inf") if pinned else sum(self.graph.nodes[k].seconds for k in again)

    def bytes(self, kept: frozenset[int]) -> int:
        return root_bytes(self.graph, kept)

    def read_of_carry(self, kept: frozenset[int]) -> frozenset[int]:
        """The inputs of the entering carry that the backward, or what runs again for it, reads."""
        readers = [*self.piece.backward, *self.missing(kept)]
        return frozenset(s for k in readers for s in self.graph.nodes[k].inputs) & self.piece.entering

    def entries(self) -> list[frozenset[int]]:
        """Sets to keep, the largest first: evenly spread over the descent, both ends included."""
        path = [self.everything]
        while True:
            following = self._step(path[-1])
            if following is None:
                break
            path.append(following)
        distinct = [a for a, b in zip(path, [*path[1:], None], strict=True) if b is None or self._differ(a, b)]
        if len(distinct) <= _ENTRIES:
            return distinct
        return _spread(distinct, [self.bytes(kept) for kept in distinct])

    def _differ(self, a: frozenset[int], b: frozenset[int]) -> bool:
        return self.bytes(a) != self.bytes(b) and self.seconds(a) + _STEP < self.seconds(b)

    def _step(self, kept: frozenset[int]) -> frozenset[int] | None:
        now_s, now_bytes = self.seconds(kept), self.bytes(kept)
        best: tuple[float, int, frozenset[int]] | None = None
        for gone in kept:
            without = kept - {gone}
            for other in (None, *self.candidates):
                if other is not None and (other in kept or not self._smaller(other, gone)):
                    continue
                trial = without if other is None else without | {other}
                spared = now_bytes - self.bytes(trial)
                if spared <= 0:
                    continue
                price = (self.seconds(trial) - now_s + _STEP) / spared
                if price < float("inf") and (best is None or (price, -spared) < best[:2]):
                    best = (price, -spared, trial)
        return None if best is None else best[2]

    def _smaller(self, one: int, other: int) -> bool:
        return root_bytes(self.graph, (one,)) < root_bytes(self.graph, (other,))

    def program(self, kept: frozenset[int]) -> Program:
        """The segment recorded so and run backward at once."""
        emitter = Emitter(self.graph)
        for k in self.piece.forward:
            if k not in emitter.executed:
                emitter.run(k)
        steps = len(emitter.order)
        emitter.at_hand = {
            k for k in emitter.at_hand if k in self.base or all(r in kept or r in self.base for r in self.roots[k])
        }
        for k in self.piece.backward:
            emitter.run(k)
        return without_dead(self.graph, Program(tuple(emitter.order), steps))


def _spread(path: Sequence[frozenset[int]], sizes: Sequence[int]) -> list[frozenset[int]]:
    """So many of them that neighbours lie evenly apart in bytes, both ends included."""
    wanted = [sizes[0] + (sizes[-1] - sizes[0]) * k / (_ENTRIES - 1) for k in range(_ENTRIES)]
    chosen = {min(range(len(path)), key=lambda k: abs(sizes[k] - want)) for want in wanted}
    return [path[k] for k in sorted(chosen | {0, len(path) - 1})]
