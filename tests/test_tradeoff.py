"""The curve of bytes against seconds: what planning each of its budgets by itself gives."""

from __future__ import annotations

import numpy as np
import pytest

from remat.chains import Chain, Stage, Tape
from remat.errors import InfeasibleBudget
from remat.planners import planner
from remat.simulator import simulate
from remat.tradeoff import tradeoff


def network(length: int, *, caller_keeps_carry: bool = True) -> Chain:
    random = np.random.default_rng(length)
    stages = []
    for _ in range(length):
        carry, tape, forward = (int(random.integers(1, most)) for most in (4, 9, 5))
        whole = Tape(
            tape, entering_bytes=carry, forward_s=forward, backward_s=2 * forward, backward_workspace_bytes=carry
        )
        lean = Tape(tape // 2, entering_bytes=carry, forward_s=forward, backward_s=3 * forward, workspace_bytes=1)
        stages.append((Stage(carry, (whole, lean), forward_s=forward), 1))
    return Chain(tuple(stages), 2, caller_keeps_carry=caller_keeps_carry, output_bytes=1, parameter_gradient_bytes=3)


@pytest.mark.parametrize("length", [1, 2, 5, 12])
@pytest.mark.parametrize("keeps", [True, False])
def test_every_budget_costs_what_planning_it_says(length: int, keeps: bool) -> None:
    chain = network(length, caller_keeps_carry=keeps)
    curve = tradeoff(chain)
    assert curve.exact
    for budget in range(curve.smallest_budget_bytes, curve.largest_budget_bytes + 3):
        assert simulate(chain, planner("unequal")(chain, budget)).seconds == curve.at(budget)
    with pytest.raises(InfeasibleBudget) as refused:
        planner("unequal")(chain, curve.smallest_budget_bytes - 1)
    assert refused.value.smallest_budget_bytes == curve.smallest_budget_bytes
    assert curve.at(curve.smallest_budget_bytes - 1) == float("inf")


def test_it_goes_down_from_the_smallest_budget_to_keeping_all() -> None:
    chain = network(40)
    curve = tradeoff(chain, units=50)
    assert not curve.exact
    assert (np.diff(curve.budgets_bytes) > 0).all()
    assert (np.diff(curve.seconds) < 0).all()
    assert curve.seconds[-1] == sum(min(t.forward_s + t.backward_s for t in stage.menu) for stage, _ in chain.runs)
    for budget, seconds in curve:
        simulation = simulate(chain, planner("unequal")(chain, budget))
        assert simulation.peak_bytes <= budget
        assert simulation.seconds <= seconds * 1.1


def test_the_knee_lies_between_the_ends_and_below_the_line_between_them() -> None:
    curve = tradeoff(network(40))
    budget, seconds = curve.knee
    assert curve.smallest_budget_bytes < budget < curve.largest_budget_bytes
    assert curve.at(budget) == seconds
    assert seconds < np.sqrt(curve.seconds[0] * curve.seconds[-1])


def test_where_there_is_no_choice_there_is_one_point() -> None:
    curve = tradeoff(Chain(((Stage(1, (Tape(2, backward_workspace_bytes=1),)), 1),), 1))
    assert len(curve) == 1
    assert curve.knee == (curve.smallest_budget_bytes, 3.0)


def test_a_repeated_stage_of_any_count() -> None:
    stage = Stage(10, (Tape(40, entering_bytes=10, backward_workspace_bytes=10),))
    few, many = tradeoff(Chain.repeat(stage, 300)), tradeoff(Chain.repeat(stage, 3000))
    assert len(few) > 100
    for curve, count in ((few, 300), (many, 3000)):
        assert curve.seconds[-1] == 3 * count
        assert curve.at(curve.smallest_budget_bytes) > curve.seconds[-1]
    budget, seconds = few.knee
    chain = Chain.repeat(stage, 300)
    assert simulate(chain, planner("tight")(chain, budget)).seconds <= seconds


def test_a_quick_curve_promises_no_more_than_the_whole_one() -> None:
    chain = Chain.repeat(Stage(32, (Tape(88, 32, backward_workspace_bytes=32),)), 120)
    quick, whole = tradeoff(chain, quick=True), tradeoff(chain)
    assert not quick.exact
    assert (quick.smallest_budget_bytes, quick.largest_budget_bytes) == (
        whole.smallest_budget_bytes,
        whole.largest_budget_bytes,
    )
    for budget, seconds in quick:
        assert whole.at(budget) <= seconds * (1 + 1e-12) <= 1.3 * whole.at(budget)
    assert len(tradeoff(Chain.repeat(chain.stage(0), 10**9), quick=True)) > 50
