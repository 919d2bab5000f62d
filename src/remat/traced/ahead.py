"""Products of inputs with what is the same in every step: taken for several steps at once, before these run.

A step has few rows: on an AMD EPYC and one thread, 16 rows of 64 with a matrix of 64×768 take 20 µs, and 80 rows of
five steps 45. There are always equally many rows, those of steps that are not asked for included, so that a replay
meets the bits of the first run, and a trial of a few steps the bytes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from ..loops import Loop
from .graphs import name_of, nbytes, value_of
from .products import in_float32, linear
from .splitting import Parts

_SMALLEST: Final = 1 << 19  # multiplications a step: below, room for several steps costs more than it gains
_LARGEST: Final = 1 << 22  # above, there is nothing to gain
_ROOM: Final = 1 << 18  # bytes
_STEPS: Final = 8


@dataclass(frozen=True)
class Ahead:
    """A product that is taken ahead.

    Attributes:
        node: its value in one step.
        leaf: the leaf of x.
        weight: the matrix.
        bias: a row, or None.
        steps: how many at once.
    """

    node: fx.Node
    leaf: int
    weight: fx.Node
    bias: fx.Node | None
    steps: int


def products_ahead(parts: Parts) -> tuple[Ahead, ...]:
    """Those of a step."""
    found = [ahead for node in parts.joint.graph.nodes if (ahead := _ahead(parts, node)) is not None]
    room = sum(nbytes(ahead.node) for ahead in found)
    steps = min(_STEPS, _ROOM // max(room, 1))
    return tuple(Ahead(a.node, a.leaf, a.weight, a.bias, steps) for a in found) if steps > 1 else ()


def _ahead(parts: Parts, node: fx.Node) -> Ahead | None:
    if name_of(node) not in ("aten.mm.default", "aten.addmm.default") or node.kwargs or node in parts.backward:
        return None
    *biases, left, weight = node.args
    leaf_of = {holder: leaf for leaf, holder in parts.joint.inputs.items()}
    if left not in leaf_of or not all(argument in parts.invariant for argument in (*biases, weight)):
        return None
    (bias,) = biases or (None,)
    size = value_of(left).numel() * value_of(node).shape[1]  # type: ignore[arg-type]
    if not in_float32(node.all_input_nodes) or not _SMALLEST <= size < _LARGEST:
        return None
    if bias is not None and value_of(bias).shape != value_of(node).shape[1:]:  # type: ignore[arg-type]
        return None
    return Ahead(node, leaf_of[left], weight, bias, 1)  # type: ignore[index,arg-type]


class Window:
    """What the steps of one range take of products ahead, a few steps of it at a time.

    Args:
        products: what is multiplied: (leaf of x, steps at once, matrix, bias).
        loop: whose inputs these are.
    """

    def __init__(self, products: Sequence[tuple[int, int, torch.Tensor, torch.Tensor | None]], loop: Loop) -> None:
        self.products, self.loop = products, loop
        self.count = min((steps for _, steps, _, _ in products), default=1)
        self.first, self._rows = -self.count, list[tuple[torch.Tensor, ...]]()

    def at(self, index: int) -> tuple[torch.Tensor, ...]:
        """What step `index` takes."""
        if not self.products:
            return ()
        index %= self.loop.length  # as `Loop.inputs`
        if not self.first <= index < self.first + self.count:
            self._rows = []  # before the next ones are made
            self.first = max(min(index, self.loop.length - self.count), 0)
            self._rows = list(zip(*map(self._taken, self.products), strict=True))
        return self._rows[index - self.first]

    def _taken(self, product: tuple[int, int, torch.Tensor, torch.Tensor | None]) -> Sequence[torch.Tensor]:
        leaf, _, weight, bias = product
        block = self.loop.columns[leaf].block(self.first, self.first + self.count)
        found = linear(block.reshape(-1, block.shape[-1]), weight, bias)
        rows: Sequence[torch.Tensor] = found.view(self.count, -1, found.shape[1]).unbind()
        return rows
