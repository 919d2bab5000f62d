"""The local search: its bytes and seconds are the exact ones, and what it finds computes the same, in less time."""

from __future__ import annotations

import pytest
import torch

from graph.corpus import CASES, captured, case
from graph.running import run
from remat.graph.graphs import Kind
from remat.graph.inplace import planned
from remat.graph.inplace_ops import candidates
from remat.graph.liveness import liveness, without_dead
from remat.graph.refinement import Refiner
from remat.graph.strategies import names, strategy


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_seconds_are_the_exact_ones(name: str) -> None:
    graph, nodes, _ = captured(name)
    for taken in ({}, candidates(nodes)):
        for exist in (True, False):
            refiner = Refiner(graph, gradients_exist=exist, candidates=taken)
            for program in (graph.plain, *(strategy(each)(graph) for each in names())):
                peak_bytes, seconds = refiner.judged(without_dead(graph, program))
                again = refiner.reduced.program(refiner.reduced.units(without_dead(graph, program)))
                assert peak_bytes == planned(graph, again, taken, gradients_exist=exist)[1].peak_bytes
                assert seconds == pytest.approx(graph.seconds_of(again), abs=1e-9 * len(again.order))


@pytest.mark.parametrize("name", CASES)
def test_what_it_finds_computes_the_same_in_less_time(name: str) -> None:
    graph = captured(name).graph
    plain = without_dead(graph, graph.plain)
    expected = run(captured(name), case(name), plain)
    begin = without_dead(graph, strategy("sqrt")(graph))
    peak = liveness(graph, begin).peak_bytes
    budget = peak + (liveness(graph, plain).peak_bytes - peak) // 2
    found = Refiner(graph).refined([begin], budget)
    assert liveness(graph, found).peak_bytes <= max(budget, peak)
    assert graph.seconds_of(found) <= graph.seconds_of(begin)
    first = [k for k in dict.fromkeys(found.order) if graph.nodes[k].kind is Kind.RANDOM]
    assert first == [k for k in dict.fromkeys(plain.order) if graph.nodes[k].kind is Kind.RANDOM]
    got = run(captured(name), case(name), found)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def test_all_that_a_budget_has_room_for_is_kept() -> None:
    graph = captured("mlp").graph
    plain = without_dead(graph, graph.plain)
    begin = without_dead(graph, strategy("sqrt")(graph))
    assert graph.seconds_of(begin) > graph.seconds_of(plain)
    found = Refiner(graph).refined([begin], liveness(graph, plain).peak_bytes)
    assert graph.seconds_of(found) == graph.seconds_of(plain)
