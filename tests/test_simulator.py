"""The simulator: what it refuses, and that it counts as a reader of `remat.chains` would."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import bytes_alive
from remat.chains import Chain, Stage, Tape
from remat.errors import IllegalSchedule
from remat.planners import keep_all, planner, room
from remat.schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store
from remat.simulator import forward_runs_per_stage, simulate, timeline
from strategies import chains

STAGE = Stage(10, (Tape(30, entering_bytes=4, leaving_bytes=6),))
CHAIN = Chain.repeat(STAGE, 4)

REFUSED = [
    ((Advance(1, 2),), 0, "it needs carry 1, but the live carry is 0"),
    ((Record(0, 4), Backward(0, 4), Advance(0, 1)), 2, "it needs carry 0, but no carry is live"),
    ((Advance(0, 5),), 0, "not a range of stages within 0 … 4"),
    ((Advance(0, 0),), 0, "not a range of stages"),
    ((Record(3, 2),), 0, "not a range of stages"),
    ((Advance(0, 3), Record(3, 4), Backward(3, 4), Load(0), Advance(0, 4)), 4, "from 3 on is already done"),
    ((Store(1),), 0, "it is not the live carry"),
    ((Advance(0, 1), Store(1), Store(1)), 2, "it is stored already"),
    ((Load(2),), 0, "it is in no slot and ends no recorded range"),
    ((Advance(0, 1), Load(1)), 1, "it is in no slot"),
    ((Drop(0),), 0, "it is in no slot"),
    ((Record(0, 2, 1),), 0, "stage 0 has 1 menu entries, none with index 1"),
    ((Record(0, 2, -1),), 0, "none with index -1"),
    ((Record(0, 2), Load(0), Record(0, 1)), 2, "a part of it is recorded already"),
    ((Record(0, 2), Load(0), Record(0, 4)), 2, "a part of it is recorded already"),
    ((Record(0, 2), Load(0), Advance(0, 1), Record(1, 2)), 3, "a part of it is recorded already"),
    ((Record(0, 2), Backward(0, 2)), 1, "the adjoint at hand is that of carry 4"),
    ((Record(0, 4), Backward(1, 4)), 1, "it is not a recorded range"),
    ((Backward(3, 4),), 0, "it is not a recorded range"),
    ((), 0, "stages 0 … 3 have had no backward"),
    ((Advance(0, 2), Record(2, 4), Backward(2, 4)), 3, "stages 0 … 1 have had no backward"),
    ((Store(0), Record(0, 4), Backward(0, 4)), 3, r"carries \[0\] are still in slots"),
]


@pytest.mark.parametrize(("actions", "position", "reason"), REFUSED)
def test_refuses_with_action_position_and_reason(actions: tuple[Action, ...], position: int, reason: str) -> None:
    with pytest.raises(IllegalSchedule, match=reason) as caught:
        simulate(CHAIN, actions)
    assert caught.value.position == position
    assert caught.value.action == (actions[position] if position < len(actions) else None)
    assert str(caught.value).startswith(f"action {position}, ")
    with pytest.raises(IllegalSchedule, match=reason):
        list(timeline(CHAIN, actions))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_carry_zero_must_be_stored_if_the_caller_does_not_keep_it() -> None:
    alone = Chain.repeat(STAGE, 4, caller_keeps_carry=False)
    actions = (Advance(0, 3), Record(3, 4), Backward(3, 4), Load(0))
    with pytest.raises(IllegalSchedule, match="action 3, load 0: it is in no slot and ends no recorded range"):
        simulate(alone, actions)


def test_by_hand() -> None:
    """Every byte of a small schedule."""
    stage = Stage(10, (Tape(30, 4, 6, 1.5, 2.5, 7, 12),), 1.0, 5, 1)
    chain = Chain.repeat(stage, 3, output_bytes=100, output_gradient_bytes=50, parameter_gradient_bytes=20)
    actions = (Advance(0, 1), Store(1), Record(1, 3), Backward(1, 3), Drop(1), Load(0), Record(0, 1), Backward(0, 1))
    moments = list(timeline(chain, actions))
    first, grown = 110, 110 + 30 + 6 + 30 + 10  # the slot; two tapes with 6 bytes of the carry between them; carry 3
    fixed = 100 + 10 + 50 + 20
    assert [moment.bytes for moment in moments] == [
        first,
        first,
        grown,
        fixed + 10 + 10 + 2,  # the slot, the adjoint, gradients of two stages
        fixed + 10 + 2,
        fixed + 10 + 2,
        fixed + 10 + 2 + 30 + 10,
        fixed + 10 + 3,
    ]
    assert [moment.peak_bytes for moment in moments] == [
        100 + 10 + 5,
        first,
        grown + 4 + 7,  # carry 2 is whole until carry 3 is made
        grown + 50 + 20 + 12,
        fixed + 10 + 10 + 2,
        fixed + 10 + 2,
        fixed + 10 + 2 + 30 + 10 + 7,
        fixed + 10 + 2 + 30 + 6 + 12,
    ]
    assert [moment.end_s for moment in moments] == [1, 1, 4, 9, 9, 9, 10.5, 13]
    found = simulate(chain, actions)
    assert (found.peak_bytes, found.peak_position, found.seconds) == (grown + 82, 3, 13)
    assert (found.forward_runs, found.recorded_runs, found.actions) == (4, 3, 8)
    assert forward_runs_per_stage(chain, Schedule(3, "by hand", actions)).tolist() == [2, 1, 1]


@settings(max_examples=100)
@given(chain=chains(most_runs=4, most_stages=4), data=st.data())
def test_bytes_are_those_of_the_rules_written_down_again(chain: Chain, data: st.DataObject) -> None:
    """Runs are handled as a whole by the simulator, and stage by stage by the oracle."""
    name = data.draw(st.sampled_from(["constant", "sqrt", "recursive", "keep-all"]))
    most = max(keep_all.peak_bytes(chain, entry) for entry in keep_all.entries(chain))
    budget = max(most, room.smallest(chain).peak_bytes)
    budget -= data.draw(st.integers(0, budget // 2)) if name in ("sqrt", "recursive") else 0
    try:
        schedule = tuple(planner(name)(chain, budget))
    except ValueError:
        schedule = tuple(planner("keep-all")(chain, most))
    found = [(moment.bytes, moment.peak_bytes) for moment in timeline(chain, schedule)]
    assert found == list(bytes_alive(chain, schedule))
