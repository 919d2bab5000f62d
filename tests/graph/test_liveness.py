"""Bytes of a program: closed forms on hand-made graphs, and what the kernels of a captured one really allocate."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
from torch.nn import functional as F

import remat
from graph.joint import joint
from remat.graph.graphs import Graph, Kind, Node, Program, Storage
from remat.graph.liveness import liveness, uses, without_dead


def chain_graph(length: int, size: int = 10, *, fresh_gradients: bool = False) -> Graph:
    """x → a1 → … → aL, and adjoints g(L−1) … g0 of which g(k) needs g(k+1) and a(k); all of one size."""
    nodes = [Node("x", "", Kind.INPUT, storages=(0,)), Node("tangent", "", Kind.INPUT, storages=(1,))]
    storages = [Storage(size, external=True), Storage(size)]
    last = 0
    for k in range(length):
        storages.append(Storage(size))
        nodes.append(Node(f"a{k + 1}", "", Kind.CHEAP, (last,), (len(storages) - 1,), (len(storages) - 1,), seconds=1))
        last = len(nodes) - 1
    output, adjoint = last, 1
    for k in reversed(range(length)):
        storages.append(Storage(size))
        place = len(storages) - 1
        nodes.append(Node(f"g{k}", "", Kind.CHEAP, (adjoint, 0 if k == 0 else k + 1), (place,), (place,), seconds=1))
        adjoint = len(nodes) - 1
    parameters = frozenset((0,)) if fresh_gradients else frozenset()
    return Graph(tuple(nodes), tuple(storages), (0,), (1,), (output,), (adjoint,), parameters)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_chain_keeps_what_its_backward_needs(length: int) -> None:
    graph = chain_graph(length)
    found = liveness(graph, graph.plain)
    # At the first backward: all of a1 … aL, the tangent and the new adjoint.
    assert found.peak_bytes == 10 * (length + 2)
    assert found.after[-1] == 20  # the output and the gradient of x
    assert graph.seconds_of(graph.plain) == 2 * length


def test_values_made_again_are_not_kept() -> None:
    graph = chain_graph(3)
    a1, a2, a3, g2, g1, g0 = range(2, 8)
    program = Program((a1, a2, a3, a1, a2, g2, a1, g1, g0), 3)
    found = liveness(graph, program)
    assert uses(graph, program).saved == (0,)  # x, which the caller holds
    assert found.after[2] == 10  # a3, which is returned
    assert max(found.during[3:]) == 10 * 4  # a3, tangent, a2, g2
    assert found.peak_bytes == 40


def test_executions_without_use_are_left_out() -> None:
    graph = chain_graph(3)
    a1, a2, a3, g2, g1, g0 = range(2, 8)
    program = Program((a1, a2, a3, a1, a2, a3, g2, g1, g0), 3)
    assert without_dead(graph, program) == Program((a1, a2, a3, a1, a2, g2, g1, g0), 3)


def test_gradients_of_parameters_go_where_there_is_a_place_for_them() -> None:
    graph = chain_graph(2, fresh_gradients=True)
    assert liveness(graph, graph.plain).after[-1] == 20
    assert liveness(graph, graph.plain, gradients_exist=True).after[-1] == 10


def test_a_graph_survives_json() -> None:
    graph = chain_graph(3)
    assert msgspec.json.decode(msgspec.json.encode(graph), type=Graph) == graph


def small(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = F.dropout(F.gelu(F.layer_norm(x @ w, [64])), 0.5)
    return F.softmax(h.view(-1, 2, 32).transpose(1, 2) @ h.view(-1, 2, 32), -1).sum() + (h @ v).square().mean()


def arguments() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(96, 64), torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)


def test_capture_knows_views_and_random_operators() -> None:
    graph, _, _ = joint(small, *arguments(), parameters=(1, 2))
    kinds = Counter(node.kind for node in graph.nodes)
    assert kinds[Kind.RANDOM] == 1
    assert kinds[Kind.EXPENSIVE] >= 3 + 6 - 1  # three products, of which one needs no gradient of x
    for node in graph.nodes:
        if node.kind is Kind.VIEW:
            sources = [graph.nodes[k] for k in node.inputs]
            assert not node.fresh
            assert set(node.storages) <= {s for source in sources for s in source.storages}
    assert [g is not None for g in graph.gradients] == [False, True, True]
    assert graph.parameters == {graph.inputs[1], graph.inputs[2]}
    assert not set(graph.forward) & graph.backward


def test_predicted_bytes_are_those_of_the_kernels() -> None:
    args = arguments()
    graph, fx_nodes, _ = joint(small, *args, parameters=(1, 2))
    program = without_dead(graph, graph.plain)
    last = uses(graph, program).last
    tangent = torch.ones(())

    def run() -> list[object]:
        values: dict[object, object] = dict(zip([fx_nodes[k] for k in graph.inputs], args, strict=True))
        values[fx_nodes[graph.tangents[0]]] = tangent
        kept: list[object] = []
        with torch.no_grad():
            for step, index in enumerate(program.order):
                node = fx_nodes[index]
                take = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*take[0], **take[1])
                del take
                if index in graph.outputs or index in graph.final_gradients:
                    kept.append(values[node])
                for gone in last[step]:
                    values.pop(fx_nodes[gone])
        return kept

    run()
    measured = remat.measure(run).peak_bytes
    assert liveness(graph, program).peak_bytes == pytest.approx(measured, rel=0.01)
