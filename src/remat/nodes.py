"""Walks through recorded autograd graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import torch

_LOOKED_AT: Final = 256  # newest nodes of a graph that tell whether a backward has used it up
_SEARCHED: Final = 10_000  # nodes of a graph for what a tensor was computed from


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of a recorded graph once, from some nodes on."""
    seen: set[Any] = set()
    queue = deque(roots)
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(following for following, _ in node.next_functions)


def reached_leaves(roots: Iterable[Any], leaves: Iterable[torch.Tensor]) -> set[int]:
    """The ids of those leaf tensors that gradients of a recorded graph flow into."""
    wanted = {id(leaf) for leaf in leaves}
    if not wanted:
        return set()
    return wanted & {id(getattr(node, "variable", None)) for node in nodes_of(roots)}


def apart_from_used_up(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], frozenset[Any]]:
    """Tensors without those whose graph a backward has gone through; and the newest nodes of such graphs."""
    tensors = list(tensors)
    used_up = frozenset(tensor.grad_fn for tensor in tensors if not tensor.is_leaf and _is_used_up(tensor))
    return [tensor for tensor in tensors if tensor.is_leaf or tensor.grad_fn not in used_up], used_up


def _is_used_up(tensor: torch.Tensor) -> bool:
    """Whether a backward has gone through a tensor's graph and let go of it: a loss of yesterday, kept in an attribute.

    The newest nodes tell, since a backward begins with them. No gradient can flow there any more, and an autograd node
    that had such a tensor among its inputs would make the engine go there nevertheless.
    """
    queue, seen = deque([tensor.grad_fn]), 0
    while queue and seen < _LOOKED_AT:
        node = queue.popleft()
        if node is None:
            continue
        seen += 1
        names = ["saved_tensors"] if hasattr(type(node), "_raw_saved_tensors") else dir(node)
        try:
            for name in names:
                if name == "saved_tensors" or name.startswith("_saved_"):
                    getattr(node, name)
        except RuntimeError:
            return True
        queue.extend(following for following, _ in node.next_functions)
    return False


def computed_from(tensors: Sequence[torch.Tensor]) -> dict[int, frozenset[int]]:
    """By number of a tensor the numbers of those others that it was computed from, where there are any."""
    with_history = {number: tensor.grad_fn for number, tensor in enumerate(tensors) if not tensor.is_leaf}
    if not with_history or len(tensors) == 1:
        return {}
    leaves = {id(tensor): number for number, tensor in enumerate(tensors) if tensor.is_leaf}
    inner: dict[Any, list[int]] = {}
    for number, node in with_history.items():
        inner.setdefault(node, []).append(number)
    found = {}
    for number, newest in with_history.items():
        sources: set[int] = set()
        for node in islice(nodes_of([newest]), _SEARCHED):
            sources.update(inner.get(node, ()) if node is not newest else ())
            leaf = leaves.get(id(getattr(node, "variable", None)))
            sources.update(() if leaf is None else (leaf,))
        if sources:
            found[number] = frozenset(sources)
    return found
