"""The mixed recurrences solved: the paper's MSM and the tight one, all lengths for every memory that can occur.

Memory counts what may be kept beside the start of a range, in units. With k(n) the least cost of n stages at the right
end, once the carry before them is stored or the stage before them is recorded, all of them have the form

    F(t) = min(1 + h(t−1),  min over 1 ≤ y < t of  y + F(y) + k(t−y)),    k(n) = min(f(n), 1 + g(n−1)),  k(1) = 1

f: the right part with its start in a slot; g: with its start at the end of a tape; h: the first stage recorded at once.
`_sweep` solves one such level in a time that does not grow with the number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ..schedules import Action
from ._mixed import Choice, FreeCarries, Node, actions
from ._units import Units
from .room import Room

if TYPE_CHECKING:
    from ._curves import Curve

_LOWEST_CAP = 2  # the least increment that anything but recording all can have


def strategy(room: Room, keep: int, *, tight: bool) -> tuple[int, partial[Iterator[Action]]]:
    """Forward runs and actions of the optimum, the paper's or the tight one, with `keep` bytes beside carry 0."""
    if room.carry == 0:
        free = FreeCarries(room.steps, keep, max(room.alone, room.more))
        return free.forward_runs, partial(actions, free, room.steps, keep, room.entry, free_start=room.free_start)
    root = Node.FROM_KEPT if room.free_start else Node.FROM_SLOT
    tables = Tables(Units.of(room, keep), root, tight=tight)
    memory = tables.units.keep
    cost = tables.cost(root, memory, room.steps)
    return cost, partial(actions, tables, room.steps, memory, room.entry, free_start=room.free_start)


class Tables:
    """Costs of every node at every memory that the root can reach, and the decisions behind them.

    Only what the root needs is exact: `_sweep` leaves out what costs more than `cap` for one more stage, and the
    cap is right once no increment of the root exceeds it.
    """

    def __init__(self, units: Units, root: int, *, tight: bool) -> None:
        from . import _curves, _sweep  # compile, which what a closed form plans does without

        self._curves, self._level = _curves, _sweep.level
        self.units = units
        self.tight = tight
        self._after_record = Node.AT_END if tight else Node.FROM_SLOT
        levels = sorted(self._reachable())
        cap = _LOWEST_CAP
        while not self._solved(levels, root, cap):
            cap = max(cap + 1, cap * 5 // 4)

    def cost(self, node: int, memory: int, stages: int) -> int:
        """Forward runs of a range in this state."""
        return int(self._curves.value(self._costs[memory][node], stages))

    def after(self, node: int, memory: int, choice: Choice) -> int:
        """The memory that is left to the part on the right."""
        return max(0, memory - self._price(node, choice))

    def first(self, node: int, memory: int, stages: int) -> tuple[Choice, int]:
        """What to do first with a range of at least 1 stage."""
        if stages == 1:
            return Choice.RECORD, 1
        right = self._right[memory]
        y = self._curves.find(self._costs[memory][node], self._firsts[memory][node], right, stages)
        if y == 0:
            return Choice.RECORD, 1
        stored = self._costs.get(memory - self.units.carry)
        n = stages - y
        if n > 1 and stored and self._curves.value(stored[Node.FROM_SLOT], n) == self._curves.value(right, n):
            return Choice.STORE, y
        return Choice.KEEP, y + 1

    def _price(self, node: int, choice: Choice) -> int:
        units = self.units
        if choice is Choice.STORE:
            return units.carry
        if choice is Choice.KEEP or not self.tight:
            return units.alone
        return (units.from_slot, units.beside, units.more)[node]

    def _reachable(self) -> set[int]:
        prices = {self._price(node, choice) for node in range(3) for choice in Choice} - {0}
        found, new = {self.units.keep}, [self.units.keep]
        while new:
            memory = new.pop()
            below = {memory - price for price in prices if price <= memory} - found
            found |= below
            new += below
        return found

    def _solved(self, levels: list[int], root: int, cap: int) -> bool:
        """Solve all levels with this cap; whether it was high enough."""
        self._costs: dict[int, list[Curve]] = {}
        self._firsts: dict[int, list[Curve]] = {}
        self._right: dict[int, Curve] = {}
        for memory in levels:
            self._solve(memory, cap)
        whole = self._costs[self.units.keep][root]
        return bool(whole[-1, 0] == self.units.steps and (whole[:-1, 2] <= cap).all())

    def _below(self, node: int, memory: int, price: int) -> Curve | None:
        return self._costs[memory - price][node] if price <= memory else None

    def _solve(self, memory: int, cap: int) -> None:
        curves, units = self._curves, self.units
        stored = self._below(Node.FROM_SLOT, memory, units.carry)
        recorded = curves.after_one(self._below(self._after_record, memory, units.alone))
        right = curves.capped(curves.lower(curves.one_stage() if stored is None else stored, recorded), cap)
        self._right[memory] = right

        def solve(below: Curve | None) -> tuple[Curve, Curve]:
            first = curves.after_one(below)
            known = id(below)
            if known not in solved:
                whole = self._level(first, right, cap, units.steps)
                solved[known] = whole if memory == units.keep else curves.capped(whole, cap)
            return solved[known], first

        solved: dict[int, Curve] = {}
        if not self.tight:
            curve, first = solve(self._below(Node.FROM_SLOT, memory, units.alone))
            self._costs[memory], self._firsts[memory] = [curve] * 3, [first] * 3
            return
        kept, kept_first = solve(self._below(Node.AT_END, memory, units.beside))
        if units.more:
            end_first = curves.after_one(self._below(Node.AT_END, memory, units.more))
            at_end = curves.capped(curves.lower(kept, end_first), cap)
        else:  # a range grows for nothing: as often as it likes
            at_end = end_first = curves.all_recorded(units.steps)
        slot, slot_first = solve(self._below(Node.AT_END, memory, units.from_slot) if units.from_slot else at_end)
        self._costs[memory], self._firsts[memory] = [slot, kept, at_end], [slot_first, kept_first, end_first]
