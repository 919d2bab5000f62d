"""Internal state memorization (Gruslys et al. 2016, section 3.2): tapes are kept, no carries; optimal by closed form.

C(t, m) = min over y of y + C(t−y, m−1) + C(y−1, m), with C(t, m) = t for m ≥ t and C(t, 1) = t(t+1)/2, is hidden state
memorization one stage longer: C(t, m) = HSM(t+1, m) − (t+1), and takes its split. Here m counts internal states, the
one being worked on included; a kept one can restart the forward, and so can the initial carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..chains import Chain
from ..schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store
from . import hsm
from ._shared import plan_repeated
from .room import Room


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """As many kept tapes as the budget has room for, each taken to be kept alone, its end carry with it."""
    return plan_repeated(chain, budget_bytes, "ism", strategy)


def cost(t: int, m: int) -> int:
    """Forward runs of the best schedule of t stages with m internal states, the one being worked on included."""
    return hsm.cost(t + 1, m) - (t + 1)


def strategy(room: Room, keep: int) -> tuple[int, partial[Iterator[Action]]]:
    """Forward runs and actions with `keep` bytes in tapes besides carry 0."""
    each = max(room.alone, room.more)
    tapes = min(room.steps, 1 + keep // each) if each else room.steps
    return cost(room.steps, tapes), partial(_actions, room.steps, tapes, room.entry, room.free_start)


def _actions(steps: int, tapes: int, entry: int, free_start: bool) -> Iterator[Action]:
    """The stack holds (start, stages, tapes, r) of ranges still to do and (start, stop) of recorded ones."""
    r = hsm.repetitions(steps + 1, tapes)
    row = hsm.Binomials(r).row
    stack: list[tuple[int, ...]] = [(0, steps, tapes, r)]
    live, slot = 0, False
    while stack:
        item = stack.pop()
        if len(item) == 2:
            yield Backward(*item)
            live = -1
            continue
        s, t, m, r = item
        opened = -1  # where the range that is being recorded begins
        while True:
            y, r = (1, r) if t <= m else (t, r) if m == 1 else _split(row(m), row(m - 1), t, r)
            if y > 1 and opened >= 0:
                yield Record(opened, s, entry)
                stack.append((opened, s))
                live, opened = s, -1
            if opened < 0:
                if y > 1 and s == 0 and not free_start and not slot:
                    yield Store(0)
                    slot = True
                if live != s:
                    yield Load(s)
                if y > 1:
                    yield Advance(s, s + y - 1)
                    stack.append((s, y - 1, m, r))
                elif slot and s == 0:
                    yield Drop(0)
                opened = s + y - 1
            if t <= m or y == t:
                yield Record(opened, s + t, entry)
                yield Backward(opened, s + t)
                live = -1
                break
            s, t, m = s + y, t - y, m - 1


def _split(ahead: list[int], shorter: list[int], t: int, r: int) -> tuple[int, int]:
    """(where the next tape ends, r) for more stages than tapes: hidden state memorization's split of t+1 stages."""
    while ahead[r - 1] > t:
        r -= 1
    return min(max(ahead[r - 2], t + 1 - shorter[r], 1), t), r
