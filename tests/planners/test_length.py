"""Length costs nothing: a million stages plan at once and stream in little memory."""

from __future__ import annotations

import time
import tracemalloc
from itertools import islice

import pytest

from remat.chains import Chain, Stage, Tape
from remat.planners import hsm, ism, planner
from remat.planners.room import Room, in_paper_units
from remat.schedules import Advance, Record
from remat.simulator import simulate

MILLION = 10**6


@pytest.mark.parametrize(("name", "cost"), [("hsm", hsm.cost), ("ism", ism.cost)])
def test_a_million_stages_with_a_hundred_slots(name: str, cost: object) -> None:
    chain, budget = in_paper_units(name, MILLION, 100)
    start = time.process_time()
    runs = 0
    for action in planner(name)(chain, budget):
        if type(action) is Advance or type(action) is Record:
            runs += action.stop - action.start
    assert time.process_time() - start < 8  # about 1.5 s on an idle core, which tests seldom have
    assert runs == cost(MILLION, 100)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["hsm", "ism", "constant", "sqrt", "keep-all", "recursive"])
def test_memory_does_not_grow_with_the_length(name: str) -> None:
    chain, budget = in_paper_units(name, MILLION, 100)
    budget += {"sqrt": 10_000, "keep-all": 10 * MILLION}.get(name, 0)
    tracemalloc.start()
    try:
        for _ in islice(planner(name)(chain, budget), 20_000):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000


@pytest.mark.parametrize("name", ["msm", "tight"])
def test_mixed_schedules_of_ten_thousand_stages(name: str) -> None:
    chain, budget = in_paper_units(name, 10**4, 1000, 5)
    planner(name)(*in_paper_units(name, 20, 5, 2))  # loads what was compiled
    start = time.process_time()
    schedule = planner(name)(chain, budget)
    next(iter(schedule))
    assert time.process_time() - start < 2  # about 0.25 s on an idle core
    assert simulate(chain, schedule).forward_runs == {"msm": 19800, "tight": 19799}[name]


def test_real_sizes_waste_little_room() -> None:
    """An LSTM-like cell in bytes without a useful common divisor: the budget is used to within a few carries."""
    stage = Stage(
        32_771, (Tape(123_457, entering_bytes=16_384, backward_workspace_bytes=70_001),), workspace_bytes=65_537
    )
    chain = Chain.repeat(stage, 1000, parameter_gradient_bytes=1_300_003)
    for budget in (6_000_000, 12_000_000, 60_000_000):
        found = simulate(chain, planner("tight")(chain, budget))
        assert budget - 4 * 32_771 - 0.02 * budget <= found.peak_bytes <= budget


@pytest.mark.parametrize(
    ("tape", "share", "runs_per_step"), [(81_924, 0.5, 1.5), (81_925, 0.8, 1.2), (4_479, 0.3, 1.71)]
)
def test_rounding_to_units_costs_little(tape: int, share: float, runs_per_step: float) -> None:
    """With half of the tapes every other stage is run twice, and so on; where carries take no more, nothing is lost."""
    stage = Stage(32_768, (Tape(tape, entering_bytes=32_768),))
    chain, keep = Chain.repeat(stage, 1000), int(share * 1000 * (tape + 32_768))
    room = Room.of(chain)
    budget = room.fixed_bytes + room.reserve_bytes + room.start_bytes + keep
    found = simulate(chain, planner("tight")(chain, budget))
    assert found.peak_bytes <= budget
    assert found.forward_runs <= runs_per_step * 1000
