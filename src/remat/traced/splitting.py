"""What is kept between a step's forward and its backward: ways of cutting the joint graph.

Everything that the backward needs and that does not depend on arriving gradients is a *forward value*. A tape keeps
some of them, and the backward computes the others from these again. Free are inputs, which stay anyway, and what is the
same in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import fx

from .graphs import ancestors, dependents, is_random, is_view, name_of, nbytes
from .tracing import Joint

_CHEAP: Final = frozenset(
    (
        "add", "sub", "rsub", "mul", "div", "neg", "sigmoid", "tanh", "relu", "exp", "log", "sqrt", "rsqrt",
        "abs", "sign", "square", "pow", "reciprocal", "where", "clamp", "clamp_min", "clamp_max", "maximum",
        "minimum", "gt", "ge", "lt", "le", "eq", "ne", "logical_not", "logical_and", "logical_or",
        "bitwise_and", "bitwise_or", "bitwise_not", "_to_copy", "sin", "cos", "erf", "gelu", "silu",
        "leaky_relu", "elu", "softplus", "cat", "stack", "clone", "fill", "full_like", "zeros_like",
        "ones_like", "zeros", "ones", "full", "scalar_tensor", "arange", "expm1", "log1p", "sigmoid_backward",
        "tanh_backward", "threshold_backward", "hardtanh", "addcmul", "addcdiv", "lerp", "floor",
        "hardtanh_backward", "gelu_backward", "silu_backward", "empty_like", "new_zeros", "new_ones", "isnan",
        "constant_pad_nd",
    )
)  # fmt: skip

_MUCH: Final = 2  # times


@dataclass(frozen=True)
class Entry:
    """One way to keep a step.

    Attributes:
        name: what people call it.
        carries: the leaves of the entering carry that are kept.
        saved: other values that are kept.
        leaving: the leaves among `carries` that are kept of the leaving carry too: the next step keeps them anyway.
    """

    name: str
    carries: tuple[int, ...]
    saved: tuple[fx.Node, ...]
    leaving: tuple[int, ...] = ()


class Parts:
    """The nodes of a joint graph by what they depend on.

    Attributes:
        invariant: the same in every step.
        backward: those that depend on arriving gradients.
        gradients: the nodes that a backward has to give.
        needed: forward values that the backward takes directly.
        free: values that are there anyway.
        leaving: leaves of the leaving carry that are computed in the step, by node: with a leaf of the entering carry
            that the backward asks for, they come at no cost.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        graph = joint.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        outside = {*joint.externals, *joint.constants}
        varying = dependents(graph, [node for node in placeholders if node not in outside])
        random = [node for node in graph.nodes if is_random(node)]
        varying |= dependents(graph, random)
        self.invariant = {node for node in graph.nodes if node.op != "output" and node not in varying}
        self.backward = dependents(graph, joint.tangents.values())
        self.free = self.invariant | set(joint.inputs.values())
        self.gradients = [
            *joint.carry_gradients.values(), *joint.input_gradients.values(), *joint.captured_gradients.values()
        ]  # fmt: skip
        reached = ancestors(self.gradients, stop=[n for n in graph.nodes if n not in self.backward])
        self.needed = [node for node in graph.nodes if node in reached and node not in self.backward]
        self.leaving: dict[fx.Node, int] = {}
        for place, node in joint.carries.items():
            after = joint.after[place]
            if node in self.needed and self.is_tape(after) and after.op == "call_function":
                self.leaving.setdefault(after, place)

    def is_tape(self, node: fx.Node) -> bool:
        """Whether keeping a node costs memory."""
        return node not in self.free and node not in self.backward and node.op != "output"


def entries(parts: Parts) -> list[Entry]:
    """The ways to keep a step: all that its backward asks for, and, where that is less, what this can be made of."""
    whole = _entry(parts, "whole", _whole(parts))
    lean = _entry(parts, "lean", _least(parts, _cheap))
    return [whole] if size_of(parts, lean) >= size_of(parts, whole) else [whole, lean]


def bare_entry(parts: Parts, other: Entry) -> Entry | None:
    """As little as the whole forward can be computed from again; a part of what another entry keeps, and much less.

    Where carries are small beside tapes and a budget is tight, this saves the runs that lead to a recorded step.
    """
    kept = _least(parts, _certain)
    used = ancestors(parts.needed, stop=kept)
    kept |= {node for node, place in parts.leaving.items() if node in used and parts.joint.carries[place] in kept}
    bare = _entry(parts, "bare", kept)
    part = bare.carries == other.carries and set(bare.saved) <= set(other.saved)
    return bare if part and _MUCH * size_of(parts, bare) <= size_of(parts, other) else None


def size_of(parts: Parts, entry: Entry) -> int:
    """Bytes that an entry keeps."""
    return sum(nbytes(node) for node in (*entry.saved, *(parts.joint.carries[place] for place in entry.carries)))


