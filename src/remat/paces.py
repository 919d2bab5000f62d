"""How long ranges of steps take: seconds of a step in ranges of several lengths, measured, and those between them.

A chain knows seconds by the step. A range costs something beside its steps (its tape, its call of autograd's engine), a
traced one takes products of several steps at once, and long ones leave the caches; so what a step takes depends on how
long the ranges of a plan are, and a plan is judged by the steps of its own ranges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Final

import msgspec

from .chains import Chain
from .schedules import Action, Advance, Backward, Drop, Load, Record, Store

_FACTOR: Final = 4  # between the lengths of ranges that are timed
_SINGLE: Final = 3  # ranges of one step are timed


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step in actions of several lengths.

    Attributes:
        lengths: ascending.
        seconds: of a step in an action of each length.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, length: int) -> float:
        """Of a step in an action of any length.

        Between two lengths it runs evenly over their inverses, as it does if an action costs so much and each of its
        steps so much more.
        """
        place = bisect_left(self.lengths, length)
        if place == 0 or place == len(self.lengths):
            return self.seconds[min(place, len(self.lengths) - 1)]
        (short, long), (slow, fast) = self.lengths[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        share = (1 / short - 1 / length) / (1 / short - 1 / long)
        return slow + share * (fast - slow)

    def over(self, lengths: Counter[int]) -> float:
        """Of a step on average in actions of such lengths; without any, in the longest."""
        steps = sum(length * count for length, count in lengths.items())
        if not steps:
            return self.seconds[-1]
        return sum(self.at(length) * length * count for length, count in lengths.items()) / steps


@dataclass(frozen=True, slots=True)
class Paces:
    """Those of one stage: run without a tape; recorded, and its backward, by entry of the menu.

    Attributes:
        advance, record, backward: the paces of replays.
        first_s: seconds that a step takes more when it runs for the first time, as its outputs are kept.
        keeping_s: seconds that a first pass takes for each carry that it keeps, to see what has changed beside it.
        page_s: seconds for each byte of memory that comes fresh from the system, as that of a first pass's tapes does.
    """

    advance: Pace
    record: tuple[Pace, ...]
    backward: tuple[Pace, ...]
    first_s: float = 0.0
    keeping_s: float = 0.0
    page_s: float = 0.0

    def on(self, chain: Chain, schedule: Iterable[Action]) -> Chain:
        """The chain of that stage, with the seconds of its steps in such a schedule."""
        ((stage, count),) = chain.runs
        lengths = [Counter[int]() for _ in range(len(self.record) + 1)]  # of advanced ranges, and by entry
        more_s, frontier = [0.0] * len(lengths), 0  # what is due for first runs, and how far these have come
        first_s = [self.first_s, *(self.first_s + self.page_s * (t.tape_bytes + t.entering_bytes) for t in stage.menu)]
        for action in schedule:
            if isinstance(action, Store) and frontier < chain.length:
                more_s[0] += self.keeping_s
            elif isinstance(action, Advance | Record):
                kind = action.entry + 1 if isinstance(action, Record) else 0
                lengths[kind][action.stop - action.start] += 1
                new = max(action.stop - max(action.start, frontier), 0)
                more_s[kind] += new * first_s[kind] + (self.keeping_s if new and kind else 0.0)
                frontier += new
        forward = [
            pace.over(of) + more / max(sum(length * count for length, count in of.items()), 1)
            for pace, of, more in zip((self.advance, *self.record), lengths, more_s, strict=True)
        ]
        menu = tuple(
            msgspec.structs.replace(tape, forward_s=seconds, backward_s=pace.over(of))
            for tape, seconds, pace, of in zip(stage.menu, forward[1:], self.backward, lengths[1:], strict=True)
        )
        stage = msgspec.structs.replace(stage, menu=menu, forward_s=forward[0])
        return msgspec.structs.replace(chain, runs=((stage, count),))


def joined(paces: Sequence[Paces | None]) -> Paces | None:
    """Those of all entries of a menu, from those of one each; None if any is unknown."""
    known = [each for each in paces if each is not None]
    if len(known) < len(paces):
        return None
    record, backward = zip(*((each.record[0], each.backward[0]) for each in known), strict=True)
    return replace(known[0], record=record, backward=backward)


def timed_ranges(longest: int) -> tuple[int, ...]:
    """The lengths of the ranges of a schedule that tells the paces, in their order; first and last are not counted."""
    lengths = [longest]
    while lengths[-1] > 1:
        lengths.append(lengths[-1] // _FACTOR or 1)
    return (1, *lengths, *[1] * _SINGLE)


def timed_schedule(longest: int) -> tuple[Action, ...]:
    """A schedule whose actions tell the paces.

    The backward of the last range makes the sums of gradients, that of the first finishes them.
    """
    bounds = [0, *accumulate(timed_ranges(longest))]
    ranges, last = list(pairwise(bounds[:-1])), bounds[-2:]
    forward = [action for start, stop in ranges for action in (Advance(start, stop), Store(stop))]
    backward: list[Action] = [Record(*last), Backward(*last)]
    for start, stop in reversed(ranges):
        backward += [Drop(stop), Load(start), Record(start, stop), Backward(start, stop)]
    return (*forward, *backward)


def paces_of(first: Sequence[Iterable[tuple[Action, float]]], again: Sequence[Iterable[tuple[Action, float]]]) -> Paces:
    """The paces of a stage with one entry, from seconds of the actions of timed schedules, first run and run again."""

    def pace_of(kind: type, runs: Sequence[Iterable[tuple[Action, float]]]) -> Pace:
        spans = defaultdict[int, list[float]](list)
        for action, seconds in (pair for run in runs for pair in run):
            if type(action) is kind and isinstance(action, Advance | Record | Backward) and action.start:
                length = action.stop - action.start
                spans[length].append(seconds / length)
        lengths = tuple(sorted(spans))
        return Pace(lengths, tuple(median(spans[length]) for length in lengths))

    advance, anew = pace_of(Advance, again), pace_of(Advance, first)
    first_s = max(anew.seconds[-1] - advance.seconds[-1], 0.0)
    return Paces(advance, (pace_of(Record, again),), (pace_of(Backward, again),), first_s)
