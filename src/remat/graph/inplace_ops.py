"""In place, executed: which inputs an operator of ATen can overwrite, and FX graphs rewritten so that they do.

An operator tagged pointwise computes each element of its result from the elements at the same place, so its kernel may
write over an input of the same shape, type and layout, and gives the same bits. It is called as `op_` where it
overwrites its first argument, else with `out=`; overloads that PyTorch generates compute beside it and copy, and are
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import fx

# Pointwise by their kernels, though not tagged so.
_ALSO_POINTWISE: Final = frozenset(("hardtanh_backward", "elu_backward", "leaky_relu_backward"))
_TAKEN: Final = "in_place"


def candidates(nodes: Sequence[fx.Node]) -> dict[int, tuple[int, ...]]:
    """For each node, which of the others its operator can overwrite, by position in `nodes`; first arguments first."""
    position = {node: place for place, node in enumerate(nodes)}
    found: dict[int, tuple[int, ...]] = {}
    for place, node in enumerate(nodes):
        sources = [source for source in _tensors(node) if overwriting(node, source) is not None]
        if sources:
            found[place] = tuple(position[source] for source in sources)
    return found


def rewrite(graph: fx.Graph) -> int:
    """Let every result take the storage of a dead input, everywhere legal; returns how many do.

    What placeholders and attributes hold is never overwritten, and neither is what the graph returns. Nodes need the
    fake tensors that tracing leaves in `meta["val"]`; one without is taken to alias all that it reads.
    """
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    roots = _roots(nodes)
    last: dict[fx.Node, int] = {}
    living: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for root in roots[node]:
            last[root] = max([last.get(root, 0), place[node], *(place[user] for user in node.users)])
            living.setdefault(root, []).append(node)
    done = 0
    for node in nodes:
        for source in _tensors(node):
            if _is_free(node, source, roots, last, place) and take(node, source):
                (old,), (root,) = roots[node], roots[source]
                last[root] = last.pop(old)
                living[root] += living[old]
                for other in living.pop(old):
                    roots[other] = (roots[other] - {old}) | {root}
                done += 1
                break
    return done


def take(node: fx.Node, source: fx.Node) -> bool:
    """Make the node overwrite what `source` is, if its operator can."""
    call = overwriting(node, source)
    if call is None:
        return False
    node.target, node.args, node.kwargs = call
    node.meta[_TAKEN] = source.name
    return True


def overwriting(node: fx.Node, source: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The call that computes the node over what `source` is, as (operator, args, kwargs); None if there is none."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or not _same_layout(node.meta.get("val"), source.meta.get("val")):
        return None
    over_first, into = _overloads(op)
    if over_first is not None and node.args and node.args[0] is source:
        return over_first, node.args, dict(node.kwargs)
    if into is not None:
        overload, name = into
        return overload, node.args, {**node.kwargs, name: source}
    return None


@cache
def _overloads(op: torch._ops.OpOverload) -> tuple[Any | None, tuple[Any, str] | None]:
    """The overload that overwrites the first argument, and the one that writes where it is told with that argument."""
    pointwise = torch.Tag.pointwise in op.tags or op.overloadpacket.__name__ in _ALSO_POINTWISE
    if op.namespace != "aten" or not pointwise or op._schema.is_mutable or len(op._schema.returns) != 1:
        return None, None
    over = getattr(getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_", None), op._overloadname, None)
    if over is not None and not (torch.Tag.generated not in over.tags and _arguments(over) == _arguments(op)):
        over = None
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        targets = [argument.name for argument in other._schema.arguments if argument.is_out]
        if len(targets) == 1 and torch.Tag.generated not in other.tags and _arguments(other) == _arguments(op):
            return over, (other, targets[0])
    return over, None


def _arguments(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of what an operator reads."""
    return [(one.name, str(one.type)) for one in op._schema.arguments if not one.is_out]


def _tensors(node: fx.Node) -> list[fx.Node]:
    """Nodes that are tensors by themselves among the arguments, in order."""
    if node.op != "call_function":
        return []
    arguments = [*node.args, *node.kwargs.values()]
    return [a for a in arguments if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor)]


def _same_layout(result: object, source: object) -> bool:
    """Whether one fills the storage of the other, element for element."""
    if not (isinstance(result, torch.Tensor) and isinstance(source, torch.Tensor)):
        return False
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(source)
    return (
        dense
        and (result.dtype, result.device, result.layout) == (source.dtype, source.device, source.layout)
        and tuple(result.shape) == tuple(source.shape)
        and tuple(result.stride()) == tuple(source.stride())
        and source.storage_offset() == 0
        and source.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _roots(nodes: Sequence[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node, the nodes that allocated what it lives in: as fake storages say and operators declare."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        own = _storages(node)
        declared = _is_declared_view(node.target)
        shared = [roots[source] for source in node.all_input_nodes if own is None or declared or _shares(own, source)]
        known = own is not None and bool(shared) and own <= frozenset().union(*map(_known, node.all_input_nodes))
        roots[node] = frozenset().union(*shared) | (frozenset() if known or (declared and shared) else {node})
    return roots


def _is_declared_view(op: object) -> bool:
    return isinstance(op, torch._ops.OpOverload) and any(one.alias_info is not None for one in op._schema.returns)


def _shares(own: frozenset[int], source: fx.Node) -> bool:
    storages = _storages(source)
    return storages is None or bool(own & storages)


def _known(node: fx.Node) -> frozenset[int]:
    return _storages(node) or frozenset()


def _storages(node: fx.Node) -> frozenset[int] | None:
    """The fake storages of a value; None if nothing is known of it."""
    if "val" not in node.meta:
        return None
    leaves = torch.utils._pytree.tree_leaves(node.meta["val"])
    return frozenset(one.untyped_storage()._cdata for one in leaves if isinstance(one, torch.Tensor))


def _is_free(
    node: fx.Node,
    source: fx.Node,
    roots: dict[fx.Node, frozenset[fx.Node]],
    last: dict[fx.Node, int],
    place: dict[fx.Node, int],
) -> bool:
    """Whether nothing but this node reads the storage of `source` from here on, and it is the graph's own."""
    if len(roots[source]) != 1 or roots[node] != {node}:
        return False
    (root,) = roots[source]
    others = any(root in roots[other] for other in node.all_input_nodes if other is not source)
    return root.op == "call_function" and last[root] == place[node] and not others
