"""Autocast's copies of weights: one for a whole plain loop, whose gradient is summed in half precision and cast once.

Autocast casts a weight where it is first used, and keeps the copy for later uses until the outermost region ends. In
the plain loop all steps share it: their contributions are added up in half precision, newest first, and the sum flows
through the cast when nothing else is left. A range of stages has a copy of its own. So its backward begins the copy's
sum with what the ranges after it have left, stops there, and leaves the result to the range before; only in the range
that begins with stage 0 does the sum flow on to the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .nodes import nodes_of


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether autocast, as it is now, keeps its copy of a tensor once there is one."""
    return (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and tensor.dim() > 0
        and torch.is_autocast_enabled(tensor.device.type)
        and torch.is_autocast_cache_enabled()
    )


def cast_edge(tensor: torch.Tensor) -> GradientEdge | None:
    """Where gradients flow into autocast's copy of a tensor; the copy is made if there is none."""
    if not is_cast(tensor):
        return None
    # The cheapest operator that asks for the copy, on every device and for every shape: a product with no columns.
    node: Any = torch.matmul(tensor, tensor.new_empty(tensor.shape[-1], 0)).grad_fn
    while node is not None and node.next_functions:
        following = node.next_functions[0][0]
        if getattr(following, "variable", None) is tensor:
            return GradientEdge(node, 0)
        node = following
    return None


def cast_among(roots: Iterable[Any], tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """The numbers of the tensors whose copies a recorded graph uses, while autocast still has them."""
    candidates = {id(tensor): number for number, tensor in enumerate(tensors) if is_cast(tensor)}
    if not candidates:
        return frozenset()
    found = set()
    for node in nodes_of(roots):
        if len(node.next_functions) == 1:
            number = candidates.get(id(getattr(node.next_functions[0][0], "variable", None)))
            if number is not None and number not in found:
                edge = cast_edge(tensors[number])
                if edge is not None and edge.node is node:
                    found.add(number)
    return frozenset(found)


def stopped(edge: GradientEdge) -> GradientEdge:
    """The same edge; nothing flows on from it in the next backward."""
    edge.node.register_prehook(_nothing)
    return edge


def _nothing(gradients: tuple[torch.Tensor | None, ...]) -> Any:
    return (None,) * len(gradients)
