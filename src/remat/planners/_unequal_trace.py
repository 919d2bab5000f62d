"""From solved subproblems to actions, with every need checked in exact bytes."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from ..schedules import Action, Advance, Backward, Drop, Load, Record, Store
from ._unequal_costs import Costs, Range
from ._unequal_tables import COUNTED, FREE

Choose = Callable[[int, int, int, int], int]
"""(flavour, s, t, room in bytes) → way c, or −s' for storing carry s'."""


@dataclass(frozen=True, slots=True)
class Traced:
    """Actions, their seconds, and the bytes of room that were never used."""

    actions: tuple[Action, ...]
    seconds: float
    unused_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A subproblem that is still to be carried out."""

    flavour: int
    s: int
    t: int
    room: int
    option: int | None = None


class _Tracer:
    def __init__(self, costs: Costs, choose: Choose, room: int) -> None:
        self.costs, self.choose = costs, choose
        self.carry: list[int] = costs.carry.tolist()
        self.base: list[int] = costs.base.tolist()
        self.gradients: list[int] = costs.gradients.tolist()
        self.workspace: list[int] = costs.workspace.tolist()
        self.forward: list[float] = costs.forward.tolist()
        self.actions: list[Action] = []
        self.seconds, self.unused = 0.0, room
        self.live: int | None = 0
        self.slots: set[int] = set()
        self.todo: list[_Part | Backward] = []

    def run(self, flavour: int, room: int) -> Traced:
        self.todo.append(_Part(flavour, 0, self.costs.length, room))
        while self.todo:
            item = self.todo.pop()
            if isinstance(item, Backward):
                self.actions.append(item)
                self.live = None
                continue
            option = self._option(item)
            self._ensure_live(item.s)
            if option < 0:
                self._split(item, -option)
            else:
                self._record(item, option)
        return Traced(tuple(self.actions), self.seconds, self.unused)

    def _ensure_live(self, s: int) -> None:
        if self.live != s:
            self.actions.append(Load(s))
            self.live = s

    def _split(self, part: _Part, k: int) -> None:
        s, t = part.s, part.t
        own = self.carry[s] if part.flavour == COUNTED else 0
        if part.flavour == COUNTED and s not in self.slots:
            self.actions.append(Store(s))
            self.slots.add(s)
        self.actions.append(Advance(s, k))
        self.live = k
        self.seconds += self.forward[k] - self.forward[s]
        most = max((self.carry[i] if i > s else 0) + self.carry[i + 1] + self.workspace[i] for i in range(s, k))
        self._used(part, self.base[t] + own + most)
        self.todo.append(_Part(part.flavour, s, k, part.room - self.gradients[k] + self.gradients[t]))
        self.todo.append(_Part(COUNTED, k, t, part.room - own))

    def _option(self, part: _Part) -> int:
        return self.choose(part.flavour, part.s, part.t, part.room) if part.option is None else part.option

    def _record(self, part: _Part, way: int) -> None:
        s, t = part.s, part.t
        counted = part.flavour == COUNTED
        if counted and s in self.slots:
            self.actions.append(Drop(s))
            self.slots.remove(s)
        grown, rest = self._grown_on(part, self._range(s, way))
        self._used(part, self._need(part, grown))
        self.actions.append(Record(s, grown.stop, grown.entry))
        self.live = grown.stop
        self.seconds += grown.seconds
        self.todo.append(Backward(s, grown.stop))
        if grown.stop < t:
            self.todo.append(rest)

    def _range(self, s: int, way: int) -> Range:
        grown = self.costs.range(s, int(self.costs.entry[way]))
        while grown.stop < self.costs.stop[way]:
            grown.grow()
        return grown

    def _grown_on(self, part: _Part, grown: Range) -> tuple[Range, _Part]:
        """The range, with those that follow it as long as one range for all fits as well: one graph, one backward."""
        while True:
            extra = grown.entering if part.flavour == COUNTED else 0
            rest = _Part(FREE, grown.stop, part.t, part.room - grown.keep - extra)
            if grown.stop == part.t:
                return grown, rest
            rest = replace(rest, option=self._option(rest))
            if rest.option is None or rest.option < 0 or self.costs.entry[rest.option] != grown.entry:
                return grown, rest
            longer = copy(grown)
            while longer.stop < self.costs.stop[rest.option]:
                longer.grow()
            if longer.keep > grown.keep + self.costs.keep[rest.option] or self._need(part, longer) > part.room:
                return grown, rest
            grown = longer

    def _need(self, part: _Part, grown: Range) -> int:
        own, extra = (self.carry[part.s], grown.entering) if part.flavour == COUNTED else (0, 0)
        later = self.gradients[grown.stop] - self.gradients[part.t]
        return max(self.base[part.t] + own + grown.need_forward, later + extra + grown.need_backward)

    def _used(self, part: _Part, need: int) -> None:
        self.unused = min(self.unused, part.room - need)


def trace(costs: Costs, choose: Choose, flavour: int, room: int) -> Traced:
    """Carry out what `choose` says, from the whole chain down."""
    return _Tracer(costs, choose, room).run(flavour, room)
