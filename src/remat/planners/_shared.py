"""What the planners of one repeated stage share: when to keep all, when only constant memory fits, which menu entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..chains import INTERNAL_STATE, Chain
from ..schedules import Action, Record, Schedule
from . import constant, keep_all, room
from .room import Room

Strategy = Callable[[Room, int], tuple[int, Callable[[], Iterator[Action]]]]


def plan_repeated(
    chain: Chain, budget_bytes: int, planner: str, strategy: Strategy, *, may_keep_all: bool = True
) -> Schedule:
    """Plan one repeated stage with the menu entry that takes the least time.

    Args:
        chain: one run of equal stages.
        budget_bytes: most bytes that may be alive.
        planner: its name, for the schedule and for errors.
        strategy: from a room and the bytes that may be kept besides carry 0, ≥ 0, to the number of forward runs and a
            function that makes the actions.
        may_keep_all: whether the strategy may record the whole chain at once when that fits.
    """
    rooms = [Room.of(chain, entry, planner=planner) for entry in range(len(chain.runs[0][0].menu))]
    # The paper's m leaves the adjoint and the state being worked on uncounted; it does not let them be used otherwise.
    may_keep_all = may_keep_all and rooms[0].tape.name != INTERNAL_STATE
    options: list[tuple[float, Callable[[], Iterator[Action]]]] = []  # of the fastest the first is taken
    if may_keep_all and (whole := keep_all.fitting(chain, budget_bytes)) is not None:
        options.append((rooms[_entry(whole)].seconds(chain.length), whole.__iter__))
    for each in rooms:
        if each.keep(budget_bytes) >= 0:
            runs, actions = strategy(each, each.keep(budget_bytes))
            options.append((each.seconds(runs), actions))
    # Entries that leave no room to keep anything may still fit one by one, and be so much faster that it pays.
    if (least := constant.fitting(chain, budget_bytes)) is not None:
        options.append((rooms[_entry(least)].seconds(chain.length * (chain.length + 1) // 2), least.__iter__))
    if not options:
        needs = [room.smallest(chain)] + [keep_all.smallest(chain)] * may_keep_all
        raise min(needs, key=lambda need: need.peak_bytes).refusal(budget_bytes)
    return Schedule(chain.length, planner, min(options, key=lambda option: option[0])[1])


def _entry(schedule: Schedule) -> int:
    """The menu entry of a schedule that records all stages alike."""
    return next(action.entry for action in schedule if isinstance(action, Record))
