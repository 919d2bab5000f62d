"""Segments: each is run again by itself, what its backward reads is at hand there; and plans made of them."""

from __future__ import annotations

import pytest

from graph.corpus import CASES, captured
from graph.joint import joint
from graph.networks import functional, networks
from remat.errors import InfeasibleBudget
from remat.graph.graphs import Graph, Kind
from remat.graph.liveness import liveness, without_dead
from remat.graph.op_costs import estimated
from remat.graph.planning import Planner, reserve_bytes, with_reserve
from remat.graph.programs import program
from remat.graph.segments import roots, segment, summed
from remat.graph.strategies import names, strategy
from remat.plans import plan

NETWORKS = tuple(networks())


def graph_of(name: str) -> Graph:
    if name in CASES:
        return captured(name).graph
    model, example = networks()[name]
    function, tensors = functional(model)
    count = sum(1 for _ in model.parameters())
    return joint(function, *tensors, example, parameters=range(count), costs=estimated)[0]


@pytest.mark.parametrize("name", [*CASES, *NETWORKS])
def test_the_backward_of_a_segment_reads_what_is_at_hand_there(name: str) -> None:
    graph = graph_of(name)
    found, made_by = segment(graph), roots(graph)
    part_of = {k: number for number, part in enumerate(found.backward) for k in part}
    needed = [k for k in graph.needed_for(tuple(graph.final_gradients)) if k in graph.backward]
    assert sorted(part_of) == needed
    for k, part in part_of.items():
        assert all(part_of[source] >= part for source in graph.nodes[k].inputs if source in part_of)
        todo = [source for source in graph.nodes[k].inputs if source not in graph.backward]
        while todo:
            source = todo.pop()
            inside = [root for root in made_by[source] if root in found.stage_of]
            if not inside and graph.nodes[source].kind is not Kind.INPUT:
                todo += graph.nodes[source].inputs  # made for the backward alone, from what is at hand
            for root in inside:
                assert found.stage_of[root] >= part or root in found.carries[part] | found.kept


@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_runs_no_more_than_the_schedule_that_it_carries_out(name: str) -> None:
    graph = graph_of(name)
    planner = Planner(graph, gradients_exist=True)
    with pytest.raises(InfeasibleBudget) as refused:
        plan(planner.chain, 1)
    smallest = refused.value.smallest_budget_bytes
    everything = plan(planner.chain, 2**40).peak_bytes
    for share in (0.2, 0.5, 0.8):
        made = plan(planner.chain, smallest + int(share * (everything - smallest)))
        found = program(planner.segments, made.schedule, planner.tapes)
        assert graph.seconds_of(found) <= 1.03 * made.simulation.seconds


@pytest.mark.parametrize("name", [*CASES, *NETWORKS])
def test_more_room_never_makes_a_slower_plan(name: str) -> None:
    graph = graph_of(name)
    known = Planner(graph, gradients_exist=True)
    smallest, largest = known.smallest_bytes, known.plain_bytes
    before_s = float("inf")
    for step in range(11):
        budget = smallest + (largest - smallest) * step // 10
        found = Planner(graph, gradients_exist=True).plan(budget)  # knows of no other budget
        assert found.peak_bytes <= budget
        assert found.seconds <= before_s * (1 + 1e-9)
        before_s = found.seconds
    assert before_s == known.plain[2]


@pytest.mark.parametrize("name", [*CASES, *NETWORKS])
def test_no_strategy_of_chen_needs_less_or_is_faster_in_as_much(name: str) -> None:
    graph = graph_of(name)
    planner = Planner(graph, gradients_exist=True)
    programs = [without_dead(graph, strategy(each)(graph)) for each in names()]
    peaks = [liveness(graph, program, gradients_exist=True).peak_bytes for program in programs]
    smallest = planner.smallest_bytes
    assert smallest - reserve_bytes(smallest) <= min(peaks)
    assert planner.plan(smallest).peak_bytes <= smallest
    for made, peak_bytes in zip(programs, peaks, strict=True):
        assert planner.plan(with_reserve(peak_bytes)).seconds <= graph.seconds_of(made) * (1 + 1e-9)


def test_sums_over_segments_are_known() -> None:
    graph = graph_of("lstm")
    found = segment(graph)
    sums = summed(found)
    assert set(sums) == {g for g, mine in graph.final_gradients.items() if mine}  # all weights are used in every step
    assert not summed(segment(graph_of("mlp")))
