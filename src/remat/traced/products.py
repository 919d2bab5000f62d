"""Matrix products by oneDNN instead of the BLAS, where they are large enough to gain from it.

A step has few rows. On an AMD EPYC with AVX-512 and one thread, MKL takes 102 µs for 16 rows of 256 with a matrix of
256×1024, oneDNN 67; for 16 rows of 1024 with one of 1024×256, 103 and 50; below 2²⁰ multiplications its own overhead
(10 µs) eats the gain. Which of them it is follows from shapes alone, so that a step's bits are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx

from .graphs import aten, name_of, value_of

_LARGE: Final = 1 << 20  # multiplications
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
    values = [value_of(argument) for argument in node.all_input_nodes]
    if any(value.dtype is not torch.float32 or value.device.type != "cpu" for value in values):
        return None, None
    if bias is not None and value_of(bias).shape != value_of(node).shape[1:]:  # type: ignore[arg-type]
        return None, None
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    (count, inner), width = value_of(left).shape, value_of(right).shape[1]
    return bias, (left, right) if _is_large(count, inner, width) else None
