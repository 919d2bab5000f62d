"""The optimal planners against brute force: all legal schedules of tiny chains, the plain recurrences of small ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import Sizes, dense_costs, fewest_forward_runs, hidden_states, internal_states, mixed_states
from remat.chains import Chain, Stage, Tape
from remat.planners import _curves, hsm, ism, planner
from remat.planners._tables import strategy
from remat.planners.room import Room, in_paper_units
from remat.simulator import simulate


@st.composite
def problems(draw: st.DrawFn, most_steps: int, most_keep: int) -> tuple[Sizes, int, int, bool]:
    """Sizes, steps, bytes to keep, and whether the caller keeps carry 0."""
    carry = draw(st.integers(1, 4))
    kept = st.integers(0, carry)
    sizes = Sizes(carry, draw(st.integers(0, 6)), draw(kept), draw(kept))
    return sizes, draw(st.integers(1, most_steps)), draw(st.integers(0, most_keep)), draw(st.booleans())


def room_of(sizes: Sizes, steps: int, free_start: bool) -> tuple[Chain, Room]:
    stage = Stage(sizes.carry, (Tape(sizes.tape, sizes.entering, sizes.leaving),))
    chain = Chain.repeat(stage, steps, caller_keeps_carry=free_start)
    return chain, Room.of(chain)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(problems(most_steps=5, most_keep=24))
def test_tight_equals_the_best_of_all_legal_schedules(problem: tuple[Sizes, int, int, bool]) -> None:
    sizes, steps, keep, free_start = problem
    chain, room = room_of(sizes, steps, free_start)
    runs, actions = strategy(room, keep, tight=True)
    found = simulate(chain, actions())
    assert found.forward_runs == runs
    assert found.peak_bytes <= room.fixed_bytes + room.reserve_bytes + room.start_bytes + keep
    assert runs == fewest_forward_runs(sizes, steps, keep + room.start_bytes, free_start=free_start)


@settings(max_examples=settings().max_examples // 4)
@given(problems(most_steps=90, most_keep=50))
def test_curves_equal_the_plain_recurrence(problem: tuple[Sizes, int, int, bool]) -> None:
    sizes, steps, keep, free_start = problem
    chain, room = room_of(sizes, steps, free_start)
    runs, actions = strategy(room, keep, tight=True)
    assert simulate(chain, actions()).forward_runs == runs
    assert runs == dense_costs(sizes, steps, keep, free_start=free_start)


@given(st.lists(st.integers(1, 5), max_size=20), st.lists(st.integers(1, 5), max_size=20))
def test_the_lower_of_two_curves(left: list[int], right: list[int]) -> None:
    def curve(slopes: list[int]) -> _curves.Curve:
        values = np.cumsum([1, *slopes]).tolist()
        return np.array([(k + 1, v, s) for k, (v, s) in enumerate(zip(values, [*slopes, _curves.NEVER], strict=True))])

    lowest = _curves.lower(curve(left), curve(right))
    for t in range(23):
        expected = min(_curves.value(curve(left), t), _curves.value(curve(right), t))
        assert _curves.value(lowest, t) == expected


@pytest.mark.parametrize("slots", range(1, 12))
def test_closed_forms_equal_the_printed_recurrences(slots: int) -> None:
    for steps in range(1, 60):
        assert hsm.cost(steps, slots) == hidden_states(steps, slots)
        assert ism.cost(steps, slots) == internal_states(steps, slots)


@pytest.mark.parametrize("alpha", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 13, 40])
def test_msm_equals_the_printed_recurrence(slots: int, alpha: int) -> None:
    for steps in (1, 2, 3, 7, 20, 41):
        chain, budget = in_paper_units("msm", steps, slots, alpha)
        found = simulate(chain, planner("msm")(chain, budget)).forward_runs
        assert found == mixed_states(steps, slots, alpha)
        chain, budget = in_paper_units("tight", steps, slots, alpha)
        assert simulate(chain, planner("tight")(chain, budget)).forward_runs <= found
