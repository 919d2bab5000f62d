"""A program as two FX graphs, forward and backward, which AOTAutograd then runs under its own rules.

Every execution becomes a node of its own, in the program's order. What the backward takes from the forward is what the
program says is alive across the turn. A random operator that is run again first has the state of its generator saved,
and every later run draws under that state, so that it gives the same numbers and the stream outside does not notice.
A step that the plan lets overwrite an input calls the overload that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from ..streams import random_state, set_random_state
from .capture import is_batch_norm_in_training
from .graphs import Graph, Kind, Program
from .inplace_ops import overwriting
from .liveness import uses
from .op_costs import tensors_of

SEGMENT: Final = "remat_segment"  # in an emitted node's `meta`: the segment that it belongs to


def draw_again(state: torch.Tensor, device: torch.device, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator under a saved state; the generator goes on as if nothing had been drawn."""
    now = random_state(device)
    set_random_state(device, state)
    try:
        return op(*args, **kwargs)
    finally:
        set_random_state(device, now)


def emit(
    joint: fx.GraphModule,
    nodes: Sequence[fx.Node],
    graph: Graph,
    program: Program,
    forward_outputs: int,
    in_place: Mapping[int, int] | None = None,
    segment_of: Mapping[int, int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules of a program, as AOTAutograd's partitioner returns them.

    The forward returns its outputs, then the tensors saved for the backward, then the numbers; the backward takes the
    numbers, then the tensors, then the tangents.

    Args:
        joint: the graph that was captured.
        nodes: the FX node of each of the graph's nodes.
        graph: what is run.
        program: in this order, without dead executions.
        forward_outputs: how many of the joint graph's results belong to the forward.
        in_place: for a step of the program, the node whose storage its result takes, see `inplace.plan`.
        segment_of: for a node, the segment whose number is noted in `meta` of what is emitted for it.
    """
    (output,) = joint.graph.find_nodes(op="output")
    results = list(output.args[0])
    again = _drawn_again(graph, program)
    numbers, tensors = _saved(graph, nodes, program)
    steps, taken, places = program.forward_steps, in_place or {}, segment_of or {}
    backward = _Half(graph, nodes, again, places, program.order[:steps])
    for index in (*numbers, *tensors):
        backward.place(index)
    for index in again:
        backward.place_state(index)
    for index in graph.tangents:
        backward.copy(index)
    backward.run(program.order[steps:], {step - steps: source for step, source in taken.items()})
    backward.finish(tuple(backward.result(r) for r in results[forward_outputs:]))
    tensors = [index for index in tensors if backward.placed[index].users]
    backward.prune()
    forward = _Half(graph, nodes, again, places)
    for index in graph.inputs:
        forward.copy(index)
    forward.run(program.order[:steps], taken)
    returned = [forward.result(r) for r in results[:forward_outputs]]
    saved = [forward.value(index) for index in tensors] + [forward.states[index] for index in again]
    forward.finish((*returned, *saved, *(forward.value(index) for index in numbers)))
    return fx.GraphModule(joint, forward.made), fx.GraphModule(joint, backward.made)


def _drawn_again(graph: Graph, program: Program) -> tuple[int, ...]:
    count = Counter(k for k in program.order if graph.nodes[k].kind is Kind.RANDOM)
    return tuple(k for k, times in count.items() if times > 1)


def _saved(graph: Graph, nodes: Sequence[fx.Node], program: Program) -> tuple[list[int], list[int]]:
    """What crosses the turn: numbers (sizes that are symbols), and tensors."""
    numbers: list[int] = []
    tensors: list[int] = []
    for index in uses(graph, program).saved:
        node = nodes[index]
        if node.op != "get_attr":
            is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
            (tensors if is_tensor else numbers).append(index)
    needed = [nodes[k].meta.get("val") for k in (*tensors, *graph.tangents)]
    numbers += [k for k in _symbols(graph, nodes, needed) if k not in numbers]
    return numbers, tensors


def _symbols(graph: Graph, nodes: Sequence[fx.Node], values: Sequence[Any]) -> list[int]:
    """Inputs that are the symbols which sizes of these tensors are made of: code after us binds them by name."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    wanted = {s for value in values if isinstance(value, torch.Tensor) for s in free_symbols(value)}
    if not wanted:
        return []
    found: dict[Any, int] = {}
    for index in graph.inputs:
        value = nodes[index].meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr in wanted:
            found.setdefault(value.node.expr, index)
    return list(found.values())


class _Half:
    """One of the two graphs as it grows, with the newest value of each node."""

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[fx.Node],
        again: Sequence[int],
        segment_of: Mapping[int, int],
        before: Sequence[int] = (),
    ) -> None:
        self.graph = graph
        self.nodes = nodes
        self.index = {node: index for index, node in enumerate(nodes)}
        self.again = set(again)
        self.segment_of = segment_of
        self.made = fx.Graph()
        self.env: dict[int, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}
        self.placed: dict[int, fx.Node] = {}  # what came from the other half
        self.executed = set(before)

    def copy(self, index: int) -> None:
        self.env[index] = self.made.node_copy(self.nodes[index], self._argument)

    def place(self, index: int) -> None:
        """A value that comes from the other half."""
        made = self.made.placeholder(self.nodes[index].name)
        made.meta = dict(self.nodes[index].meta)
        self.env[index] = self.placed[index] = made

    def place_state(self, index: int) -> None:
        """A generator's state that the other half saved."""
        self.states[index] = self.made.placeholder(f"{self.nodes[index].name}_state")
        self.states[index].meta["val"] = self._state_value(index)

    def prune(self) -> None:
        """Without tensors from the other half that nothing reads."""
        for made in self.placed.values():
            if not made.users and isinstance(made.meta.get("val"), torch.Tensor):
                self.made.erase_node(made)

    def _argument(self, node: fx.Node) -> fx.Node:
        return self.value(self.index[node])

    def value(self, index: int) -> fx.Node:
        if index not in self.env and self.nodes[index].op == "get_attr":
            self.copy(index)
        return self.env[index]

    def result(self, result: Any) -> Any:
        return self._argument(result) if isinstance(result, fx.Node) else result

    def run(self, order: Sequence[int], in_place: Mapping[int, int]) -> None:
        for step, index in enumerate(order):
            if step in in_place:
                self._overwrite(index, in_place[step])
            elif index in self.states:
                self._draw_again(index)
            elif index in self.executed and is_batch_norm_in_training(self.nodes[index]):
                self._normalise_again(index)
            else:
                if index in self.again:
                    self._save(index)
                self.copy(index)
            if index in self.segment_of:
                self.env[index].meta[SEGMENT] = self.segment_of[index]
            self.executed.add(index)

    def _first(self, index: int) -> torch.Tensor:
        return tensors_of(self.nodes[index].meta["val"])[0]

    def _state_value(self, index: int) -> torch.Tensor:
        size = self.graph.nodes[index].state_bytes
        return self._first(index).new_empty(size, dtype=torch.uint8, device="cpu")

    def _save(self, index: int) -> None:
        state = self.made.call_function(random_state, (self._first(index).device,))
        state.meta["val"] = self._state_value(index)
        self.states[index] = state

    def _call(self, index: int, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
        self.env[index] = self.made.call_function(target, args, kwargs)
        self.env[index].meta = dict(self.nodes[index].meta)

    def _overwrite(self, index: int, source: int) -> None:
        call = overwriting(self.nodes[index], self.nodes[source])
        assert call is not None, f"{self.nodes[index]} was planned to overwrite {self.nodes[source]}, which it cannot"
        target, args, kwargs = call
        self._call(index, target, fx.map_arg(args, self._argument), fx.map_arg(kwargs, self._argument))

    def _draw_again(self, index: int) -> None:
        node = self.nodes[index]
        args = fx.map_arg(node.args, self._argument)
        kwargs = fx.map_arg(node.kwargs, self._argument)
        self._call(index, draw_again, (self.states[index], self._first(index).device, node.target, *args), kwargs)

    def _normalise_again(self, index: int) -> None:
        """Without running statistics: they have moved on, and only go through."""
        x, weight, bias, _, _, training, momentum, eps = fx.map_arg(self.nodes[index].args, self._argument)
        no_stats = torch.ops.aten._native_batch_norm_legit.no_stats
        self._call(index, no_stats, (x, weight, bias, training, momentum, eps))

    def finish(self, results: tuple[Any, ...]) -> None:
        self.made.output(results)
        self.made.lint()
