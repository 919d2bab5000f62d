"""`torch.compile(model, backend="remat", options={"budget": "4GiB"})`: any model inside a budget, as one graph.

Dynamo hands over a graph, AOTAutograd makes the joint graph of it, and where it would split that into forward and
backward we put our own program. Everything around (mutated inputs, aliased outputs, autocast, symbolic shapes) stays
AOTAutograd's.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .compilation import Options
from .compilation import last_plan as last_plan
from .parts import Model, Part, StepPlan

_models: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()  # by what their options are
_newest: list[weakref.ref[Model]] = []
_lock = threading.Lock()


def last_step() -> StepPlan | None:
    """The plan of a step of the model that was compiled last, in one graph or several; None without a budget."""
    with _lock:
        model = _newest[0]() if _newest else None
    return None if model is None else model.step()


def remat_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend as Dynamo calls it; `Options` says what `options` may hold."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    reason = getattr(module, "compile_subgraph_reason", None)
    part = partial(
        _model_of(options).part,
        frame=object() if compile_id is None else compile_id.frame_id,
        followed=reason is not None and reason.graph_break,
    )
    symbolic = any(_is_symbolic(x) for x in example_inputs)
    made = _by_size(module, part) if symbolic else part(module, list(example_inputs))
    call: Callable[..., Any] = torch._dynamo.disable(  # type: ignore[no-untyped-call]
        made, reason="gates are autograd nodes of their own"
    )
    return call


def _model_of(options: Mapping[str, Any] | None) -> Model:
    """All graphs that are compiled with the same options are of one model."""
    chosen = Options.from_mapping(options or {})
    with _lock:
        model = _models.get(id(options))
        if model is None or model.asked is not options or model.options != chosen or options is None:
            model = _models[id(options)] = Model(chosen, options)
        _newest[:] = [weakref.ref(model)]
    return model


def _is_symbolic(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes)


def _by_size(module: fx.GraphModule, part: Callable[..., Part]) -> Callable[..., Any]:
    """A graph of symbolic sizes: bytes depend on them, so each set of sizes gets a plan when it is first met."""
    made: dict[Any, Part] = {}
    read = _read_numbers(module)

    def call(*args: Any) -> Any:
        numbers = {place: args[place].item() for place in read}
        key = (*((*a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args), *numbers.values())
        if key not in made:
            made[key] = part(_with_numbers(module, numbers), list(args))
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
