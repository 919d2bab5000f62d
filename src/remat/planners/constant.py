"""Constant memory: only the initial carry is kept, and every stage is reached from it: t(t+1)/2 forward runs.

No schedule that advances any stage needs less memory. (One that advances none may, where advancing has a workspace that
recording has not: then keeping all can be smaller, and the planners of a repeated stage look at that, too.)
"""

from __future__ import annotations

from collections.abc import Iterator

from ..chains import Chain
from ..schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store
from . import room


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """Backward from the last stage to the first, each recorded as its fastest menu entry that fits."""
    found = fitting(chain, budget_bytes)
    if found is None:
        raise room.smallest(chain).refusal(budget_bytes)
    return found


def fitting(chain: Chain, budget_bytes: int) -> Schedule | None:
    """The schedule of this planner if it fits the budget, or None."""
    if room.smallest(chain).peak_bytes > budget_bytes:
        return None
    return Schedule(chain.length, "constant", lambda: _actions(chain, _entries(chain, budget_bytes)))


def _entries(chain: Chain, budget_bytes: int) -> list[int]:
    """For every run the fastest menu entry with which all of its stages fit."""
    chosen = []
    for run, (stage, _) in enumerate(chain.runs):
        peaks = [peak for peak, _ in room.run_peaks(chain, run)]
        fits = [entry for entry, peak in enumerate(peaks) if peak <= budget_bytes]
        seconds = [tape.forward_s + tape.backward_s for tape in stage.menu]
        chosen.append(min(fits, key=seconds.__getitem__))
    return chosen


def _actions(chain: Chain, entries: list[int]) -> Iterator[Action]:
    kept = chain.caller_keeps_carry
    if chain.length > 1 and not kept:
        yield Store(0)
    live = 0
    for run in reversed(range(len(chain.runs))):
        for k in range(chain.starts[run + 1] - 1, chain.starts[run] - 1, -1):
            if live != 0:
                yield Load(0)
            if k > 0:
                yield Advance(0, k)
            elif chain.length > 1 and not kept:
                yield Drop(0)
            yield Record(k, k + 1, entries[run])
            yield Backward(k, k + 1)
            live = -1
