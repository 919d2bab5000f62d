"""Hidden state memorization (Gruslys et al. 2016, section 3.1): slots hold carries only; optimal by closed form.

The recurrence C(t, m) = min over y of y + C(t−y, m−1) + C(y, m), with C(t, 1) = t(t+1)/2, has the solution of Griewank
and Walther's binomial checkpointing: with r the least number for which b(m, r) = binom(m+r, r) ≥ t,

    C(t, m) = (r+1)·t − b(m+1, r−1)

and a best first slot at y = max(b(m, r−2), t − b(m−1, r)), kept within 1 … t−1. Here m counts the initial carry's slot.
Plans of any length take no table; the actions stream from a stack of at most m + r entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain as concatenation
from math import comb
from typing import Final

from ..chains import Chain
from ..schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store
from ._shared import plan_repeated
from .room import Room

_BATCH: Final = 1000  # stages at most whose actions are made in one go


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """As many slots as the budget has room for."""
    return plan_repeated(chain, budget_bytes, "hsm", strategy, may_keep_all=False)


def cost(t: int, m: int) -> int:
    """Forward runs of the best schedule of t stages with m slots, the initial carry's included."""
    r = repetitions(t, m)
    return (r + 1) * t - (comb(m + r, r - 1) if r else 0)


def repetitions(t: int, m: int) -> int:
    """The least r with binom(m+r, r) ≥ t: how often a stage is advanced at most."""
    if m == 1:
        return t - 1
    r = 0
    while comb(m + r, r) < t:
        r += 1
    return r


class Binomials:
    """b(m, r) = binom(m+r, r) for r ≤ `most` as one list for each m, made when first asked for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[int, list[int]] = {}

    def row(self, m: int) -> list[int]:
        """b(m, 0), b(m, 1), …, b(m, most), then b(m, −2) = b(m, −1) = 0 at the indices −2 and −1."""
        found = self._rows.get(m)
        if found is None:
            found = self._rows[m] = [comb(m + r, r) for r in range(self._most + 1)] + [0, 0]
        return found


def strategy(room: Room, keep: int) -> tuple[int, partial[Iterator[Action]]]:
    """Forward runs and actions with `keep` bytes in slots besides carry 0."""
    slots = min(room.steps, 1 + keep // room.carry) if room.carry else room.steps
    return cost(room.steps, slots), partial(_actions, room.steps, slots, room.entry, room.free_start)


def _actions(steps: int, slots: int, entry: int, free_start: bool) -> Iterator[Action]:
    return concatenation.from_iterable(_batches(steps, slots, entry, free_start))


def _batches(steps: int, slots: int, entry: int, free_start: bool) -> Iterator[list[Action]]:
    """The actions in lists no longer than a few for every slot: passing them on one by one would take half the time.

    The stack holds (start, stages, slots, r) of ranges whose start is in its slot, rightmost on top.
    """
    r = repetitions(steps, slots)
    row = Binomials(r).row
    stack = [(0, steps, slots, r)]
    out: list[Action] = [] if free_start else [Store(0)]
    live = True  # whether the range's start is the live carry
    while stack:
        s, t, m, r = stack.pop()
        if not live:
            out.append(Load(s))
        live = False
        while t > m + 1 or t > _BATCH:
            if m == 1:
                # One slot, the range's own: its last stage is reached from it again and again.
                last = s + t - 1
                out += (Advance(s, last), Record(last, last + 1, entry), Backward(last, last + 1), Load(s))
                yield out
                out, t = [], t - 1
                continue
            ahead, shorter = row(m), row(m - 1)
            while ahead[r - 1] >= t:
                r -= 1
            y = min(max(ahead[r - 2], t - shorter[r], 1), t - 1)
            stack.append((s, y, m, r))
            s, t, m = s + y, t - y, m - 1
            out += (Advance(s - y, s), Store(s))
        # From here on there is a slot for every carry, and each stage is advanced once at most.
        last = s + t - 1
        for k in range(s + 1, last):
            out += (Advance(k - 1, k), Store(k))
        if last > s:
            out += (Advance(last - 1, last), Record(last, last + 1, entry), Backward(last, last + 1), Load(last - 1))
        for k in range(last - 1, s, -1):
            out += (Drop(k), Record(k, k + 1, entry), Backward(k, k + 1), Load(k - 1))
        if s or not free_start:
            out.append(Drop(s))
        out += (Record(s, s + 1, entry), Backward(s, s + 1))
        yield out
        out = []
