"""A program through Inductor, where a C++ compiler is at hand: point-wise operators become few loops over memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from .graphs import aten, is_random, name_of, placeholder, value_of
from .lowering import drawn_in_place, lowered
from .products import products_as_they_are
from .programs import Program, remove_dead_but_writes

Function = Callable[..., Sequence[torch.Tensor]]


@cache
def compiler_at_hand() -> bool:
    """Whether there is a C++ compiler that Inductor could use."""
    return any(map(shutil.which, ("g++", "clang++")))


_GRAIN: Final = 1 << 15  # elements a thread, as in PyTorch's own point-wise kernels


class NotFused(Exception):
    """Inductor makes nothing of a program; the message says why, as the end of a sentence."""


def fused(program: Program) -> Function:
    """The program as a function of its placeholders, in their order.

    Random numbers are drawn by PyTorch's own operators, in their order and before anything else, so that streams are
    those of the plain loop.

    Raises:
        NotFused: Inductor has no answer.
    """
    graph, draws = _without_draws(program.graph)
    nodes = list(graph.nodes)
    if sum(node.op == "call_function" for node in nodes) <= 1:
        return lowered(program)  # one operator by itself is as fast as it gets
    if any(value_of(node).dtype.is_complex for node in nodes if node.op == "placeholder"):
        raise NotFused("it computes with complex numbers")
    try:
        run = _through_inductor(graph, len(draws), program)
    except Exception as error:  # whatever a compiler may stumble over
        first = (str(error).strip().splitlines() or [""])[0]
        raise NotFused(f"{type(error).__name__}: {first}") from None
    if not draws:
        return run
    drawn = lowered(Program(_alone(draws)))
    return lambda *inputs: run(*inputs, *drawn())


# ---- random numbers


def _without_draws(graph: fx.Graph) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph with placeholders, behind the others, for the random numbers it draws; and the nodes that draw them."""
    copy, known = fx.Graph(), dict[fx.Node, fx.Node]()
    draws = [node for node in graph.nodes if is_random(node)]
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = copy.node_copy(node)
    for number, node in enumerate(draws):
        if not _by_shape_alone(node):
            raise NotFused(f"what {node.target} draws depends on values")
        known[node] = placeholder(copy, f"drawn_{number}", value_of(node))
    copy.output(copy.graph_copy(graph, known))
    remove_dead_but_writes(copy)
    return copy, draws


def _by_shape_alone(node: fx.Node) -> bool:
    """Whether of the tensors that a draw is given only shape and layout matter."""
    name = name_of(node).split(".")[1]
    return isinstance(value_of(node), torch.Tensor) and (
        not node.all_input_nodes or drawn_in_place(node) is not None or name in ("rand_like", "randn_like")
    )


def _alone(draws: Sequence[fx.Node]) -> fx.Graph:
    """The draws by themselves, from memory laid out as the step's."""
    graph = fx.Graph()

    def blank(node: fx.Node) -> fx.Node:
        like = value_of(node)
        settings = {"dtype": like.dtype, "device": like.device}
        made = graph.call_function(aten.empty_strided.default, (list(like.shape), list(like.stride())), settings)
        made.meta["val"] = like
        return made

    graph.output(tuple(graph.node_copy(node, blank) for node in draws))
    return graph


# ---- the compiler


def _through_inductor(graph: fx.Graph, drawn: int, program: Program) -> Function:
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    graph, slots = _without_slots(graph)
    examples = [value_of(node) for node in graph.nodes if node.op == "placeholder"]
    mode = examples[0].fake_mode
    with mode, torch.no_grad():
        # One tensor a placeholder: two that are the same would be taken for one.
        values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in examples]
        module = make_fx(fx.GraphModule({}, graph), decomposition_table=select_decomp_table())(*values)
        # Layouts are looked at here, where they can be put right. Waking threads takes longer than a small kernel.
        settings = {"layout_optimization": False, "size_asserts": False, "cpp.min_chunk_size": _GRAIN}
        with torch._inductor.config.patch(settings), products_as_they_are(graph):
            compiled: Any = compile_fx_inner(module, values)
    # What is around the code costs as much as a small kernel.
    call = getattr(compiled, "current_callable", None) or compiled
    keys = [*program.threaded, *program.columns, *program.bound, *[("drawn", k) for k in range(drawn)]]
    return _caller(call, [value.stride() for value in values], [key[0] in _OURS for key in keys], slots)


_OURS: Final = (
    "saved",
    "leaving",
    "slot",
    "next",
    "drawn",
    "tangent",
    "ahead",
)  # laid out by ourselves, as programs say


def _caller(
    call: Any, strides: Sequence[tuple[int, ...]], sure: Sequence[bool], slots: Sequence[int | None]
) -> Function:
    """Calls the compiled code with inputs laid out as it wants them: results may be laid out otherwise than it says."""
    names = [f"v{number}" for number in range(len(strides))]
    checks = [
        f"if {name}.stride() != {stride}: {name} = like({name}, {stride})"
        for name, stride, known in zip(names, strides, sure, strict=True)
        if not known
    ]
    places = iter(range(len(slots)))
    results = [f"found[{next(places)}]" if slot is None else names[slot] for slot in slots]
    lines = [*checks, f"found = call([{', '.join(names)}])", f"return ({', '.join([*results, ''])})"]
    body = "\n    ".join(lines)
    scope = {"call": call, "like": _like}
    exec(compile(f"def run({', '.join(names)}):\n    {body}\n", "<remat fused>", "exec"), scope)
    run: Function = scope["run"]
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
