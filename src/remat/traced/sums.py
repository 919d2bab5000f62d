"""Sums of gradients' terms over steps, taken many steps at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from .deferring import Operand, Term
from .graphs import value_of
from .products import add_product, blank_sum, passing_bytes
from .traced import Menu

_ROWS: Final = 256  # of a product are enough, where waiting for them costs no memory
_DEAR: Final = (
    64  # where it does: kernels run at nearly full speed (58 µs a step of a GRU with 16 rows, with 256 rows 60)
)
_STEPS: Final = 32  # at most, between two products
# Kernels for small matrices add one row after the other, which rounds more often than adding a product a step does;
# those for large ones add up in blocks. So small products are taken of few rows at a time.
_SMALL: Final = 1 << 13  # bytes of a matrix
_FEW: Final = 12  # rows


def steps_together(menu: Menu) -> int:
    """How many steps' operands are kept in slots of their own before their products are taken."""
    rows = [
        operand.shape[-2]
        for term in menu.plan.terms
        if term.kind in ("product", "products")
        for operand in term.operands
    ]
    wanted = _DEAR if menu.plan.slots else _ROWS
    return max(1, min(_STEPS, -(-wanted // max(min(rows, default=wanted), 1))))


class Sums:
    """The sums of one pass.

    Args:
        menu: the entry whose terms are summed.
        reached: the terms that gradients flow into.
        shared: what is the same in every step.
        turned: whether there is room to turn large sums back at the end.
    """

    def __init__(
        self, menu: Menu, reached: frozenset[Term], shared: Sequence[torch.Tensor], *, turned: bool = True
    ) -> None:
        self.menu, self.shared, self.reached = menu, shared, reached
        self._finish, groups = menu.finish(reached)
        self._sums = [blank_sum(value_of(group[0].node), turned=turned) for group in groups]
        self._passing_bytes = passing_bytes(self._sums) if turned else 0  # trials foresee the ways of turned ones
        self._of = {term: [s for s, group in zip(self._sums, groups, strict=True) if term in group] for term in reached}
        self.values = [self._of.get(term, []) for term in menu.plan.values]
        self.terms = [term for term in menu.plan.terms if term in reached]

    def add(self, block: Callable[[Operand], torch.Tensor], live: Sequence[Term], most: int) -> None:
        """Add the terms of some steps, at `most` so many, whose operands `block` gives with time first.

        For batches, time comes second.
        """
        for term in live:
            for total in self._of[term]:
                _ADD[term.kind](term, total, block, self._weight, (most, self._passing_bytes))

    def _weight(self, node: Any) -> torch.Tensor:
        return self.shared[self.menu.owner.hoisted[node]]

    def gradients(self) -> dict[int, torch.Tensor]:
        """Gradients by number of the captured tensor, no two of which share memory."""
        sums, self._sums, self._of, self.values = self._sums, [], {}, []
        for place in range(len(sums)):  # one after the other: a copy takes as much as what it is made of
            sums[place] = sums[place].contiguous()
        program = self._finish.program
        bound = [self.shared[number] for _, number in program.bound]
        found = self._finish.function(*sums, *bound)
        seen: set[int] = set()
        gradients: dict[int, torch.Tensor] = {}
        for (_, number), place in program.results.items():
            gradient = found[place]
            memory = gradient.untyped_storage().data_ptr()
            gradients[number] = gradient.clone() if memory in seen else gradient
            seen.add(memory)
        return gradients


Block = Callable[[Operand], torch.Tensor]
Weight = Callable[[Any], torch.Tensor]
Most = tuple[int, int]  # steps at a time, and bytes in passing


def _product(term: Term, total: torch.Tensor, block: Block, _: Weight, most: Most) -> None:
    *lefts, right = (block(operand).reshape(-1, operand.shape[1]) for operand in term.operands)
    rows = term.operands[0].shape[0]
    if total.nbytes > _SMALL:
        add_product(total, lefts, right, most[0] * rows, most[1])
        return
    rows = max(_FEW, rows)
    for part, left in zip(torch.split(total, [left.shape[1] for left in lefts]), lefts, strict=True):
        for some, others in zip(torch.split(left, rows), torch.split(right, rows), strict=True):
            part.add_(some.t() @ others)


def _products(term: Term, total: torch.Tensor, block: Block, _: Weight, __: Most) -> None:
    left, right = (block(operand).flatten(1, 2) for operand in term.operands)
    if total[0].nbytes > _SMALL:
        total.baddbmm_(left.transpose(1, 2), right)
        return
    rows = max(_FEW, term.operands[0].shape[1])
    for some, others in zip(torch.split(left, rows, 1), torch.split(right, rows, 1), strict=True):
        total.add_(some.transpose(1, 2) @ others)


def _sum(term: Term, total: torch.Tensor, block: Block, _: Weight, __: Most) -> None:
    dims, keep = term.settings
    parts = [total] if len(term.operands) == 1 else torch.split(total, [o.shape[-1] for o in term.operands], -1)
    for part, operand in zip(parts, term.operands, strict=True):
        rows = block(operand).reshape(-1, *operand.shape)
        added = rows.sum([0, *(dim + 1 for dim in dims)], keep)
        part.add_(added.squeeze(0) if keep else added)


def _rows(term: Term, total: torch.Tensor, block: Block, _: Weight, __: Most) -> None:
    numbers, rows = (block(operand) for operand in term.operands)
    numbers, rows = numbers.reshape(-1), rows.reshape(-1, rows.shape[-1])
    padding = term.settings[0]
    total.index_add_(0, numbers, rows if padding < 0 else rows.masked_fill((numbers == padding).unsqueeze(1), 0))


def _convolution(term: Term, total: torch.Tensor, block: Block, weight: Weight, _: Most) -> None:
    gradient, inputs = (block(operand).reshape(-1, *operand.shape[1:]) for operand in term.operands)
    node, *settings = term.settings
    mask = [False, True, False]
    found = torch.ops.aten.convolution_backward.default(gradient, inputs, weight(node), None, *settings, mask)
    total.add_(found[1])


_ADD: Final[Mapping[str, Callable[[Term, torch.Tensor, Block, Weight, Most], None]]] = {
    "product": _product,
    "products": _products,
    "sum": _sum,
    "rows": _rows,
    "convolution": _convolution,
}
