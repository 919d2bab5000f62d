"""Joint graphs of small functions, without the compiler's front end, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.graph.capture import CostModel, capture
from remat.graph.compilation import Compilation, Options, is_leaf
from remat.graph.graphs import Graph
from remat.graph.op_costs import measured


def joint(
    function: Callable[..., Any], *args: torch.Tensor, parameters: Sequence[int] = (), costs: CostModel = measured
) -> tuple[Graph, tuple[fx.Node, ...], fx.GraphModule]:
    """The captured joint graph of `function(*args)`, its FX nodes and its module."""
    found: list[Any] = []

    def partition(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        found.append((*capture(module, num_fwd_outputs, parameters=parameters, costs=costs), module))
        return default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

    def as_it_is(module: fx.GraphModule, _inputs: Any) -> Any:
        return _boxed(module)

    aot_function(function, fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)(*args)
    return found[0]


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return module(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def within(function: Callable[..., Any], args: Sequence[torch.Tensor], **options: Any) -> tuple[Any, Compilation]:
    """`function` as the backend compiles it, without the compiler's front end, and what it was compiled to."""
    context = torch._guards.TracingContext(FakeTensorMode())  # as the front end sets one up
    compilation = Compilation(Options.from_mapping(options), [is_leaf(x) for x in args])
    compiled = compilation.gated(aot_function(function, **compilation.parts))

    def call(*tensors: torch.Tensor) -> Any:
        with torch._guards.tracing(context):
            return compiled(*tensors)

    return call, compilation
