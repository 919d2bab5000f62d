"""Chen's strategies on training graphs: the same gradients, closed forms on chains, bytes that fall."""

from __future__ import annotations

import pytest
import torch

from graph.corpus import CASES, captured, case
from graph.running import run
from graph.test_liveness import chain_graph
from remat.graph.cuts import Forward
from remat.graph.graphs import Kind
from remat.graph.liveness import liveness, without_dead
from remat.graph.strategies import budgeted, names, recursive, sqrt, strategy


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_computes_the_same(name: str) -> None:
    graph = captured(name).graph
    expected = run(captured(name), case(name), without_dead(graph, graph.plain))
    assert set(expected) == {*graph.outputs, *graph.final_gradients}
    for each in names():
        found = run(captured(name), case(name), without_dead(graph, strategy(each)(graph)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in expected), each


@pytest.mark.parametrize("name", CASES)
def test_what_is_run_again(name: str) -> None:
    graph = captured(name).graph
    for each in names():
        program = without_dead(graph, strategy(each)(graph))
        again = [k for k in program.order if program.order.count(k) > 1]
        assert not set(again) & graph.backward
        assert all(graph.nodes[k].kind.repeatable for k in again)
        if each == "drop-cheap":
            assert {graph.nodes[k].kind for k in again} <= {Kind.CHEAP, Kind.VIEW}
        if each != "recursive":
            assert all(program.order.count(k) == 2 for k in again)


@pytest.mark.parametrize("length", [4, 9, 16, 25, 100])
def test_sqrt_on_a_chain(length: int) -> None:
    graph = chain_graph(length)
    program = without_dead(graph, sqrt.plan(graph))
    root = round(length**0.5)
    # Every stage but the last segment's and, of every segment, the last one, whose result nothing but the next reads.
    runs = len(program.order) - 2 * length
    assert runs == length - root - (root - 1)
    # The borders, one segment, the tangent and a new adjoint.
    assert liveness(graph, program).peak_bytes <= 10 * (2 * root + 2)


@pytest.mark.parametrize("length", [8, 64, 500])
def test_recursion_takes_memory_of_logarithmic_order(length: int) -> None:
    graph = chain_graph(length)
    program = without_dead(graph, recursive.plan(graph))
    levels = (length - 1).bit_length()
    assert liveness(graph, program).peak_bytes <= 10 * (levels + 4)
    assert len(program.order) - 2 * length <= length * levels


def test_algorithm_3_on_a_chain() -> None:
    forward = Forward.of(chain_graph(36))
    # 10 bytes a result: a segment is closed once more than 50 bytes are in it.
    assert budgeted.segments(forward, 50).cuts == (6, 12, 18, 24, 30)
    assert budgeted.segments(forward, 50).kept_bytes == 50
    assert budgeted.segments(forward, 50).largest_bytes == 60
    best = budgeted.search(forward)
    assert best.estimate_bytes == min(budgeted.segments(forward, b).estimate_bytes for b in range(0, 400, 5)) == 110


def test_algorithm_3_follows_bytes_where_sqrt_counts_layers() -> None:
    sizes = [1000, 1000, 1000, *[10] * 13]
    graph = chain_graph(16)
    storages = list(graph.storages)
    for k, size in enumerate(sizes):
        storages[graph.nodes[k + 2].storages[0]] = type(storages[0])(size)
    uneven = type(graph)(graph.nodes, tuple(storages), graph.inputs, graph.tangents, graph.outputs, graph.gradients)
    by_bytes, by_count = (
        liveness(uneven, without_dead(uneven, plan(uneven))).peak_bytes for plan in (budgeted.plan, sqrt.plan)
    )
    assert by_bytes < by_count


def test_bytes_fall_with_depth_as_they_should() -> None:
    def peaks(length: int) -> list[int]:
        graph = chain_graph(length)
        return [
            liveness(graph, without_dead(graph, strategy(each)(graph))).peak_bytes for each in ("sqrt", "recursive")
        ]

    (sqrt_small, recursive_small), (sqrt_large, recursive_large) = peaks(25), peaks(400)
    assert sqrt_large / sqrt_small == pytest.approx(4, rel=0.2)
    assert recursive_large - recursive_small <= 10 * 5


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="there are drop-cheap"):
        strategy("none")
