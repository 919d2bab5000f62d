"""The tables of all rooms: what each single room's own table says."""

from __future__ import annotations

import pytest

from remat.chains import Chain, Stage, Tape
from remat.planners import planner
from remat.planners._every_room import forward_runs
from remat.planners._tables import strategy
from remat.planners.room import Room
from remat.simulator import simulate
from remat.tradeoff import tradeoff


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize(("steps", "alpha"), [(1, 2), (2, 1), (9, 3), (60, 5), (200, 2)])
def test_every_room_costs_what_its_own_table_says(steps: int, alpha: int, tight: bool) -> None:
    room = Room.of(Chain.in_paper_units(steps, alpha))
    unit, found = forward_runs(room, 500, tight=tight)
    costs = list(found)
    assert unit == 1
    assert costs[-1][1] == steps
    for keep, runs in costs[:: max(1, len(costs) // 30)]:
        assert strategy(room, keep, tight=tight)[0] == runs


@pytest.mark.parametrize("carry", [0, 1000])
@pytest.mark.parametrize("keeps", [True])
def test_a_curve_promises_nothing_that_planning_does_not_keep(carry: int, keeps: bool) -> None:
    tapes = (
        Tape(2500, entering_bytes=carry, forward_s=1.5, backward_s=2, backward_workspace_bytes=carry),
        Tape(900, entering_bytes=carry, forward_s=1, backward_s=3, workspace_bytes=300),
    )
    chain = Chain.repeat(Stage(carry, tapes), 130, caller_keeps_carry=keeps)
    curve = tradeoff(chain, units=60)
    for budget, seconds in list(curve)[:: max(1, len(curve) // 3)]:
        simulation = simulate(chain, planner("tight")(chain, budget))
        assert simulation.peak_bytes <= budget
        assert simulation.seconds <= seconds * (1 + 1e-12)
