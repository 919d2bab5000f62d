"""A program through Inductor, where a C++ compiler is at hand: point-wise operators become few loops over memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from .graphs import is_random, name_of, value_of
from .lowering import lowered
from .programs import Program


@cache
def compiler_at_hand() -> bool:
    """Whether there is a C++ compiler that Inductor could use."""
    return any(map(shutil.which, ("g++", "clang++")))


def fused(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    """The program as a function of its placeholders, in their order; `lowered`, where Inductor has no answer.

    Draws of random numbers stay with PyTorch's own operators, so that streams are those of the plain loop.
    """
    nodes = list(program.graph.nodes)
    values = [value_of(node) for node in nodes if node.op == "placeholder"]
    dtypes = {value.dtype for value in values}
    if any(map(is_random, nodes)) or any(dtype.is_complex for dtype in dtypes) or not _computes(nodes):
        return lowered(program)
    try:
        return _through_inductor(program)
    except Exception:  # whatever a compiler may stumble over: the other way is there
        return lowered(program)


def _computes(nodes: Sequence[fx.Node]) -> bool:
    return sum(node.op == "call_function" for node in nodes) > 1


def _through_inductor(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    graph, slots = _without_slots(program.graph)
    examples = [value_of(node) for node in graph.nodes if node.op == "placeholder"]
    mode = examples[0].fake_mode
    with mode, torch.no_grad():
        # One tensor a placeholder: two that are the same would be taken for one.
        values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in examples]
        module = make_fx(fx.GraphModule({}, graph), decomposition_table=select_decomp_table())(*values)
        with torch._inductor.config.patch(layout_optimization=False):
            compiled: Any = compile_fx_inner(module, values)
    strides = [value.stride() for value in values]
    places = [(sum(s is None for s in slots[:k]), slot) for k, slot in enumerate(slots)]

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        # What a kernel really returns may be laid out otherwise than it says.
        laid_out = [x if x.stride() == want else _like(x, want) for x, want in zip(inputs, strides, strict=True)]
        found = compiled(laid_out)
        return [found[place] if slot is None else inputs[slot] for place, slot in places]

    return run


def _like(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _without_slots(graph: fx.Graph) -> tuple[fx.Graph, list[int | None]]:
    """The graph returning nothing that it only wrote into an input, and of every result which input that was."""
    copy = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    copy.graph_copy(graph, known)
    order = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    found = output.all_input_nodes
    slots = [order.index(node.all_input_nodes[0]) if name_of(node) == "aten.copy_.default" else None for node in found]
    copy.output(tuple(known[node] for node, slot in zip(found, slots, strict=True) if slot is None))
    return copy, slots
