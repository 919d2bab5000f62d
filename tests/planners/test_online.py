"""The online planner: legal whenever the input ends, inside its budget, close to what knowing the length would give."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.chains import Chain, Stage, Tape
from remat.errors import InfeasibleBudget, UnsupportedChain
from remat.planners import hsm
from remat.planners.online import OnlinePlanner
from remat.schedules import Action, Advance
from remat.simulator import simulate


def carried_out(planner: OnlinePlanner, steps: int) -> list[Action]:
    actions = [action for k in range(steps) for action in planner.before_step(k)]
    return actions + list(planner.reverse(steps))


@given(steps=st.integers(1, 60), slots=st.integers(1, 9), keeps=st.booleans())
def test_whenever_the_input_ends_the_schedule_is_legal_and_costs_what_is_said(
    steps: int, slots: int, keeps: bool
) -> None:
    stage = Stage(1, (Tape(2, leaving_bytes=1),))
    planner = OnlinePlanner(stage, slots, caller_keeps_carry=keeps)
    simulation = simulate(Chain.repeat(stage, steps, caller_keeps_carry=keeps), carried_out(planner, steps))
    assert simulation.forward_runs == planner.forward_runs(steps)
    assert simulation.forward_runs >= hsm.cost(steps, slots)


@given(
    steps=st.integers(1, 40),
    sizes=st.tuples(*[st.integers(0, 5)] * 6),
    keeps=st.booleans(),
    extra=st.integers(0, 40),
)
def test_the_budget_holds_whatever_the_length(steps: int, sizes: tuple[int, ...], keeps: bool, extra: int) -> None:
    carry, tape, workspace, spare, entering, fixed = sizes
    entering = min(entering, carry)
    stage = Stage(
        carry,
        (Tape(tape, entering, carry, workspace_bytes=workspace, backward_workspace_bytes=carry + spare),),
        workspace_bytes=workspace,
    )
    known = Chain.repeat(stage, steps, caller_keeps_carry=keeps, parameter_gradient_bytes=fixed)
    with pytest.raises(InfeasibleBudget) as refused:
        OnlinePlanner.within(known, -1)
    budget = refused.value.smallest_budget_bytes + extra
    planner = OnlinePlanner.within(known, budget)
    assert simulate(known, carried_out(planner, steps)).peak_bytes <= budget


@pytest.mark.parametrize(
    ("slots", "at_1000", "beyond_100"),
    [(2, 1.02, 1.12), (5, 1.02, 1.05), (10, 1.03, 1.04), (20, 1.01, 1.03), (50, 1.01, 1.02)],
)
def test_it_is_nearly_as_good_as_if_the_length_were_known(slots: int, at_1000: float, beyond_100: float) -> None:
    planner = OnlinePlanner(Stage(1, (Tape(1),)), slots)
    ratios = []
    for k in range(2000):
        planner.before_step(k)
        ratios.append(planner.forward_runs(k + 1) / hsm.cost(k + 1, slots))
    assert ratios[999] <= at_1000
    assert max(ratios[99:]) <= beyond_100


def test_with_a_slot_for_every_carry_only_the_last_step_is_run_once_more() -> None:
    planner = OnlinePlanner(Stage(1, (Tape(1),)), 50)
    assert sum(isinstance(a, Advance) for a in carried_out(planner, 40)) == 40
    assert planner.forward_runs(40) == hsm.cost(40, 50) + 1


def test_the_backward_streams() -> None:
    planner = OnlinePlanner(Stage(1, (Tape(1),)), 30)
    for k in range(20_000):
        planner.before_step(k)
    assert len(list(islice(planner.reverse(20_000), 10))) == 10


def test_what_cannot_be_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        OnlinePlanner(Stage(1, (Tape(1),)), 0)
    planner = OnlinePlanner(Stage(1, (Tape(1),)), 3)
    planner.before_step(0)
    planner.before_step(1)
    with pytest.raises(ValueError, match="have not been run"):
        next(planner.reverse(1))
    with pytest.raises(UnsupportedChain, match="parameter_gradient_bytes"):
        OnlinePlanner.within(Chain.repeat(Stage(1, (Tape(1),), gradient_bytes=3), 4), 100)
