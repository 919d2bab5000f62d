"""What every option of the unequal-chain recurrence holds and needs, in exact bytes.

A subproblem is stages s … t−1 with the adjoint of carry t at hand. Its *room* is the budget less what lies outside:

    room(s, t) = budget − outputs, final carry and fixed gradients − gradients of stages t … L−1 − what is held below s

so the room of a left part, which runs after its right part, is smaller by the gradients that the right part made.
Measured so, a subproblem depends on its own stages and on carry t alone, and equal segments share one answer.
Subtracting all fixed bytes from the start loses nothing: at the first backward they are alive together with all that is
held below.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..chains import Chain, Stage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """A chain as arrays. L stages, C ways to record: way c of stage s has first[s] ≤ c < first[s + 1].

    Attributes:
        fixed_bytes: outputs, final carry and fixed gradients: what `room` excludes.
        menus: the stages' menus.
        kind: equal numbers for equal stages (L).
        carry: bytes of carry k (L + 1).
        base: what is alive beside the room's content while stages below t run forward: the adjoint of carry t; for
            t = L the fixed bytes that do not exist yet, negative (L + 1).
        workspace: of a run without tape (L).
        forward: seconds of all such runs before stage k (L + 1).
        fastest: seconds of recording and backward by the fastest way, summed before stage k (L + 1).
        gradients: bytes of the gradients of stages k … L−1 (L + 1).
        first: where the ways of stage s begin (L + 1).
        stop: a way records stages s … stop−1 as one range (C).
        entry: with this menu entry (C).
        seconds: in this time, backward included (C).
        keep: tapes, what they keep of the carries between, and the carry at the end (C).
        entering: what they keep of carry s (C).
        need_forward: most bytes while recording, without carry s and `base` (C).
        need_backward: most bytes of room(s, stop) during backward, without what is kept of carry s (C).
    """

    length: int
    fixed_bytes: int
    menus: Menus
    kind: Ints
    carry: Ints
    base: Ints
    workspace: Ints
    forward: Floats
    fastest: Floats
    gradients: Ints
    first: Ints
    stop: Ints
    entry: Ints
    seconds: Floats
    keep: Ints
    entering: Ints
    need_forward: Ints
    need_backward: Ints

    def unit(self) -> int:
        """The largest unit in which every size is a whole number: measured in it, nothing is rounded."""
        sizes = (self.carry, self.base, self.workspace, self.gradients, self.keep, self.entering)
        needs = (self.need_forward, self.need_backward)
        return int(np.gcd.reduce(np.concatenate(sizes + needs))) or 1

    def range(self, start: int, entry: int) -> Range:
        """Stage `start`, recorded with menu entry `entry`; it can grow."""
        return Range(self.menus, start, entry)


class Menus(NamedTuple):
    """Bytes and seconds that a range needs to grow: per carry, or per stage and menu entry.

    `seconds` is recording and backward together; `gradients` those of stages k … L−1.
    """

    carry: list[int]
    gradients: list[int]
    tape: list[list[int]]
    entering: list[list[int]]
    leaving: list[list[int]]
    workspace: list[list[int]]
    backward_workspace: list[list[int]]
    seconds: list[list[float]]


def costs(chain: Chain) -> Costs:
    """The chain as arrays."""
    stages = [stage for stage, count in chain.runs for _ in range(count)]
    numbers = {stage: number for number, stage in enumerate(dict.fromkeys(stages))}
    carry = [stage.carry_bytes for stage in stages] + [chain.final_carry_bytes]
    gradients = list(accumulate((s.gradient_bytes for s in reversed(stages)), initial=0))[::-1]
    menus = _menus(stages, carry, gradients)
    not_yet = -(chain.final_carry_bytes + chain.backward_fixed_bytes)
    return Costs(
        length=chain.length,
        fixed_bytes=chain.output_bytes - not_yet,
        menus=menus,
        kind=np.array([numbers[s] for s in stages], dtype=np.int64),
        carry=np.array(carry, dtype=np.int64),
        base=np.array([*carry[:-1], not_yet], dtype=np.int64),
        workspace=np.array([s.workspace_bytes for s in stages], dtype=np.int64),
        forward=np.array(list(accumulate((s.forward_s for s in stages), initial=0.0))),
        fastest=np.array(list(accumulate((min(row) for row in menus.seconds), initial=0.0))),
        gradients=np.array(gradients, dtype=np.int64),
        **_ways(menus),
    )


def _menus(stages: list[Stage], carry: list[int], gradients: list[int]) -> Menus:
    def table(name: str) -> list[list[int]]:
        return [[getattr(tape, name) for tape in stage.menu] for stage in stages]

    return Menus(
        carry,
        gradients,
        table("tape_bytes"),
        table("entering_bytes"),
        table("leaving_bytes"),
        table("workspace_bytes"),
        table("backward_workspace_bytes"),
        seconds=[[tape.forward_s + tape.backward_s for tape in stage.menu] for stage in stages],
    )


class Range:
    """A recorded range while it grows stage by stage: what it keeps, needs and takes. Fields as in `Costs`.

    `worth` says whether it can be better than two ranges that meet at some carry k. It cannot where the tapes keep all
    of carry k anyway and the older range needs no more in its backward: the end of the older range replaces what would
    be kept, its entering carry shrinks to what the tape keeps before the second is recorded, and throughout its
    backward carry k's adjoint and what its newest tape keeps of carry k take the place of the same two of the whole
    range. That is no loss where they are not larger, or where the older range is one stage: it needs them in any case.
    """

    __slots__ = (
        "_cut",
        "_held",
        "_menus",
        "_need_older",
        "entering",
        "entry",
        "keep",
        "need_backward",
        "need_forward",
        "seconds",
        "start",
        "stop",
        "worth",
    )

    def __init__(self, menus: Menus, start: int, entry: int) -> None:
        self._menus = menus
        self.start, self.stop, self.entry = start, start, entry
        self.entering = menus.entering[start][entry]
        self.seconds = 0.0
        self.keep = self.need_forward = self.need_backward = 0
        self._cut: float = inf  # the least that two ranges instead keep throughout the older one's backward
        self._held = 0  # tapes and what they keep of the carries between
        self._need_older = 0  # most bytes while all but the newest stage are consumed, with the gradients from there on
        self.grow()

    def grow(self) -> None:
        """Record one more stage."""
        k, entry, menus = self.stop, self.entry, self._menus
        leaving, spare = menus.leaving[k][entry], menus.backward_workspace[k][entry]
        last = k + 1 == len(menus.seconds)
        end = menus.carry[k + 1]
        tape = menus.tape[k][entry]
        inside = k > self.start
        if inside and self._kept_between(k) >= menus.carry[k]:
            self._cut = min(self._cut, menus.carry[k] + menus.leaving[k - 1][entry] if k > self.start + 1 else -1)
        entered = menus.carry[k] if inside else 0  # in full until stage k has run
        self.need_forward = max(self.need_forward, self._held + entered + tape + end + menus.workspace[k][entry])
        if inside:
            self._held += self._kept_between(k)
        self._held += tape
        self.seconds += menus.seconds[k][entry]
        # The adjoint that comes in, and what the newest tape keeps of its carry, stay until the whole range is done.
        throughout = 0 if last else end + leaving
        self.worth = self._cut > throughout
        older = self._need_older - menus.gradients[k + 1]
        self.need_backward = throughout + max(self._held + spare, older)
        self._need_older = max(self._need_older, self._held + end + leaving + spare + menus.gradients[k + 1])
        self.keep = self._held + (0 if last else end)
        self.stop = k + 1

    def _kept_between(self, k: int) -> int:
        return max(self._menus.entering[k][self.entry], self._menus.leaving[k - 1][self.entry])

    def can_grow(self) -> bool:
        """Whether there is a next stage and it has this menu entry."""
        return self.stop < len(self._menus.seconds) and self.entry < len(self._menus.seconds[self.stop])

    def hopeless(self) -> bool:
        """Whether no longer range can be worth it."""
        return self._cut < 0


def _ways(menus: Menus) -> dict[str, NDArray[Any]]:
    """All ways to record from a stage on that can be worth it."""
    columns: dict[str, list[float]] = {name: [] for name in _WAY_TYPES}
    first = [0]
    for start in range(len(menus.seconds)):
        for entry in range(len(menus.seconds[start])):
            grown = Range(menus, start, entry)
            while True:
                if grown.worth:
                    for name, column in columns.items():
                        column.append(getattr(grown, name))
                if not grown.can_grow() or grown.hopeless():
                    break
                grown.grow()
        first.append(len(columns["stop"]))
    found: dict[str, NDArray[Any]] = {
        name: np.array(column, dtype=_WAY_TYPES[name]) for name, column in columns.items()
    }
    found["first"] = np.array(first, dtype=np.int64)
    return found


_WAY_TYPES: Final[dict[str, type]] = {
    "stop": np.int64,
    "entry": np.int64,
    "seconds": np.float64,
    "keep": np.int64,
    "entering": np.int64,
    "need_forward": np.int64,
    "need_backward": np.int64,
}
