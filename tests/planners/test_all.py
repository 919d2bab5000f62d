"""One suite that every planner passes: legal schedules, inside the budget, that do what planners promise."""

from __future__ import annotations

import io

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remat.chains import Chain, Stage, Tape
from remat.errors import InfeasibleBudget, UnsupportedChain
from remat.planners import keep_all, names, planner, room
from remat.schedules import Backward, Record, Schedule
from remat.simulator import Simulation, forward_runs_per_stage, simulate
from strategies import chains

ANY_CHAIN = ("keep-all", "constant", "sqrt", "recursive")
REPEATED = ("hsm", "ism", "msm", "tight")
FEW = settings(max_examples=settings().max_examples * 2 // 5)
FEWER = settings(max_examples=settings().max_examples // 5)
KEEP_WHAT_FITS = ("keep-all", "sqrt", "ism", "msm", "tight")


def refused(name: str, chain: Chain, budget: int) -> InfeasibleBudget | None:
    try:
        planner(name)(chain, budget)
    except InfeasibleBudget as refusal:
        return refusal
    return None


def chains_for(name: str) -> st.SearchStrategy[Chain]:
    return st.one_of(chains(), chains(most_runs=4, most_stages=5)) if name in ANY_CHAIN else chains()


def judged(name: str, chain: Chain, budget: int) -> Simulation:
    schedule = planner(name)(chain, budget)
    assert schedule.length == chain.length
    found = simulate(chain, schedule)
    assert found.peak_bytes <= budget
    assert found.recorded_runs == chain.length  # with legality: each stage is recorded and consumed exactly once
    assert forward_runs_per_stage(chain, schedule).sum() == found.forward_runs
    return found


def budgets(chain: Chain) -> st.SearchStrategy[int]:
    most = max(keep_all.peak_bytes(chain, entry) for entry in keep_all.entries(chain))
    least = room.smallest(chain).peak_bytes
    return st.one_of(st.integers(0, most + 20), st.integers(min(least, most), max(least, most)))


@pytest.mark.parametrize("name", ANY_CHAIN + REPEATED)
@FEW
@given(data=st.data())
def test_legal_and_inside_the_budget_or_a_budget_that_works(name: str, data: st.DataObject) -> None:
    chain = data.draw(chains_for(name))
    budget = data.draw(budgets(chain))
    refusal = refused(name, chain, budget)
    if refusal is None:
        judged(name, chain, budget)
        return
    least = refusal.smallest_budget_bytes
    assert budget < least == sum(refusal.parts_bytes.values())
    assert all(size >= 0 for size in refusal.parts_bytes.values())
    found = judged(name, chain, least)
    assert found.peak_bytes == least or name in REPEATED
    assert refused(name, chain, least - 1) is not None


@pytest.mark.parametrize("name", KEEP_WHAT_FITS)
@FEWER
@given(chain=chains(most_entries=1))
def test_keeps_all_as_soon_as_all_fits(name: str, chain: Chain) -> None:
    budget = keep_all.peak_bytes(chain, 0)
    assert tuple(planner(name)(chain, budget)) == (Record(0, chain.length), Backward(0, chain.length))
    assert simulate(chain, planner(name)(chain, budget)).peak_bytes == budget


@pytest.mark.parametrize("name", REPEATED)
@FEWER
@given(data=st.data())
def test_more_memory_never_takes_longer(name: str, data: st.DataObject) -> None:
    chain = data.draw(chains())
    low, high = sorted((data.draw(budgets(chain)), data.draw(budgets(chain))))
    assume(low >= room.smallest(chain).peak_bytes)
    assert judged(name, chain, high).seconds <= judged(name, chain, low).seconds + 1e-9


@FEW
@given(chain=chains(), data=st.data())
def test_tight_is_never_slower_than_the_papers(chain: Chain, data: st.DataObject) -> None:
    budget = data.draw(budgets(chain))
    assume(budget >= room.smallest(chain).peak_bytes)
    best = judged("tight", chain, budget).seconds
    for name in ("hsm", "ism", "msm"):
        assert best <= judged(name, chain, budget).seconds + 1e-9


def test_an_entry_that_leaves_no_room_is_taken_one_by_one_where_that_is_faster() -> None:
    slow = Tape(0, forward_s=0.5, backward_s=1.5, workspace_bytes=20)
    fast = Tape(3, forward_s=0.5, backward_s=0.5, backward_workspace_bytes=3)
    chain = Chain.repeat(Stage(0, (slow, fast), forward_s=0.5, gradient_bytes=2), 3, parameter_gradient_bytes=300)
    budget = 310  # all of them as slow, or one as fast beside the gradients of two
    seconds = {name: judged(name, chain, budget).seconds for name in ("keep-all", "constant", "tight")}
    assert seconds == {"keep-all": 6.0, "constant": 4.5, "tight": 4.5}


@pytest.mark.parametrize("name", ANY_CHAIN + REPEATED)
@FEWER
@given(data=st.data())
def test_schedules_can_be_saved_printed_and_run_again(name: str, data: st.DataObject) -> None:
    chain = data.draw(chains_for(name))
    budget = max(room.smallest(chain).peak_bytes, keep_all.smallest(chain).peak_bytes) + 300
    refusal = refused(name, chain, budget)
    schedule = planner(name)(chain, refusal.smallest_budget_bytes if refusal else budget)
    once = tuple(schedule)
    assert tuple(schedule) == once
    file = io.StringIO()
    schedule.write_json(file)
    again = Schedule.from_json(file.getvalue())
    assert (tuple(again), again.length, again.planner) == (once, schedule.length, schedule.planner)
    assert len(schedule.text().splitlines()) == len(once)


@pytest.mark.parametrize("name", REPEATED)
def test_unequal_stages_are_refused_with_the_name_of_a_planner_that_takes_them(name: str) -> None:
    repeated = Chain.in_paper_units(3)
    other = Chain.in_paper_units(3, alpha=4)
    with pytest.raises(UnsupportedChain, match=f"planner '{name}' .* 2 kinds of stages; 'unequal' plans those"):
        planner(name)(Chain((*repeated.runs, *other.runs)), 100)


def test_a_planner_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no planner is called 'best'; there are tight, keep-all"):
        planner("best")


def test_the_registry_has_all_of_them() -> None:
    assert {*ANY_CHAIN, *REPEATED} <= set(names())
