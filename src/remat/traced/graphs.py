"""Small tools on graphs of aten operators: what depends on what, what is a view, simplification, copying of parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import fx

aten: Final = torch.ops.aten
_ALIASES: Final = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
VIEWS: Final = frozenset(
    (
        "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default",
        "aten._unsafe_view.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
        "aten.squeeze.default", "aten.expand.default", "aten.select.int", "aten.slice.Tensor",
        "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor",
        "aten.unsafe_split_with_sizes.default", "aten.unbind.int", "aten.chunk.default",
        "aten.diagonal.default", "aten.as_strided.default", "aten.view_as_real.default",
        "aten.view_as_complex.default", "aten._conj.default", "aten._reshape_alias.default",
        "aten.unfold.default", "aten.real.default", "aten.movedim.int",
    )
)  # fmt: skip


def name_of(node: fx.Node) -> str:
    """The operator of a node, such as "aten.add.Tensor"; PyTorch makes new objects for operators, but no new names."""
    return str(node.target) if node.op == "call_function" else ""


def value_of(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and name_of(parent) in VIEWS
    return name_of(node) in VIEWS


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a stream of random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def dependents(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on any of the sources, these included."""
    found = set(sources)
    for node in graph.nodes:
        if node.op == "call_function" and any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(targets: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that the targets are computed from, targets included; what is in `stop` is not gone through."""
    found: set[fx.Node] = set()
    limits = set(stop)
    queue = list(targets)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            if node not in limits:
                queue.extend(node.all_input_nodes)
    return found


def simplified(module: fx.GraphModule) -> fx.Graph:
    """The graph without aliases, double transposes and computations that occur twice or are not used."""
    from torch._functorch.compile_utils import fx_graph_cse

    graph = module.graph
    for node in list(graph.nodes):
        if name_of(node) in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph = fx_graph_cse(graph)
    for node in graph.nodes:
        if name_of(node) == "aten.t.default" and name_of(node.args[0]) == "aten.t.default":
            node.replace_all_uses_with(node.args[0].args[0])
    remove_dead(graph)
    return graph


def remove_dead(graph: fx.Graph) -> None:
    """Remove what is not used, but for draws from random streams and inputs."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)


def placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    """A new input, behind the others."""
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's result, if it were alone in memory."""
    value = value_of(node)
    return int(value.numel()) * int(value.element_size()) if isinstance(value, torch.Tensor) else 0


def base_of_memory(node: fx.Node) -> fx.Node:
    """The node whose memory a node's result shares."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
