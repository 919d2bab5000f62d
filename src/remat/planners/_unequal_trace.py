"""From solved subproblems to actions, with every need checked in exact bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
            option = self.choose(item.flavour, item.s, item.t, item.room)
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

    def _record(self, part: _Part, way: int) -> None:
        s, t = part.s, part.t
        grown = self.costs.range(s, int(self.costs.entry[way]))
        while grown.stop < self.costs.stop[way]:
            grown.grow()
        counted = part.flavour == COUNTED
        if counted and s in self.slots:
            self.actions.append(Drop(s))
            self.slots.remove(s)
        extra = grown.entering if counted else 0
        self._used(part, self._need(part, grown))
        self.actions.append(Record(s, grown.stop, grown.entry))
        self.live = grown.stop
        self.seconds += grown.seconds
        self.todo.append(Backward(s, grown.stop))
        if grown.stop < t:
            self.todo.append(_Part(FREE, grown.stop, t, part.room - grown.keep - extra))

    def _need(self, part: _Part, grown: Range) -> int:
        own, extra = (self.carry[part.s], grown.entering) if part.flavour == COUNTED else (0, 0)
        later = self.gradients[grown.stop] - self.gradients[part.t]
        return max(self.base[part.t] + own + grown.need_forward, later + extra + grown.need_backward)

    def _used(self, part: _Part, need: int) -> None:
        if need > part.room:
            raise AssertionError(f"stages {part.s} … {part.t - 1} need {need} bytes of a room of {part.room}")
        self.unused = min(self.unused, part.room - need)


def trace(costs: Costs, choose: Choose, flavour: int, room: int) -> Traced:
    """Carry out what `choose` says, from the whole chain down."""
    return _Tracer(costs, choose, room).run(flavour, room)
