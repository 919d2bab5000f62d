"""From AOTAutograd's joint graph to a `Graph`: who allocates what, who aliases whom, what may be run again.

AOTAutograd hands the joint graph to its partitioner as an FX graph whose nodes carry fake tensors: shapes, types and,
what matters here, storages that are shared exactly where the real ones will be. So views need no list of operators: a
result that lives in a storage of an input is a view.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx

from ..streams import random_state
from .graphs import Graph, Kind, Node, Storage
from .op_costs import Cost, estimated, hint, measured, tensors_of

_CUDA_UNIT: Final = 512  # the caching allocator rounds up to it
_COLLECTIVES: Final = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d",
    "c10d_functional",
    "_dtensor",
    "symm_mem",
)
_KNOWN: Final = ("aten", "prims", "prim", "_operator", "quantized_decomposed")
CostModel = Callable[..., Cost]


def storage_bytes(tensor: torch.Tensor) -> int:
    """What the allocator counts for a tensor's storage."""
    size = int(hint(tensor.untyped_storage().nbytes()))
    return -(-size // _CUDA_UNIT) * _CUDA_UNIT if tensor.device.type == "cuda" else size


def capture(
    joint: fx.GraphModule,
    forward_outputs: int,
    *,
    parameters: Iterable[int] = (),
    changed: Iterable[int] = (),
    costs: CostModel = measured,
) -> tuple[Graph, tuple[fx.Node, ...]]:
    """The joint graph as a value, and the FX node of each of its nodes.

    Args:
        joint: what AOTAutograd hands to its partitioner: arguments and tangents in; outputs, then gradients out.
        forward_outputs: how many of the outputs belong to the forward.
        parameters: which inputs, by position, are parameters.
        changed: which inputs, by position, are changed once the forward is over (buffers of batch norm).
        costs: `op_costs.measured`, or `op_costs.estimated` where several processes must agree.
    """
    builder = _Builder(costs)
    sources = [node for node in joint.graph.nodes if node.op != "output"]
    inputs = [node for node in sources if node.op in ("placeholder", "get_attr")]
    calls = [node for node in sources if node.op not in ("placeholder", "get_attr")]
    placeholders = [node for node in inputs if node.op == "placeholder"]
    primals = [node for node in placeholders if not is_tangent(node)]
    builder.changed = {primals[position] for position in changed}
    for node in (*inputs, *calls):
        builder.add(node)
    (output,) = joint.graph.find_nodes(op="output")
    results: Sequence[Any] = output.args[0]
    arguments = [builder.index[node] for node in primals]
    gradients = [builder.index[g] if isinstance(g, fx.Node) else None for g in results[forward_outputs:]]
    gradients += [None] * (len(arguments) - len(gradients))
    graph = Graph(
        tuple(builder.nodes),
        tuple(builder.storages),
        tuple(arguments),
        tuple(builder.index[node] for node in placeholders if is_tangent(node)),
        tuple(builder.index[o] for o in results[:forward_outputs] if isinstance(o, fx.Node)),
        tuple(gradients[: len(arguments)]),
        frozenset(arguments[position] for position in parameters),
    )
    return graph, (*inputs, *calls)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of a joint graph is a gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


class _Builder:
    """Nodes so far, and the storage in which each fake tensor lives."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.nodes: list[Node] = []
        self.storages: list[Storage] = []
        self.index: dict[fx.Node, int] = {}
        self._storage_of: dict[int, int] = {}  # address of a fake storage -> index
        self._alive: list[Any] = []  # fake storages, so that no address is used twice
        self.changed: set[fx.Node] = set()

    def _place(self, tensor: torch.Tensor, *, external: bool) -> tuple[int, bool]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storage_of:
            return self._storage_of[key], False
        self._alive.append(storage)
        self._storage_of[key] = len(self.storages)
        self.storages.append(Storage(storage_bytes(tensor), external))
        return self._storage_of[key], True

    def add(self, node: fx.Node) -> None:
        is_input = node.op in ("placeholder", "get_attr")
        external = is_input and not is_tangent(node)
        places = [self._place(t, external=external) for t in tensors_of(node.meta.get("val"))]
        storages = tuple(dict.fromkeys(place for place, _ in places))
        fresh = () if is_input else tuple(dict.fromkeys(place for place, new in places if new))
        inputs = tuple(dict.fromkeys(self.index[source] for source in node.all_input_nodes))
        self.index[node] = len(self.nodes)
        kind = Kind.INPUT if is_input else kind_of(node, fresh)
        cost = self._cost(node, kind)
        if kind in (Kind.CHEAP, Kind.EXPENSIVE) and cost.draws:
            kind = Kind.RANDOM
        if kind.repeatable and not is_input and self._reads_changed(node, storages):
            kind = Kind.OPAQUE
        self.nodes.append(
            Node(
                node.name,
                str(node.target),
                kind,
                inputs,
                storages,
                fresh,
                self._written(node),
                cost.seconds,
                cost.workspace_bytes,
                random_state(torch.device(self._device(node))).numel() if kind is Kind.RANDOM else 0,
                node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), tuple | list),  # type: ignore[union-attr]
            )
        )

    def _device(self, node: fx.Node) -> torch.device:
        return next((t.device for t in tensors_of(node.meta.get("val"))), torch.device("cpu"))

    def _reads_changed(self, node: fx.Node, storages: Sequence[int]) -> bool:
        """Whether it would read something else after the forward; views are as good as what they view."""
        changed = {s for source in self.changed for s in self.nodes[self.index[source]].storages}
        if not changed or set(storages) & changed:
            return False
        read = {s for source in node.all_input_nodes for s in self.nodes[self.index[source]].storages}
        return bool(read & changed) and not is_batch_norm_in_training(node)

    def _cost(self, node: fx.Node, kind: Kind) -> Cost:
        if kind in (Kind.INPUT, Kind.VIEW):
            return Cost(0.0, 0, draws=False)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        if kind in (Kind.CHEAP, Kind.EXPENSIVE, Kind.RANDOM) and self.costs is not estimated:
            return self.costs(node.target, args, kwargs)
        return estimated(node.target, args, kwargs, node.meta.get("val"))  # type: ignore[arg-type]

    def _written(self, node: fx.Node) -> tuple[int, ...]:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return ()
        written: list[int] = []
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                for source in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(source, fx.Node):
                        written += self.nodes[self.index[source]].storages
        return tuple(dict.fromkeys(written))


def is_batch_norm_in_training(node: fx.Node) -> bool:
    """Whether a call is batch norm by the statistics of its batch: running ones go through it without effect on it."""
    return node.target is torch.ops.aten._native_batch_norm_legit_functional.default and bool(node.args[5])


def changed_inputs(joint: fx.GraphModule) -> list[int]:
    """Positions of inputs for which the forward returns a new value that is then copied into them."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    described = joint.graph.output_node().meta.get("desc") or ()
    inputs = [d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)]
    places = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    return [number for number, node in enumerate(places) if node.meta.get("desc") in inputs]


def kind_of(node: fx.Node, fresh: Sequence[int]) -> Kind:
    """What it means to run a call again, by its operator's own declaration."""
    op = node.target
    if node.op != "call_function" or isinstance(op, torch._ops.HigherOrderOperator):
        return Kind.OPAQUE
    if not isinstance(op, torch._ops.OpOverload):  # getitem and arithmetic of symbolic numbers
        return Kind.VIEW if not fresh else Kind.OPAQUE
    if op.namespace in _COLLECTIVES:
        return Kind.COLLECTIVE
    if op._schema.is_mutable:
        return Kind.MUTATION
    if not fresh and op.namespace in _KNOWN:
        return Kind.VIEW
    if torch.Tag.nondeterministic_seeded in op.tags:
        return Kind.RANDOM if may_draw(node) else Kind.EXPENSIVE
    if op.namespace not in _KNOWN:
        return Kind.OPAQUE
    from torch.utils.flop_counter import flop_registry

    return Kind.EXPENSIVE if op.overloadpacket in flop_registry else Kind.CHEAP


def may_draw(node: fx.Node) -> bool:
    """Attention is declared random for its dropout, which is mostly off."""
    schema = node.target._schema  # type: ignore[union-attr]
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(value != 0.0)
    return True
