"""The mixed-integer optimum: against exhaustive search over programs, and as the yardstick of Chen's strategies."""

from __future__ import annotations

import heapq
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.corpus import TINY, captured, case
from graph.running import run
from graph.test_liveness import chain_graph
from remat.errors import InfeasibleBudget
from remat.graph.graphs import Graph, Kind, Storage
from remat.graph.liveness import liveness, without_dead
from remat.graph.optimum import least_bytes, optimum
from remat.graph.planning import Planner, reserve_bytes
from remat.graph.strategies import names, strategy


def exhaustive_s(graph: Graph, budget_bytes: int, *, in_order: bool) -> float | None:
    """The least time of any program, by Dijkstra over what is alive; graphs without views, each node a storage.

    First executions come in the graph's order, or in any.
    """
    nodes = graph.nodes
    calls = [k for k, node in enumerate(nodes) if node.kind is not Kind.INPUT]
    size = [0 if graph.storages[n.storages[0]].external else graph.storages[n.storages[0]].bytes for n in nodes]
    end = frozenset(graph.outputs) | frozenset(graph.final_gradients)
    start = frozenset(graph.inputs)
    best: dict[object, float] = {}
    todo: list[tuple[float, int, frozenset[int], frozenset[int], bool]] = [(0.0, 0, start, frozenset(), False)]
    count = 0
    while todo:
        seconds, _, alive, done, turned = heapq.heappop(todo)
        if best.get((alive, done, turned), float("inf")) <= seconds:
            continue
        best[alive, done, turned] = seconds
        if end <= alive and turned:
            return seconds
        moves = []
        if not turned and alive.issuperset(graph.outputs):
            moves.append((seconds, alive | frozenset(graph.tangents), done, True, False))
        for k in calls:
            first = k not in done
            late = in_order and first and any(other not in done for other in calls if other < k)
            if not late and k not in alive and alive.issuperset(nodes[k].inputs):
                moves.append((seconds + nodes[k].seconds, alive | {k}, done | {k}, turned, True))
        for after_s, held, ran, has_turned, runs in moves:
            if runs and sum(size[k] for k in held) > budget_bytes:
                continue
            stays = (
                start | (frozenset(graph.outputs) if has_turned else frozenset()) | (end & held - set(graph.outputs))
            )
            free = held - stays
            for kept in chain.from_iterable(combinations(sorted(free), n) for n in range(len(free) + 1)):
                count += 1
                heapq.heappush(todo, (after_s, count, frozenset(stays & held) | frozenset(kept), ran, has_turned))
    return None


def resized(graph: Graph, sizes: list[int], seconds: list[int]) -> Graph:
    """The graph with other bytes and times."""
    fixed = tuple(Storage(size, one.external) for size, one in zip(sizes, graph.storages, strict=True))
    nodes = []
    for node, cost in zip(graph.nodes, seconds, strict=True):
        fields = {name: getattr(node, name) for name in node.__struct_fields__}
        nodes.append(type(node)(**(fields | {"seconds": cost if node.inputs else 0})))
    return Graph(tuple(nodes), fixed, graph.inputs, graph.tangents, graph.outputs, graph.gradients, graph.parameters)


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=8, max_size=8),
    seconds=st.lists(st.integers(1, 4), min_size=8, max_size=8),
)
def test_the_optimum_is_that_of_exhaustive_search(sizes: list[int], seconds: list[int]) -> None:
    graph = resized(chain_graph(3), sizes, seconds)
    plain = liveness(graph, without_dead(graph, graph.plain)).peak_bytes
    for budget in range(plain - 2, plain + 1):
        strict, free = (exhaustive_s(graph, budget, in_order=order) for order in (True, False))
        if strict is None:
            with pytest.raises(InfeasibleBudget) as error:
                optimum(graph, budget)
            assert error.value.smallest_budget_bytes > budget
            continue
        found = optimum(graph, budget)
        assert free <= found.seconds <= strict
        assert found.seconds == graph.seconds_of(found.program)
        assert liveness(graph, found.program).peak_bytes <= budget


def test_the_least_bytes_of_a_chain() -> None:
    graph = chain_graph(5)
    assert least_bytes(graph) == 40  # the output, the tangent or an adjoint, a result, the new adjoint
    assert exhaustive_s(graph, 40, in_order=True) == optimum(graph, 40).seconds
    with pytest.raises(InfeasibleBudget, match="40 bytes"):
        optimum(graph, 39)


@pytest.mark.parametrize("name", TINY)
def test_no_strategy_beats_it(name: str) -> None:
    graph = captured(name).graph
    plain = without_dead(graph, graph.plain)
    expected = run(captured(name), case(name), plain)
    programs = [without_dead(graph, strategy(each)(graph)) for each in names()]
    for budget in {liveness(graph, program).peak_bytes for program in programs}:
        found = optimum(graph, budget)
        beaten = min(graph.seconds_of(p) for p in programs if liveness(graph, p).peak_bytes <= budget)
        assert found.seconds <= beaten * (1 + 1e-3)
        assert liveness(graph, found.program).peak_bytes <= budget
    got = run(captured(name), case(name), found.program)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


@pytest.mark.parametrize("name", TINY)
def test_the_planner_comes_within_three_percent(name: str) -> None:
    graph = captured(name).graph
    planner = Planner(graph, gradients_exist=True)
    smallest, largest = planner.smallest_bytes, planner.plain_bytes
    for budget in {smallest, (smallest + largest) // 2, largest}:
        planned = planner.plan(budget)
        found = optimum(graph, budget - reserve_bytes(budget), gradients_exist=True)
        assert planned.peak_bytes <= budget
        assert planned.seconds <= found.seconds * 1.03
        assert liveness(graph, found.program, gradients_exist=True).peak_bytes <= budget
