"""Matrix products by oneDNN instead of the BLAS, where they are large enough to gain from it.

A step has few rows. On an AMD EPYC with AVX-512 and one thread, MKL takes 102 µs for 16 rows of 256 with a matrix of
256×1024, oneDNN 67; for 16 rows of 1024 with one of 1024×256, 103 and 50; below 2²⁰ multiplications its own overhead
(10 µs) eats the gain. Which of them it is follows from shapes alone, so that a step's bits are the same in every run.

Gradients of weights are products over the rows of many steps. The narrower matrix is the one that is turned, and the
sum lies in memory so that its rows are that one's columns: with 256 rows, MKL adds a product of 1024×256 to a sum in
1380 µs, oneDNN in 1100 the usual way, in 640 this way, and in 780 where the product is made in four pieces, of which
one is there at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx

from .graphs import aten, name_of, value_of

_LARGE: Final = 1 << 20  # multiplications
_WIDE: Final = 1 << 17  # bytes of a sum that may be turned
_WORTH: Final = 1 << 18  # bytes of a sum beside which room for products is little
_PASSING: Final = 1 << 19  # bytes of that room at most: of a product before it is added, and of the turned matrix
_PIECE: Final = 1 << 22  # multiplications: below, what a call of oneDNN costs by itself (17 µs) eats the gain
_BLOCK: Final = 64  # columns of the wide matrix of which oneDNN makes a copy at a time, in every thread
_VECTOR: Final = 16  # numbers in a register of AVX-512
_LINEAR: Final[Any] = torch.ops.mkldnn._linear_pointwise.default if torch._C._has_mkldnn else None


def _is_large(rows: int, inner: int, columns: int) -> bool:
    """Whether a product of (rows × inner) and (inner × columns) gains."""
    return _LINEAR is not None and rows * inner * columns >= _LARGE


def through_onednn(graph: fx.Graph) -> None:
    """Let oneDNN compute the large products of a graph."""
    for node in list(graph.nodes):
        bias, operands = _operands(node)
        if operands is None:
            continue
        rows, columns = operands
        with graph.inserting_before(node):
            weight = graph.call_function(aten.t.default, (columns,))
            weight.meta["val"] = value_of(columns).t()
            made = graph.call_function(_LINEAR, (rows, weight, bias, "none", [], ""))
        made.meta["val"] = value_of(node).new_empty(value_of(node).shape)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def blank_sum(value: torch.Tensor, *, turned: bool) -> torch.Tensor:
    """A sum of products of such a value, laid out as `add_product` gains most by, if it may."""
    settings: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    if turned and _gains(value) and value.shape[0] > value.shape[1]:
        return torch.zeros(value.shape[::-1], **settings).t()
    return torch.zeros(value.shape, **settings)


def passing_bytes(sums: Sequence[torch.Tensor]) -> int:
    """Bytes that a product may take while it is added to one of these sums: less than the largest of them."""
    largest = max((total.nbytes for total in sums if _gains(total)), default=0)
    return min(_PASSING, largest * 2 // 3) if largest > _WORTH else 0


def add_product(
    total: torch.Tensor, lefts: Sequence[torch.Tensor], right: torch.Tensor, most_rows: int, room_bytes: int
) -> None:
    """Add to a sum that `blank_sum` made.

    Args:
        total: (a × b).
        lefts: (rows × aᵢ); the aᵢ add up to a.
        right: (rows × b).
        most_rows: of all calls: ways and bytes are those for so many, or a trial of few would foresee too little.
        room_bytes: what may be taken in passing; 0 leaves it to the BLAS.
    """
    parts = torch.split(total, [left.shape[1] for left in lefts])
    if not _gains(total) or not room_bytes:
        for part, left in zip(parts, lefts, strict=True):
            part.addmm_(left.t(), right)
    elif total.is_contiguous():
        for part, left in zip(parts, lefts, strict=True):
            _add_turned([part], left, [right], most_rows, room_bytes)
    else:
        _add_turned([part.t() for part in parts], right, lefts, most_rows, room_bytes)


def _add_turned(
    totals: Sequence[torch.Tensor],
    narrow: torch.Tensor,
    wides: Sequence[torch.Tensor],
    most_rows: int,
    room_bytes: int,
) -> None:
    """Add narrowᵀ·wide to each total, some columns of the narrow one at a time.

    Few rows take the memory of many: with 32 or 256 rows of 256 and 1024 columns, 545 KiB by one thread, 610 by two.
    """
    (rows, width), widest = narrow.shape, max(wide.shape[1] for wide in wides)
    pieces = -(-width * (widest + most_rows) * narrow.itemsize // room_bytes)
    count = -(-width // pieces // _VECTOR) * _VECTOR
    if min(count, width) * most_rows * widest < _PIECE:
        for total, wide in zip(totals, wides, strict=True):
            total.addmm_(narrow.t(), wide)
        return
    room = narrow.new_empty(count * most_rows)
    scratch = narrow.new_empty((most_rows - rows) * _BLOCK * torch.get_num_threads())
    split = zip(*(torch.split(total, count) for total in totals), strict=True)
    for parts, columns in zip(split, torch.split(narrow, count, 1), strict=True):
        turned = room[: columns.shape[1] * rows].view(-1, rows).copy_(columns.t())
        for part, wide in zip(parts, wides, strict=True):
            part.add_(linear(turned, wide, None))
    del scratch


def _gains(total: torch.Tensor) -> bool:
    on_cpu = total.dtype is torch.float32 and total.device.type == "cpu"
    return _LINEAR is not None and on_cpu and total.dim() == 2 and total.nbytes >= _WIDE


def in_float32(nodes: Iterable[fx.Node]) -> bool:
    """Whether oneDNN takes these values."""
    values = [value_of(node) for node in nodes]
    return _LINEAR is not None and all(v.dtype is torch.float32 and v.device.type == "cpu" for v in values)


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows·weight + bias by oneDNN."""
    found: torch.Tensor = _LINEAR(rows, weight.t(), bias, "none", [], "")
    return found


@contextmanager
def products_as_they_are(graph: fx.Graph) -> Iterator[None]:
    """Let Inductor call the products of a graph: its own ways want weights that are constants."""
    if not any(node.op == "call_function" and node.target is _LINEAR for node in graph.nodes):
        yield
        return
    import torch._inductor.config
    from torch._inductor.lowering import lowerings

    known = {key: lowerings.pop(key) for key in (_LINEAR, _LINEAR.overloadpacket) if key in lowerings}
    try:
        with torch._inductor.config.patch(pattern_matcher=False):
            yield
    finally:
        lowerings.update(known)


def _operands(node: fx.Node) -> tuple[Any, tuple[fx.Node, fx.Node] | None]:
    """The bias and the two matrices of a product that oneDNN should compute."""
    if node.kwargs or name_of(node) not in ("aten.mm.default", "aten.addmm.default"):
        return None, None
    *biases, left, right = node.args
    bias = biases[0] if biases else None
    if not in_float32(node.all_input_nodes):
        return None, None
    if bias is not None and value_of(bias).shape != value_of(node).shape[1:]:  # type: ignore[arg-type]
        return None, None
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    (count, inner), width = value_of(left).shape, value_of(right).shape[1]
    return bias, (left, right) if _is_large(count, inner, width) else None