def _entry(parts: Parts, name: str, nodes: set[fx.Node]) -> Entry:
    place_of = {node: place for place, node in parts.joint.carries.items()}
    carries = tuple(sorted(place_of[node] for node in nodes if node in place_of))
    left = {node: place for node, place in parts.leaving.items() if place in carries and node in nodes}
    saved = tuple(n for n in parts.joint.graph.nodes if n in nodes and n not in place_of and n not in left)
    return Entry(name, carries, saved, tuple(sorted(left.values())))


def _whole(parts: Parts) -> set[fx.Node]:
    """What autograd would keep: all that the backward asks for; of views what they show, if that is no larger."""
    kept: set[fx.Node] = set()
    for node in parts.needed:
        base = node
        while is_view(base) and parts.is_tape(base):
            base = base.all_input_nodes[0]
        node = base if not parts.is_tape(base) or nbytes(base) <= nbytes(node) or not _savable(node) else node
        if parts.is_tape(node):
            kept.add(node)
    return {node for node in kept if _savable(node)}


def _savable(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"], tuple | list)


def _cheap(node: fx.Node) -> bool:
    """Whether computing a node again costs less than reading it from memory, or little more."""
    if node.op != "call_function" or is_random(node):
        return False
    if is_view(node):
        return True
    return name_of(node).removeprefix("aten.").partition(".")[0] in _CHEAP and all(
        _savable(argument) for argument in node.all_input_nodes
    )


def _certain(node: fx.Node) -> bool:
    """Whether a node can be computed again at all."""
    return node.op == "call_function" and not is_random(node)


def _least(parts: Parts, again: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The fewest bytes from which the backward can be computed by certain operators alone: a minimum cut.

    Every value is an edge with its bytes for capacity; values that are not computed again hang on the source, values
    that the backward asks for on the sink (as in the min-cut partitioner of AOTAutograd, without its weights).
    """
    flow = _Flow()
    relevant = ancestors([n for n in parts.needed if parts.is_tape(n)], stop=parts.free)
    for node in parts.joint.graph.nodes:
        if node not in relevant or not parts.is_tape(node):
            continue
        size = 0 if node in parts.leaving else nbytes(node)
        flow.edge((node, 0), (node, 1), size if _savable(node) else None)
        if not again(node):
            flow.edge("source", (node, 0), None)
        for argument in node.all_input_nodes:
            if parts.is_tape(argument):
                flow.edge((argument, 1), (node, 0), None)
    for node in parts.needed:
        if parts.is_tape(node):
            flow.edge((node, 1), "sink", None)
    return {_later(parts, node, relevant) for node in flow.cut("source", "sink")}


def _later(parts: Parts, node: fx.Node, relevant: set[fx.Node]) -> fx.Node:
    """A value as large as another one, and all that the backward makes of it: kept, it is not computed again."""
    while node.op == "call_function" and node not in parts.needed and node not in parts.leaving:
        users = [user for user in node.users if user in relevant and parts.is_tape(user)]
        if len(users) != 1 or not _cheap(users[0]) or is_view(users[0]) or nbytes(users[0]) != nbytes(node):
            break
        node = users[0]
    return node


class _Flow:
    """Maximum flow by shortest augmenting paths (Edmonds and Karp 1972); graphs here have a few hundred nodes."""

    def __init__(self) -> None:
        self.capacity: dict[object, dict[object, float]] = {}

    def edge(self, start: object, stop: object, capacity: int | None) -> None:
        """An edge; None: without a limit."""
        self.capacity.setdefault(start, {})[stop] = float("inf") if capacity is None else float(max(capacity, 1))
        self.capacity.setdefault(stop, {}).setdefault(start, 0.0)

    def cut(self, source: object, sink: object) -> set[fx.Node]:
        """The values whose edges are cut."""
        if source not in self.capacity or sink not in self.capacity:
            return set()
        while (path := self._path(source, sink)) is not None:
            room = min(self.capacity[a][b] for a, b in path)
            assert room < float("inf"), "a value that cannot be kept hangs between source and sink"
            for a, b in path:
                self.capacity[a][b] -= room
                self.capacity[b][a] += room
        reached = self._reached(source)
        return {node[0] for node in reached if isinstance(node, tuple) and node[1] == 0 and (node[0], 1) not in reached}

    def _reached(self, source: object) -> dict[object, object]:
        before: dict[object, object] = {source: None}
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for following, capacity in self.capacity[node].items():
                if capacity > 0 and following not in before:
                    before[following] = node
                    queue.append(following)
        return before

    def _path(self, source: object, sink: object) -> list[tuple[object, object]] | None:
        before = self._reached(source)
        if sink not in before:
            return None
        path, node = [], sink
        while node != source:
            path.append((before[node], node))
            node = before[node]
        return path
