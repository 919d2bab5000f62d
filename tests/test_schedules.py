"""Schedules: text, JSON, and that they stream."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest

from remat.schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store

ACTIONS = (Store(0), Advance(0, 2), Record(2, 3, 1), Backward(2, 3), Load(0), Drop(0), Record(0, 2), Backward(0, 2))
TEXT = """\
     0  store 0
     1  advance 0 → 2
     2  record 2 → 3 as entry 1
     3  backward 3 → 2
     4  load 0
     5  drop 0
     6  record 0 → 2
     7  backward 2 → 0"""


def test_text() -> None:
    schedule = Schedule(3, "by hand", ACTIONS)
    assert schedule.text() == TEXT
    assert schedule.text(limit=8) == TEXT
    assert schedule.text(limit=2).splitlines() == [*TEXT.splitlines()[:2], "     …  and so on"]
    assert repr(schedule) == "Schedule(length=3, planner='by hand')"


def test_actions_are_values() -> None:
    assert Record(1, 2) == Record(1, 2, 0)
    assert len({*ACTIONS, *ACTIONS}) == len(ACTIONS)
    with pytest.raises(AttributeError, match="immutable"):
        ACTIONS[0].at = 3  # type: ignore[misc, union-attr]


def test_a_schedule_is_made_anew_for_everyone_who_reads_it() -> None:
    schedule = Schedule(3, "by hand", lambda: iter(ACTIONS))
    first, second = iter(schedule), iter(schedule)
    assert next(first) == next(second) == ACTIONS[0]
    assert tuple(schedule) == ACTIONS


def test_only_as_much_is_made_as_is_read() -> None:
    def endless() -> Iterator[Action]:
        return (Store(k) for k in count())

    assert Schedule(1, "endless", endless).text(limit=1) == "     0  store 0\n     …  and so on"


def test_json_and_back() -> None:
    file = io.StringIO()
    Schedule(3, 'by "hand"', ACTIONS).write_json(file)
    again = Schedule.from_json(file.getvalue())
    assert (again.length, again.planner, tuple(again)) == (3, 'by "hand"', ACTIONS)
    empty = io.StringIO()
    Schedule(0, "none", ()).write_json(empty)
    assert tuple(Schedule.from_json(empty.getvalue())) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"length":1,"planner":"x","actions":[{"type":"Jump","at":1}]}', r"Invalid value 'Jump' - at `\$.actions"),
        ('{"length":1,"planner":"x","actions":[{"type":"Store"}]}', "missing required field `at`"),
        ('{"length":1,"planner":"x"}', "missing required field `actions`"),
    ],
)
def test_json_that_is_no_schedule(text: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        Schedule.from_json(text)
