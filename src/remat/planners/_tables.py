"""The mixed recurrences solved: the paper's MSM and the tight one, all lengths for every memory that can occur.

Memory counts what may be kept beside the start of a range, in units.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ..schedules import Action
from ._levels import Costs, compiled_level, right_costs
from ._mixed import Choice, FreeCarries, Node, actions
from ._units import Units
from .room import Room


def strategy(room: Room, keep: int, *, tight: bool) -> tuple[int, partial[Iterator[Action]]]:
    """Forward runs and actions of the optimum, the paper's or the tight one, with `keep` bytes beside carry 0."""
    if room.carry == 0:
        free = FreeCarries(room.steps, keep, max(room.alone, room.more))
        return free.forward_runs, partial(actions, free, room.steps, keep, room.entry, free_start=room.free_start)
    tables = Tables(Units.of(room, keep), tight=tight)
    memory = tables.units.keep
    cost = tables.cost(Node.FROM_KEPT if room.free_start else Node.FROM_SLOT, memory, room.steps)
    return cost, partial(actions, tables, room.steps, memory, room.entry, free_start=room.free_start)


class Tables:
    """Costs of every node at every memory that the root can reach, and the decisions behind them."""

    def __init__(self, units: Units, *, tight: bool) -> None:
        self.units = units
        self.tight = tight
        self._levels: dict[int, tuple[Costs, Costs, Costs]] = {}
        for memory in sorted(self._reachable()):
            self._levels[memory] = self._solve(memory)

    def cost(self, node: int, memory: int, stages: int) -> int:
        """Forward runs of a range in this state."""
        return int(self._levels[memory][node][stages])

    def after(self, node: int, memory: int, choice: Choice) -> int:
        """The memory that is left to the part on the right."""
        return max(0, memory - self._price(node, choice))

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

    def _below(self, node: int, memory: int, price: int) -> Costs | None:
        return self._levels[memory - price][node] if price <= memory else None

    def _solve(self, memory: int) -> tuple[Costs, Costs, Costs]:
        steps = self.units.steps
        after_record = Node.AT_END if self.tight else Node.FROM_SLOT
        k = right_costs(
            self._below(Node.FROM_SLOT, memory, self.units.carry),
            self._below(after_record, memory, self.units.alone),
            steps,
        )
        alone = steps > 1 and k[-1] > steps**2
        solve = compiled_level()
        if not self.tight:
            costs = solve(self._first(self._below(Node.FROM_SLOT, memory, self.units.alone)), k, alone)
            return costs, costs, costs
        kept = solve(self._first(self._below(Node.AT_END, memory, self.units.beside)), k, alone)
        if self.units.more:
            at_end = np.minimum(kept, self._first(self._below(Node.AT_END, memory, self.units.more)))
        else:  # a range grows for nothing: as often as it likes
            index = np.arange(steps + 1)
            at_end = np.minimum.accumulate(kept - index) + index
        below = self._below(Node.AT_END, memory, self.units.from_slot) if self.units.from_slot else at_end
        return solve(self._first(below), k, alone), kept, at_end

    def _first(self, below: Costs | None) -> Costs:
        """Costs if the first stage is recorded at once and the rest costs `below`."""
        costs = np.full(self.units.steps + 1, np.iinfo(np.int64).max // 4)
        costs[:2] = 0, 1
        if below is not None:
            costs[2:] = 1 + below[1:-1]
        return costs

    def first(self, node: int, memory: int, stages: int) -> tuple[Choice, int]:
        """What to do first with a range of at least 1 stage."""
        if stages == 1:
            return Choice.RECORD, 1
        cost = self.cost(node, memory, stages)
        after = Node.AT_END if self.tight else Node.FROM_SLOT
        below = self._below(after, memory, self._price(node, Choice.RECORD))
        if below is not None and cost == 1 + below[stages - 1]:
            return Choice.RECORD, 1
        own = self._levels[memory][node][1:stages] + np.arange(1, stages)
        stored = self._below(Node.FROM_SLOT, memory, self.units.carry)
        if stored is not None:
            found = np.flatnonzero(own + stored[stages - 1 : 0 : -1] == cost)
            if found.size:
                return Choice.STORE, int(found[0]) + 1
        recorded = self._below(after, memory, self.units.alone)
        if recorded is None:
            return Choice.KEEP, stages
        found = np.flatnonzero(own + 1 + recorded[stages - 2 :: -1][: stages - 1] == cost)
        return Choice.KEEP, int(found[0]) + 2 if found.size else stages
