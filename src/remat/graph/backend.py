"""`torch.compile(model, backend="remat", options={"budget": "4GiB"})`: any model inside a budget, as one graph.

Dynamo hands over a graph, AOTAutograd makes the joint graph of it, and where it would split that into forward and
backward we put our own program. Everything around (mutated inputs, aliased outputs, autocast, symbolic shapes) stays
AOTAutograd's.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..sizes import format_bytes
from .compilation import Compilation, Options, is_leaf
from .compilation import last_plan as last_plan

_frames: dict[int, tuple[Mapping[str, Any], set[Any]]] = {}  # by the options of one torch.compile: frames captured
_lock = threading.Lock()


def remat_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend as Dynamo calls it; `Options` says what `options` may hold."""
    chosen = Options.from_mapping(options or {})
    _warn_of_parts(options, chosen)
    symbolic = any(_is_symbolic(x) for x in example_inputs)
    made = _by_size(module, chosen) if symbolic else _compiled(module, list(example_inputs), chosen)
    call: Callable[..., Any] = torch._dynamo.disable(  # type: ignore[no-untyped-call]
        made, reason="gates are autograd nodes of their own"
    )
    return call


def _compiled(module: fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    compilation = Compilation(options, [is_leaf(x) for x in inputs])
    return compilation.gated(aot_autograd(**compilation.parts)(module, inputs))


def _is_symbolic(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes)


def _by_size(module: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """A graph of symbolic sizes: bytes depend on them, so each set of sizes gets a plan when it is first met."""
    made: dict[Any, Callable[..., Any]] = {}
    read = _read_numbers(module)

    def call(*args: Any) -> Any:
        numbers = {place: args[place].item() for place in read}
        key = (*((*a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args), *numbers.values())
        if key not in made:
            made[key] = _compiled(_with_numbers(module, numbers), list(args), options)
        return made[key](*args)

    return call


def _read_numbers(module: fx.GraphModule) -> list[int]:
    """Arguments that are numbers in the guise of tensors: the graph reads them with `item`."""
    places = module.graph.find_nodes(op="placeholder")
    return [k for k, p in enumerate(places) if any((u.op, u.target) == ("call_method", "item") for u in p.users)]


def _with_numbers(module: fx.GraphModule, numbers: Mapping[int, Any]) -> fx.GraphModule:
    """The graph with these numbers in place of reading them, which cannot be done on paper."""
    graph = copy.deepcopy(module.graph)
    places = graph.find_nodes(op="placeholder")
    for place, number in numbers.items():
        for read in [u for u in places[place].users if (u.op, u.target) == ("call_method", "item")]:
            for user in list(read.users):
                user.args, user.kwargs = pytree.tree_map(
                    partial(_instead_of, read, number), (user.args, user.kwargs), is_leaf=_is_node
                )
            graph.erase_node(read)
    return fx.GraphModule(module, graph)


def _instead_of(read: fx.Node, number: Any, value: Any) -> Any:
    return number if value is read else value


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _warn_of_parts(options: Mapping[str, Any] | None, chosen: Options) -> None:
    """A model that is captured in parts gets the budget for each of them: say so."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    if options is None or chosen.budget_bytes is None or compile_id is None:
        return
    with _lock:
        _, frames = _frames.setdefault(id(options), (options, set()))
        new = compile_id.frame_id not in frames
        frames.add(compile_id.frame_id)
        parts = len(frames)
    if new and parts > 1:
        warnings.warn(
            f"the model is captured as {parts} graphs so far, and the budget of {format_bytes(chosen.budget_bytes)} "
            f"holds for each of them alone, so that together they may take up to {parts} times as much; "
            "TORCH_LOGS=graph_breaks says where they part",
            stacklevel=2,
        )
