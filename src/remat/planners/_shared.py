"""What the planners of one repeated stage share: when to keep all, when only constant memory fits, which menu entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..chains import INTERNAL_STATE, Chain
from ..schedules import Action, Schedule
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
    whole = keep_all.fitting(chain, budget_bytes) if may_keep_all else None
    plans: list[tuple[float, Callable[[], Iterator[Action]]]] = []
    for each in rooms:
        if each.keep(budget_bytes) >= 0:
            runs, actions = strategy(each, each.keep(budget_bytes))
            plans.append((each.seconds(runs), actions))
    if not plans:
        found = whole or constant.fitting(chain, budget_bytes)
        if found is None:
            least = [room.smallest(chain)] + [keep_all.smallest(chain)] * may_keep_all
            raise min(least, key=lambda need: need.peak_bytes).refusal(budget_bytes)
        return Schedule(chain.length, planner, found.__iter__)
    seconds, actions = min(plans, key=lambda option: option[0])
    if whole is not None and _whole_seconds(chain, whole) <= seconds:
        return Schedule(chain.length, planner, whole.__iter__)
    return Schedule(chain.length, planner, actions)


def _whole_seconds(chain: Chain, whole: Schedule) -> float:
    return keep_all.seconds(chain, next(iter(whole)).entry)  # type: ignore[union-attr]  # its first action records
