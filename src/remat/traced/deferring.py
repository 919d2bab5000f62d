"""Gradients of parameters as a few products over many steps, instead of one product per step.

The gradient of a parameter is a sum over steps. Of each step's contribution this module finds the *terms* that it is
made of by linear operators which are the same in every step (transposition, views, scaling, sums of terms): these are
applied once, to the sum. A term is

    product       of two matrices: their rows are kept, and one product over the rows of many steps replaces one a step;
                  the first one may be kept in pieces that stand side by side
    products      the same for batches of matrices
    convolution   its weight's gradient: a batch of many steps replaces one a step
    sum           over rows that another term keeps anyway, such as a bias of a linear layer
    rows          of an embedding: added to the sum where they belong, never as a whole table
    value         anything else: added to the sum in place, step by step
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from .convolutions import MANY, SMALL
from .graphs import name_of, value_of
from .splitting import Parts

_LINEAR: Final = frozenset(
    (
        "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default",
        "aten._unsafe_view.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
        "aten.squeeze.default", "aten.expand.default", "aten.neg.default", "aten.mul.Scalar", "aten.div.Scalar",
        "aten.select_backward.default", "aten.slice_backward.default", "aten.select.int", "aten.slice.Tensor",
        "aten.clone.default", "aten._conj.default", "aten._reshape_alias.default",
        "aten.sigmoid_backward.default", "aten.tanh_backward.default", "aten.threshold_backward.default",
        "aten.softplus_backward.default", "aten.silu_backward.default", "aten._softmax_backward_data.default",
    )
)  # fmt: skip
_RESHAPES: Final = frozenset(
    (
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    )
)
_EXACT: Final = (
    torch.float32,
    torch.float64,
)  # half precision is added up in the order and precision of the plain loop


@dataclass(frozen=True)
class Operand:
    """What is kept of a step for a term.

    Attributes:
        node: its value.
        swapped: whether the last two dimensions are exchanged before it is kept.
        shape: the shape in which the term takes it.
        batch: whether time goes behind the first dimension instead of before it.
        last: whether the term takes images with their channels last, pixel by pixel.
    """

    node: fx.Node
    shape: tuple[int, ...]
    swapped: bool = False
    batch: bool = False
    last: bool = False


@dataclass(frozen=True)
class Term:
    """A summand of a step's contribution to gradients of parameters.

    Attributes:
        kind: one of those above.
        node: its value in one step, which says what the sum looks like.
        operands: what is kept of every step.
        settings: further arguments.
    """

    kind: str
    node: fx.Node
    operands: tuple[Operand, ...] = ()
    settings: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Link:
    """A linear operator between a term and a gradient: `node`, with its argument number `place` replaced."""

    node: fx.Node
    place: int

    def key(self) -> Any:
        """Equal for operators that do the same."""
        others = tuple(str(argument) for k, argument in enumerate(self.node.args) if k != self.place)
        return name_of(self.node), others, str(self.node.kwargs)


@dataclass(frozen=True)
class Branch:
    """Terms whose sum goes through the same operators, innermost first."""

    terms: tuple[Term, ...]
    links: tuple[Link, ...]


def deferred(parts: Parts, *, in_pieces: bool = False) -> dict[int, tuple[Branch, ...]]:
    """By number of the captured tensor, the branches whose sum is its gradient.

    Args:
        parts: of the joint graph.
        in_pieces: whether of matrices that are put together side by side the pieces are kept: each may take the place
            of a saved value where the whole one fits in none.
    """
    finder = _Finder(parts, in_pieces=in_pieces)
    paths = {number: list(finder.walk(node, ())) for number, node in parts.joint.captured_gradients.items()}
    terms = finder.terms()
    branches = {}
    for number, pairs in paths.items():
        groups: dict[Any, tuple[list[Term], tuple[Link, ...]]] = {}
        for node, links in pairs:
            key = (*(link.key() for link in links), value_of(node).shape, value_of(node).dtype)
            groups.setdefault(key, ([], links))[0].append(terms[node])
        branches[number] = tuple(Branch(tuple(group), links) for group, links in groups.values())
    return branches


def base_of(node: fx.Node) -> tuple[fx.Node, bool]:
    """What a node is a reshaping of, as far as the order in memory stays, or a copy of, with channels last.

    Returns:
        That, and whether it is images of which the node is the pixels.
    """
    last = False
    while True:
        if name_of(node) in _RESHAPES and value_of(_first(node)).is_contiguous() and value_of(node).is_contiguous():
            node = _first(node)
        elif (
            name_of(node) == "aten.permute.default" and node.args[1] == [0, 2, 3, 1] and value_of(node).is_contiguous()
        ):
            node, last = _first(node), True
        elif node.kwargs.get("memory_format") is torch.channels_last:
            node = _first(node)
        else:
            return node, last


def _first(node: fx.Node) -> fx.Node:
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


class _Finder:
    def __init__(self, parts: Parts, *, in_pieces: bool) -> None:
        self.parts, self.in_pieces = parts, in_pieces
        self.found: dict[fx.Node, Term] = {}

    def walk(self, node: fx.Node, links: tuple[Link, ...]) -> Iterator[tuple[fx.Node, tuple[Link, ...]]]:
        """The terms that a node is the sum of, each with the operators between."""
        place = self._linear_in(node)
        if self._is_sum(node):
            for argument in node.args:
                assert isinstance(argument, fx.Node)
                yield from self.walk(argument, links)
        elif place is not None:
            argument = node.args[place]
            assert isinstance(argument, fx.Node)
            yield from self.walk(argument, (Link(node, place), *links))
        else:
            self.found[node] = self._term(node)
            yield node, links

    def terms(self) -> dict[fx.Node, Term]:
        """All terms by their node; sums over what other terms keep are made of that."""
        operands = [operand for term in self.found.values() for operand in term.operands]
        kept = {operand.node for operand in operands if not operand.swapped and not operand.batch}
        for node, term in self.found.items():
            if term.kind == "value" and name_of(node) == "aten.sum.dim_IntList" and not node.kwargs:
                rows, (dims, *keep) = _first(node), node.args[1:]
                pieces = self._pieces(rows)
                if len(pieces) > 1 and any(dim in (1, -1) for dim in dims):  # type: ignore[union-attr]
                    continue
                if all(base_of(piece)[0] in kept for piece in pieces) and value_of(rows).dtype is value_of(node).dtype:
                    self.found[node] = _column_sum(node, pieces, dims, *keep)  # type: ignore[arg-type]
        return self.found

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether a node adds two contributions of its own shape."""
        if node not in self.parts.backward or name_of(node) != "aten.add.Tensor" or node.kwargs:
            return False
        wanted = value_of(node)
        return all(
            isinstance(a, fx.Node) and value_of(a).shape == wanted.shape and value_of(a).dtype == wanted.dtype
            for a in node.args
        )

    def _linear_in(self, node: fx.Node) -> int | None:
        """The argument that a node is linear in, if everything else about it is the same in every step."""
        backward = self.parts.backward
        varying = [k for k, a in enumerate(node.args) if isinstance(a, fx.Node) and a not in self.parts.invariant]
        if node not in backward or len(varying) != 1 or not isinstance(value_of(node), torch.Tensor):
            return None
        argument = node.args[varying[0]]
        if argument not in backward or not isinstance(value_of(argument), torch.Tensor):  # type: ignore[arg-type]
            return None
        if name_of(node) in _LINEAR and varying == [0]:
            return 0
        if name_of(node) in ("aten.mm.default", "aten.bmm.default"):
            return varying[0]
        if name_of(node) == "aten.mul.Tensor" or (name_of(node) == "aten.div.Tensor" and varying == [0]):
            same_size = value_of(node).numel() == value_of(argument).numel()  # type: ignore[arg-type]
            return varying[0] if same_size else None
        if name_of(node) == "aten.sum.dim_IntList" and self._sums_products(argument):
            return 0
        if name_of(node) == "aten._to_copy.default" and value_of(argument).dtype in _EXACT:  # type: ignore[arg-type]
            return 0
        return None

    def _sums_products(self, node: Any) -> bool:
        """Whether a node is, up to what is the same in every step, a product of the step's own that waits."""
        while name_of(node) in _LINEAR and self._linear_in(node) is not None:
            node = node.args[0]
        own = self.parts.invariant.isdisjoint(node.all_input_nodes)
        return name_of(node) in ("aten.bmm.default", "aten.mm.default") and own and not _is_enough(node, node.args[0])

    # ---- kinds

    def _term(self, node: fx.Node) -> Term:
        term = None
        if node in self.parts.backward and value_of(node).dtype in _EXACT:
            if name_of(node) == "aten.mm.default":
                left, right = node.args
                assert isinstance(left, fx.Node)
                if _is_enough(node, left):
                    return Term("value", node)
                pieces = self._pieces(_first(left)) if name_of(left) == "aten.t.default" else []
                first = [_whole(piece) for piece in pieces] if len(pieces) > 1 else [_rows(left, swap=True)]
                term = Term("product", node, (*first, _rows(right, swap=False)))
            elif name_of(node) == "aten.bmm.default":
                left, right = node.args
                if _is_enough(node, left):
                    return Term("value", node)
                term = Term("products", node, (_batch(left, swap=True), _batch(right, swap=False)))
            elif name_of(node) == "aten.embedding_dense_backward.default":
                term = self._embedding(node)
            elif node.target is operator.getitem and name_of(_first(node)) == "aten.convolution_backward.default":
                term = self._convolution(node)
        return term or Term("value", node)

    def _embedding(self, node: fx.Node) -> Term | None:
        rows, numbers, _, padding, by_frequency = node.args
        if by_frequency or not isinstance(rows, fx.Node) or not isinstance(numbers, fx.Node):
            return None
        return Term("rows", node, (_whole(numbers), _whole(rows)), (padding,))

    def _convolution(self, node: fx.Node) -> Term | None:
        gradient, inputs, weight, _, *settings = _first(node).args
        assert isinstance(gradient, fx.Node)
        assert isinstance(inputs, fx.Node)
        if node.args[1] != 1 or weight not in self.parts.invariant or value_of(gradient)[:, 0].numel() >= MANY:
            return None
        return Term("convolution", node, (_whole(gradient), _whole(inputs)), (weight, *settings[:-1]))

    def _pieces(self, node: fx.Node) -> list[fx.Node]:
        """The matrices of the backward that stand side by side in a node, or itself."""
        if not self.in_pieces or name_of(node) != "aten.cat.default" or value_of(node).dim() != 2:
            return [node]
        pieces, dim = node.all_input_nodes, (*node.args, 0)[1]
        whole = sum(value_of(piece).shape[1] for piece in pieces) == value_of(node).shape[1]  # each of them once
        there = all(piece in self.parts.backward for piece in pieces)
        return pieces if whole and there and dim in (1, -1) else [node]


