"""Programs carried out naively: a dictionary of values, each dropped after its last use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graph.corpus import Captured, Case
from remat.graph.emission import emit
from remat.graph.graphs import Kind, Program
from remat.graph.liveness import uses
from remat.graph.lowering import straight


def run(captured: Captured, case: Case, program: Program) -> dict[int, torch.Tensor]:
    """Outputs and gradients, by node; a random operator draws the same numbers each time."""
    graph, nodes, _ = captured
    last = uses(graph, program).last
    values: dict[fx.Node, Any] = dict(zip([nodes[k] for k in graph.inputs], case.args, strict=True))
    values |= {node: _constant(node) for node in nodes if node.op == "get_attr"}
    states: dict[int, torch.Tensor] = {}
    kept: dict[int, torch.Tensor] = {}
    torch.manual_seed(0)
    with torch.no_grad():
        for step, index in enumerate(program.order):
            if step == program.forward_steps:
                values |= {nodes[k]: _tangent(nodes[k]) for k in graph.tangents}
            node = nodes[index]
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if graph.nodes[index].kind is Kind.RANDOM:
                torch.set_rng_state(states.setdefault(index, torch.get_rng_state()))
            values[node] = node.target(*args, **kwargs)
            del args, kwargs
            if (index in graph.outputs and step < program.forward_steps) or index in graph.final_gradients:
                kept[index] = values[node]
            for gone in last[step]:
                values.pop(nodes[gone])
    return kept


def emitted(
    captured: Captured, case: Case, program: Program, in_place: Mapping[int, int] | None = None
) -> dict[int, torch.Tensor]:
    """The same by the code that is emitted for it."""
    graph, nodes, joint = captured
    halves = emit(joint, nodes, graph, program, len(graph.outputs), in_place)
    forward, backward = map(straight, halves)
    del halves
    torch.manual_seed(0)
    with torch.no_grad():
        results = list(forward(list(case.args)))
        found = dict(zip(graph.outputs, results, strict=False))
        results[: len(graph.outputs)] = []
        results += [_tangent(nodes[k]) for k in graph.tangents]
        gradients = backward(results)
    return found | {k: g for k, g in zip(graph.gradients, gradients, strict=False) if k is not None}


def _constant(node: fx.Node) -> Any:
    return getattr(node.graph.owning_module, str(node.target))


def _tangent(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.linspace(-1, 1, value.numel()).reshape(value.shape)
