"""Schedules that store carries and keep tapes: from a recurrence's decisions to a stream of actions."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

from ..schedules import Action, Advance, Backward, Drop, Load, Record, Store


class Start(IntEnum):
    """What holds the carry that a range starts from."""

    LIVE = 0  # nothing yet, but its slot is paid for
    SLOT = 1
    HELD = 2  # the end of a kept range, or the caller


class Choice(IntEnum):
    """The first thing done about a range."""

    RECORD = 0  # its first stage
    STORE = 1  # advance y stages, store the carry there
    KEEP = 2  # advance y − 1 stages, record stage y − 1


class Node:
    """The three states a range can be in, as far as its memory is concerned, numbered for `Decisions`."""

    FROM_SLOT = 0  # its start is in a slot of its own
    FROM_KEPT = 1  # its start is held by something that outlives it
    AT_END = 2  # its start is the end of a range that is still being recorded


class Decisions(Protocol):
    """A solved recurrence."""

    def first(self, node: int, memory: int, stages: int) -> tuple[Choice, int]:
        """What to do with a range of at least 1 stage in this state and memory: a choice and its y."""
        ...

    def after(self, node: int, memory: int, choice: Choice) -> int:
        """The memory that is left to the part on the right."""
        ...


class FreeCarries:
    """The decisions where a carry takes no bytes: all carries are stored, and as many tapes kept at the end as fit."""

    def __init__(self, steps: int, keep: int, tape: int) -> None:
        self.tape = tape
        self.forward_runs = 2 * steps - 1 - min(steps - 1, keep // tape if tape else steps)

    def first(self, _node: int, memory: int, stages: int) -> tuple[Choice, int]:
        """Record if the rest of the range fits as well, else store the next carry."""
        return (Choice.RECORD if memory >= self.tape * (stages - 1) else Choice.STORE), 1

    def after(self, _node: int, memory: int, choice: Choice) -> int:
        """Carries are free, tapes are not."""
        return memory - self.tape if choice is Choice.RECORD else memory


def actions(decisions: Decisions, steps: int, memory: int, entry: int, *, free_start: bool) -> Iterator[Action]:
    """The schedule; the stack holds (start, stages, node, memory, holder) to do and (start, stop) recorded."""
    root = (Node.FROM_KEPT, Start.HELD) if free_start else (Node.FROM_SLOT, Start.LIVE)
    stack: list[tuple[int, ...]] = [(0, steps, root[0], memory, root[1])]
    live = 0
    while stack:
        item = stack.pop()
        if len(item) == 2:
            yield Backward(*item)
            live = -1
            continue
        s, t, node, m, holder = item
        choice, y = decisions.first(node, m, t)
        if choice is not Choice.RECORD and holder == Start.LIVE:
            yield Store(s)
            holder = Start.SLOT
        if live != s:
            yield Load(s)
            live = s
        if choice is Choice.RECORD and holder == Start.SLOT:
            yield Drop(s)
        reach = s + (y if choice is Choice.STORE else y - 1)
        if reach > s:
            yield Advance(s, reach)
            live = reach
            stack.append((s, reach - s, node, m, holder))
        m = decisions.after(node, m, choice)
        if choice is Choice.STORE:
            stack.append((reach, s + t - reach, Node.FROM_SLOT, m, Start.LIVE))
            continue
        stop, last = reach + 1, s + t
        while stop < last and decisions.first(Node.AT_END, m, last - stop)[0] is Choice.RECORD:
            m = decisions.after(Node.AT_END, m, Choice.RECORD)
            stop += 1
        yield Record(reach, stop, entry)
        live = stop
        stack.append((reach, stop))
        if stop < last:
            stack.append((stop, last - stop, Node.FROM_KEPT, m, Start.HELD))