def _is_enough(product: fx.Node, left: Any) -> bool:
    """Whether one step's product gains nothing from waiting, which costs memory.

    What a convolution gains (3×3, of 12 channels to 32, 74 µs for 1024 pixels, 46 for each of eight such steps) is
    paid for in last bits, as oneDNN adds up one pixel after the other.
    """
    batch = value_of(left).shape[0] if value_of(left).dim() == 3 else 1
    return bool(batch * value_of(left).shape[-1] >= MANY and value_of(product).nbytes <= SMALL)


def _column_sum(node: fx.Node, rows: Sequence[fx.Node], dims: Sequence[int], keep: bool = False) -> Term:
    width = value_of(rows[0]).dim()
    return Term("sum", node, tuple(map(_whole, rows)), (tuple(dim % width for dim in dims), keep))


def _whole(node: fx.Node) -> Operand:
    base, last = base_of(node)
    return Operand(base, tuple(value_of(node).shape), last=last)


def _rows(node: Any, *, swap: bool) -> Operand:
    """A matrix, or its transpose, by rows."""
    rows, columns = value_of(node).shape
    shape = (columns, rows) if swap else (rows, columns)
    transposed = name_of(node) == "aten.t.default"
    if transposed:
        node = _first(node)
    if transposed == swap:
        base, last = base_of(node)
        return Operand(base, shape, last=last)
    return Operand(node, shape, swapped=True)


def _batch(node: Any, *, swap: bool) -> Operand:
    """Matrices by rows."""
    batch, rows, columns = value_of(node).shape
    shape = (batch, columns, rows) if swap else (batch, rows, columns)
    return Operand(node, shape, swapped=swap, batch=True)
