"""Unequal chains: against an exhaustive search over all legal schedules, and never over budget."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle_unequal import frontier
from remat.chains import Chain, Stage, Tape
from remat.errors import InfeasibleBudget
from remat.planners import _unequal_tables, planner
from remat.planners.unequal import plan, solve
from remat.schedules import Action, Advance, Backward, Drop, Record
from remat.simulator import simulate

SIZES = st.sampled_from([0, 0, 1, 1, 2, 3, 5])


@st.composite
def chains(draw: st.DrawFn, longest: int, sizes: st.SearchStrategy[int] = SIZES) -> Chain:
    """Chains whose tapes keep no more of a carry than there is and whose backward makes an adjoint and gradients."""
    length = draw(st.integers(1, longest))
    carry = [draw(sizes) for _ in range(length + 1)]
    stages = []
    for k in range(length):
        gradient = draw(st.sampled_from([0, 0, 0, 1, 4]))
        menu = [
            Tape(
                draw(sizes),
                entering_bytes=draw(st.sampled_from([0, carry[k], carry[k] // 2])),
                leaving_bytes=draw(st.sampled_from([0, carry[k + 1], carry[k + 1] // 2])),
                forward_s=draw(st.integers(0, 4)),
                backward_s=draw(st.integers(0, 4)),
                workspace_bytes=draw(sizes),
                backward_workspace_bytes=carry[k] + gradient + draw(sizes),
            )
            for _ in range(draw(st.integers(1, 2)))
        ]
        stages.append(Stage(carry[k], tuple(menu), draw(st.integers(0, 4)), draw(sizes), gradient))
    fixed = {name: draw(sizes) for name in ("output_bytes", "output_gradient_bytes", "parameter_gradient_bytes")}
    return Chain(tuple((stage, 1) for stage in stages), carry[-1], draw(st.booleans()), **fixed)


def _seconds(chain: Chain, budget: int) -> float:
    try:
        return simulate(chain, plan(chain, budget)).seconds
    except InfeasibleBudget:
        return float("inf")


def _random_chain(random: Random, length: int) -> Chain:
    """As in real networks: tapes are larger than carries, backward takes longer than forward."""
    carry = [random.randint(1, 4) for _ in range(length + 1)]
    stages = []
    for k in range(length):
        forward = random.randint(1, 4)
        whole = Tape(random.randint(2, 8), carry[k], 0, forward, 2 * forward, random.randint(0, 2), carry[k] + 1)
        lean = Tape(whole.tape_bytes // 2, carry[k], 0, forward, 3 * forward, 0, carry[k] + random.randint(1, 3))
        stages.append(Stage(carry[k], (whole, lean)[: random.randint(1, 2)], forward, random.randint(0, 2)))
    return Chain(tuple((stage, 1) for stage in stages), carry[-1], random.random() < 0.5)


@pytest.mark.parametrize(("length", "seed"), [(2, k) for k in range(12)] + [(3, k) for k in range(10)] + [(4, 1)])
def test_no_legal_schedule_is_better(length: int, seed: int) -> None:
    chain = _random_chain(Random(f"{length} {seed}"), length)
    best = frontier(chain)
    for found in best:
        assert _seconds(chain, found.peak_bytes) == found.seconds
    with pytest.raises(InfeasibleBudget) as refused:
        plan(chain, best[-1].peak_bytes - 1)
    assert refused.value.smallest_budget_bytes == best[-1].peak_bytes


@settings(max_examples=settings().max_examples // 4)
@given(chain=chains(3))
def test_only_schedules_of_another_kind_can_be_better(chain: Chain) -> None:
    for found in frontier(chain):
        ours = _seconds(chain, found.peak_bytes)
        assert ours >= found.seconds
        if not (_puts_a_backward_off(found.actions) or _drops_a_carry_early(found.actions)):
            assert ours == found.seconds


def _puts_a_backward_off(actions: tuple[Action, ...]) -> bool:
    """Whether something is run left of a stage that is recorded and still waits for its backward."""
    waiting: list[int] = []
    for action in actions:
        if isinstance(action, Advance | Record):
            if any(action.start < start for start in waiting):
                return True
            if isinstance(action, Record):
                waiting.append(action.start)
        elif isinstance(action, Backward):
            waiting.remove(action.start)
    return False


def _drops_a_carry_early(actions: tuple[Action, ...]) -> bool:
    """Whether a carry leaves its slot before its stage is recorded."""
    runs = [a for a in actions if isinstance(a, Advance | Record | Drop)]
    return any(
        isinstance(drop, Drop) and isinstance(run, Advance) and run.start <= drop.at for drop, run in pairwise(runs)
    )


@given(
    chain=chains(9, st.sampled_from([0, 1, 7, 1000, 1024, 10**6 + 1, 10**12])),
    share=st.floats(0, 1),
    units=st.sampled_from([3, 10, 100]),
)
def test_never_over_budget(chain: Chain, share: float, units: int) -> None:
    with pytest.raises(InfeasibleBudget) as refused:
        plan(chain, -1)
    least = refused.value.smallest_budget_bytes
    most = simulate(chain, planner("unequal")(chain, 10**15)).peak_bytes
    for budget in {least, int(least + share * max(0, most - least)), max(least, most - 1), max(least, most)}:
        solution = solve(chain, budget, units=units)
        simulation = simulate(chain, solution.schedule)
        assert simulation.peak_bytes <= solution.peak_bytes <= budget
        assert simulation.seconds == pytest.approx(solution.seconds)
        assert solution.lower_bound_s <= solution.seconds * (1 + 1e-9)


@given(chain=chains(8))
def test_when_everything_fits_nothing_is_run_twice(chain: Chain) -> None:
    simulation = simulate(chain, plan(chain, 10**6))
    assert simulation.forward_runs == chain.length
    assert simulation.seconds == sum(min(t.forward_s + t.backward_s for t in s.menu) for s, _ in chain.runs)


@settings(max_examples=settings().max_examples // 10)
@given(chain=chains(3))
def test_the_bound_holds_for_every_legal_schedule(chain: Chain) -> None:
    for found in frontier(chain):
        try:
            assert solve(chain, found.peak_bytes).lower_bound_s <= found.seconds + 1e-9
        except InfeasibleBudget:
            continue


def test_equal_segments_share_their_answer() -> None:
    random = Random(1)
    period = [stage for stage, _ in _random_chain(random, 3).runs]
    chain = Chain(tuple((stage, 1) for stage in period * 8), period[0].carry_bytes)
    slightly = Stage(period[0].carry_bytes, period[0].menu, period[0].forward_s + 2.0**-20, period[0].workspace_bytes)
    unequal = Chain(((slightly, 1), *chain.runs[1:]), chain.final_carry_bytes)
    for budget in (30, 50, 90):
        assert _seconds(chain, budget) == pytest.approx(_seconds(unequal, budget), abs=1e-4)


def test_a_long_chain_is_planned_with_some_of_its_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unequal_tables, "_TRIPLES", 20_000)
    chain = _random_chain(Random(7), 120)
    total = sum(stage.menu[0].tape_bytes for stage, _ in chain.runs)
    solution = solve(chain, total // 4, units=200)
    assert not solution.exact
    assert simulate(chain, solution.schedule).peak_bytes <= total // 4
    assert solution.gap < 0.05


def test_recorded_neighbours_become_one_range() -> None:
    stage = Stage(1, (Tape(2, entering_bytes=1, backward_workspace_bytes=1),))
    other = Stage(1, (Tape(3, entering_bytes=1, backward_workspace_bytes=1),))
    records = [a for a in plan(Chain(((stage, 4), (other, 3)), 1), 100) if isinstance(a, Record)]
    assert records == [Record(0, 7, 0)]
