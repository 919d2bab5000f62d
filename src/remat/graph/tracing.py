"""The joint graph of a model, traced with fake tensors: nothing is run, nothing allocated, no parameter touched."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..errors import RematError
from .capture import CostModel, capture, changed_inputs
from .dropout import decompositions
from .graphs import Graph
from .op_costs import measured


class _Found(Exception):  # no error: how tracing ends before anything is compiled
    """Carries the joint graph out of AOTAutograd."""

    def __init__(self, module: fx.GraphModule, outputs: int) -> None:
        self.module, self.outputs = module, outputs
        super().__init__("the joint graph is there")


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, costs: CostModel = measured
) -> tuple[Graph, tuple[fx.Node, ...]]:
    """The training graph of `model(*args, **kwargs)`, and the FX node of each of its nodes.

    Args:
        model: as it is to be trained: its mode, and which parameters need a gradient, count.
        args: real or fake tensors, and whatever else the model takes; so are `kwargs`.
        costs: `op_costs.measured`, which runs each kind of operator once or a few times, or `op_costs.estimated`.

    Raises:
        RematError: no output needs a gradient.
    """
    from torch._functorch.aot_autograd import aot_function

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = list(state)
    leaves, structure = pytree.tree_flatten((args, kwargs or {}))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        given, named = pytree.tree_unflatten(filled, structure)
        result = torch.func.functional_call(model, dict(zip(names, tensors, strict=False)), given, named)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def found(module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> NoReturn:
        raise _Found(module, num_fwd_outputs)

    tensors = (*state.values(), *(leaves[place] for place in places))
    try:
        traced = aot_function(function, _as_it_is, partition_fn=found, decompositions=decompositions())
        traced(*tensors)
    except _Found as result:
        parameters = [k for k, name in enumerate(names) if isinstance(state[name], nn.Parameter)]
        changed = changed_inputs(result.module)
        return capture(result.module, result.outputs, parameters=parameters, changed=changed, costs=costs)
    raise RematError("no output of the model needs a gradient: there is no backward, and nothing to recompute for it")


def _as_it_is(gm: fx.GraphModule, example_inputs: Any) -> Any:  # noqa: ARG001  # the names are AOTAutograd's
    """Called for a graph without backward only."""
    return gm.forward
