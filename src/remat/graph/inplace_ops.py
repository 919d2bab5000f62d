"""In place, executed: which inputs an operator of ATen can overwrite, and the call that does.

An operator tagged pointwise computes each element of its result from the elements at the same place, so its kernel may
write over an input of the same shape, type and layout, and gives the same bits. It is called as `op_` where it
overwrites its first argument, else with `out=`; overloads that PyTorch generates compute beside it and copy, and are
not used. Nor is an operator that draws random numbers: it may have to be run again under its own state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import fx

# Pointwise by their kernels, though not tagged so.
_ALSO_POINTWISE: Final = frozenset(("hardtanh_backward", "elu_backward", "leaky_relu_backward"))


def candidates(nodes: Sequence[fx.Node]) -> dict[int, tuple[int, ...]]:
    """For each node, which of the others its operator can overwrite, by position in `nodes`; first arguments first."""
    position = {node: place for place, node in enumerate(nodes)}
    found: dict[int, tuple[int, ...]] = {}
    for place, node in enumerate(nodes):
        sources = [source for source in _tensors(node) if overwriting(node, source) is not None]
        if sources:
            found[place] = tuple(position[source] for source in sources)
    return found


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
    draws = torch.Tag.nondeterministic_seeded in op.tags
    if op.namespace != "aten" or not pointwise or draws or op._schema.is_mutable or len(op._schema.returns) != 1:
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
    return (
        _is_dense(source)
        and (result.dtype, result.device, result.layout) == (source.dtype, source.device, source.layout)
        and tuple(result.shape) == tuple(source.shape)
        and tuple(result.stride()) == tuple(source.stride())
        and source.storage_offset() == 0
        and source.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
