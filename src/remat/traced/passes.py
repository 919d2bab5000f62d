"""The backward of ranges of a traced loop: tapes consumed, newest step first, and what is summed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from .deferring import Operand, Term
from .graphs import value_of
from .layouts import stacking
from .programs import Arriving, Key
from .stages import Back, Step, TracedStages
from .sums import Sums, steps_together
from .traced import Menu, Ready


@dataclass(slots=True)
class Tape:
    """What a recorded range keeps: stacks over its steps, by what they hold, and the same step by step.

    Carries that steps keep as they leave too have a row more than there are steps, but for the last range of all: what
    its last step leaves belongs to the caller.
    """

    start: int
    stop: int
    stacks: dict[Key, torch.Tensor]
    views: dict[Key, Sequence[torch.Tensor]]
    entry: int


class Way:
    """One entry of the menu in one pass: its programs over what is the same in every step."""

    def __init__(self, stages: TracedStages, menu: Menu) -> None:
        self.stages, self.menu = stages, menu
        self.together = min(steps_together(menu), stages.loop.length)
        # What the last step of all leaves lies apart from the others, so its terms are added by themselves.
        self.apart = any(kind == "leaving" for kind, _ in menu.plan.sources.values())
        leaving = menu.entry.leaving
        self.stacked = [
            (key, stacking(value), key[0] == "carry" and key[1] in leaving) for key, value in menu.stacked()
        ]
        self._records: dict[bool, Step] = {}
        self._backwards: dict[Arriving, Back] = {}

    def record(self, *, outputs: bool) -> Step:
        """The recording program."""
        if outputs not in self._records:
            self._records[outputs] = Step(self.menu.record(outputs=outputs), self.stages.shared)
        return self._records[outputs]

    def place_of(self, kind: str, number: int) -> Key | None:
        """Where a tape has what the recording program reads or writes; None: nowhere."""
        if kind == "saved":
            place = self.menu.places.get(number)
            return None if place is None else (kind, place)
        return ("carry" if kind == "next" else kind), number

    def backward(self, arriving: Arriving) -> Back:
        """The backward program where these gradients arrive."""
        if arriving not in self._backwards:
            wanted = [k for k, column in enumerate(self.stages.loop.columns) if column.needs]
            self._backwards[arriving] = Back(self.menu.backward(arriving), self.stages.shared, arriving, wanted)
        return self._backwards[arriving]


class Pass:
    """The backward of one range.

    Args:
        way: the entry of the menu that it was recorded by.
        sums: what terms are added to.
        tape: what it keeps.
        arriving: which gradients arrive at its end.
        output_gradients: those of the outputs, stacked over all steps.
        length: how many steps there are.
    """

    def __init__(
        self,
        way: Way,
        sums: Sums,
        tape: Tape,
        arriving: Arriving,
        output_gradients: dict[int, torch.Tensor],
        length: int,
    ) -> None:
        self.way, self.tape, self.arriving, self.stages = way, tape, arriving, way.stages
        self.output_gradients, self.length = output_gradients, length
        self.sums = sums
        plan, self.room = way.menu.plan, way.together
        # As few products as there is room for, over equally many steps each.
        steps = max(tape.stop - tape.start - (way.apart and tape.stop == length), 1)
        self.together = -(-steps // -(-steps // self.room))
        self.slots = {
            ("slot", k): _slots(operand, self.room)
            for k, operand in enumerate(plan.slots)
            if any(operand in term.operands for term in sums.terms)
        }
        self.slot_views = {key: stack.unbind(operand_dim) for key, (stack, operand_dim) in self.slots.items()}
        self.waiting: list[Term] = []
        self.first = self.last = tape.stop  # steps whose operands wait

    def run(self, there: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """All steps, newest first: takes gradients of the leaving carry, returns those of the entering one."""
        given, there = there, dict(there)
        given.clear()  # they go with the newest step's backward
        take, index = self.stages.loop.take_input_gradients, self.tape.stop
        while index > self.tape.start:
            step = self.way.backward(Arriving(frozenset(there), self.arriving.outputs))
            values = [(self.sums.values[number], place) for number, place in step.values]
            alone = not step.steady or (index == self.length and self.way.apart)
            stop = index - 1 if alone else self.tape.start
            self._wait_for(step.ready.program.live)
            columns = self._columns(step.ready, range(stop, index))
            for row in by_step(columns, index - stop):
                index -= 1
                found = step.run(*[there[k] for k in step.threaded], *row, *step.bound)
                there = {number: found[place] for number, place in step.carries}
                for totals, place in values:
                    for total in totals:
                        total.add_(found[place])
                if step.inputs:
                    take(index, [None if place is None else found[place] for place in step.inputs])
                del found, row
                self.first = index
                if self.last - index == self.together:
                    self.flush()
            if index == self.length - 1 and self.way.apart:
                self.flush()
        self.flush()
        return {place: alone_in_memory(gradient) for place, gradient in there.items()}

    def _wait_for(self, live: list[Term]) -> None:
        """Steps with other terms are added by themselves."""
        if live != self.waiting:
            self.flush()
        self.waiting = live

    def flush(self) -> None:
        """Add the terms of the steps that wait."""
        if self.first < self.last:
            self.sums.add(self._block, self.waiting, self.room)
        self.last = self.first

    def _block(self, operand: Operand) -> torch.Tensor:
        """An operand of the steps that wait, oldest first."""
        block = self._kept(operand)
        return block.movedim(2, -1) if operand.last else block

    def _kept(self, operand: Operand) -> torch.Tensor:
        kind, number = key = self.way.menu.plan.sources[operand]
        if kind == "input":
            loop = self.stages.loop
            return loop.columns[number].block(self.first, self.last)
        if kind == "slot":
            stack, dim = self.slots[key]
            return stack.narrow(dim, self.room - (self.last - self.first), self.last - self.first)
        first, last = self.first - self.tape.start, self.last - self.tape.start
        if kind != "leaving":
            return self.tape.stacks[key][first:last]
        if self.last == self.length:
            return self.tape.views[key][-1].unsqueeze(0)
        return self.tape.stacks["carry", number][first + 1 : last + 1]

    def _columns(self, ready: Ready, steps: range) -> list[Any]:
        """What each of some steps has of its own, newest first."""
        here = slice(steps.start - self.tape.start, steps.stop - self.tape.start)
        columns: list[Any] = []
        for kind, number in ready.program.columns:
            if kind == "input":
                columns.append(self.stages.columns(number, steps)[::-1])
            elif kind == "tangent":
                stacked = self.output_gradients[number][steps.start : steps.stop].unbind()
                columns.append(map(torch.Tensor.contiguous, reversed(stacked)))
            elif kind == "slot":
                views = self.slot_views[kind, number]
                columns.append([views[-1 - (self.last - 1 - index) % self.together] for index in reversed(steps)])
            else:
                columns.append(self.tape.views[kind, number][here][::-1])
        return columns


def alone_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps no more memory alive than its own."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _slots(operand: Operand, steps: int) -> tuple[torch.Tensor, int]:
    """Slots for an operand of some steps, and the dimension of time."""
    value = value_of(operand.node)
    if not operand.swapped and not operand.batch:
        return stacking(value)(steps), 0
    shape = list(value.shape)
    if operand.swapped:
        shape[-2:] = shape[:-3:-1]
    dim = 1 if operand.batch else 0
    shape.insert(dim, steps)
    return torch.empty(shape, dtype=value.dtype, device=value.device), dim


def by_step(columns: list[Any], count: int) -> Any:
    return islice(zip(*columns, strict=False), count) if columns else iter([()] * count)
