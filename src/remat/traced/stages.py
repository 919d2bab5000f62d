"""The stages of a loop, and the recorder of their tapes, over the programs of a traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..loops import Loop
from ..recorded import UNTIED, Boundary, Ties
from ..schedules import Advance, Record
from ..stages import Recording
from ..sums import Captured
from ..trees import Leaves
from .deferring import Operand, Term
from .graphs import value_of
from .layouts import format_of, laid_out, stacked
from .programs import Arriving, Key
from .sums import Sums, steps_together
from .traced import Menu, Ready, Traced


@contextmanager
def _as_traced() -> Iterator[None]:
    """Autograd is off, and so is autocast: its casts are operators of the graph."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


class TracedStages:
    """A loop's stages without tapes: the traced step instead of the step.

    Args:
        traced: the step.
        loop: the loop, which slices inputs and stacks outputs.
        externals: the tensors that the step uses beside its arguments.
    """

    def __init__(self, traced: Traced, loop: Loop, externals: Sequence[torch.Tensor]) -> None:
        self.traced, self.loop = traced, loop
        loop.output_structure = traced.joint.output_structure
        with _as_traced():
            self.shared = traced.shared(externals)
        self._advance = {first: _Step(traced.advance(outputs=first), self.shared) for first in (True, False)}

    def inputs(self, index: int, *, recording: bool) -> Leaves:  # noqa: ARG002  # tapes keep no history of inputs
        """The leaves of x at a step."""
        return self.loop.inputs(index, recording=False)

    def advancing(self, *, first: bool) -> _Step:
        """The program of a step without a tape."""
        return self._advance[first]

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:  # noqa: ARG002
        """One step."""
        step = self._advance[first]
        columns = step.columns_of(carry, inputs)
        with torch._C._DisableAutocast():  # see `_as_traced`
            found = step.run(*[carry[k] for k in step.threaded], *columns, *step.bound)
        return step.ready.after(found, carry), step.ready.outputs(found) if first else []

    def columns(self, leaf: int, steps: range) -> list[torch.Tensor]:
        """What steps take of one leaf of x."""
        column = self.loop.columns[leaf]
        return [column.at(index % self.loop.length) for index in steps]

    def emit(self, index: int, outputs: Leaves) -> None:
        """Stack the outputs of a first run."""
        self.loop.emit(index, outputs)

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Keep the gradients of x."""
        self.loop.take_input_gradients(index, gradients)


class _Step:
    """A program over tensors that are the same in every step."""

    def __init__(self, ready: Ready, shared: Sequence[torch.Tensor]) -> None:
        self.ready, self.run = ready, ready.function
        self.threaded = [number for _, number in ready.program.threaded]
        self.bound = [shared[number] for _, number in ready.program.bound]
        holders = [node for node in ready.program.graph.nodes if node.op == "placeholder"]
        values = map(value_of, holders[len(self.threaded) :])
        self._columns = [(*key, _maker(value)) for key, value in zip(ready.program.columns, values, strict=False)]

    def columns_of(self, carry: Leaves, inputs: Leaves) -> list[torch.Tensor]:
        """What a step has of its own where no tape is kept: a recording program writes into passing memory."""
        return [
            inputs[number] if kind == "input" else carry[number] if kind == "carry" else make()
            for kind, number, make in self._columns
        ]


def _maker(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes memory for such a value, without looking at it again."""
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    if format_of(value) is torch.contiguous_format:
        return partial(empty.new_empty, tuple(value.shape))
    return partial(empty.new_empty_strided, tuple(value.shape), value.stride())


@dataclass(slots=True)
class _Tape:
    """What a recorded range keeps: stacks over its steps, by what they hold, and the same step by step.

    Carries that steps keep as they leave too have a row more than there are steps, but for the last range of all: what
    its last step leaves belongs to the caller.
    """

    start: int
    stop: int
    stacks: dict[Key, torch.Tensor]
    views: dict[Key, Sequence[torch.Tensor]]
    entry: int


class _Way:
    """One entry of the menu in one pass: its programs over what is the same in every step, and its sums."""

    def __init__(self, stages: TracedStages, menu: Menu) -> None:
        self.stages, self.menu = stages, menu
        self.together = min(steps_together(menu), stages.loop.length)
        self.sums: Sums | None = None
        self._records: dict[bool, _Step] = {}
        self._backwards: dict[Arriving, _Step] = {}

    def record(self, *, outputs: bool) -> _Step:
        """The recording program."""
        if outputs not in self._records:
            self._records[outputs] = _Step(self.menu.record(outputs=outputs), self.stages.shared)
        return self._records[outputs]

    def backward(self, arriving: Arriving) -> _Step:
        """The backward program where these gradients arrive."""
        if arriving not in self._backwards:
            self._backwards[arriving] = _Step(self.menu.backward(arriving), self.stages.shared)
        return self._backwards[arriving]


class TracedRanges:
    """A `Recorder` over a traced step: tapes are stacks of kept values, parameters' gradients products over them.

    Args:
        stages: the stages.
        length: how many there are.
        captured: tensors whose gradients are asked for, besides the carry's and the inputs'.
        firsts: for every leaf of carry 0 the first one that is the same tensor.
        entry: the entry of the step's own menu that stands for entry 0.
    """

    def __init__(
        self, stages: TracedStages, length: int, *, captured: Captured, firsts: Sequence[int], entry: int = 0
    ) -> None:
        self.stages, self.length, self.captured, self._firsts = stages, length, captured, firsts
        self.output_gradients: dict[int, torch.Tensor] = {}
        self._first_entry = entry
        self._ways: dict[int, _Way] = {}

    def _way(self, entry: int) -> _Way:
        if entry not in self._ways:
            self._ways[entry] = _Way(self.stages, self.stages.traced.menu[self._first_entry + entry])
        return self._ways[entry]

    # ---- advancing and recording

    def advance(
        self, action: Advance, take: Callable[[], Boundary], *, first: bool, grad_mode: bool
    ) -> tuple[Leaves, Ties]:
        """See `Recorder`."""
        assert not grad_mode, "a traced step computes without autograd"
        stages = self.stages
        step = stages.advancing(first=first)
        run, threaded, bound, ready, emit = step.run, step.threaded, step.bound, step.ready, stages.loop.emit
        with torch.no_grad(), torch._C._DisableAutocast():
            carry = take().leaves
            for index in range(action.start, action.stop):
                columns = step.columns_of(carry, stages.inputs(index, recording=False))
                found = run(*[carry[k] for k in threaded], *columns, *bound)
                carry = ready.after(found, carry)
                if first:
                    emit(index, ready.outputs(found))
                del found, columns
        return carry, UNTIED

    def record(self, action: Record, take: Callable[[], Boundary], *, first: bool) -> Recording:
        """See `Recorder`."""
        way, loop = self._way(action.entry), self.stages.loop
        step = way.record(outputs=first)
        run, threaded, bound, ready = step.run, step.threaded, step.bound, step.ready
        steps = range(action.start, action.stop)
        with _as_traced():
            carry = take().leaves
            tape = self._blank_tape(action, way.menu)
            columns = self._columns(ready, steps, tape, carry)
            for index, column in zip(steps, _rows(columns, len(steps)), strict=True):
                found = run(*[carry[k] for k in threaded], *column, *bound)
                carry = ready.after(found, carry)
                if first:
                    loop.emit(index, ready.outputs(found))
                del found, column
        if action.stop == self.length:
            carry = self.stages.traced.marked(carry)
        return Recording(tape, carry, UNTIED)

    def _blank_tape(self, action: Record, menu: Menu) -> _Tape:
        """Memory for a range."""
        count, leaving = action.stop - action.start, menu.entry.leaving
        stacks: dict[Key, torch.Tensor] = {}
        views: dict[Key, Sequence[torch.Tensor]] = {}
        for key, value in menu.stacked():
            kind, place = key
            more = kind == "carry" and place in leaving and action.stop < self.length
            stacks[key] = stack = stacked(value, count + more)
            views[key] = rows = stack.unbind()
            if kind == "carry" and place in leaving:
                views["leaving", place] = rows[1:] if more else (*rows[1:], torch.empty_like(rows[0]))
        return _Tape(action.start, action.stop, stacks, views, action.entry)

    def _columns(self, ready: Ready, steps: range, tape: _Tape, carry: Leaves) -> list[Any]:
        """What each step has of its own: inputs, and the slots that it reads and writes."""
        views, columns = tape.views, list[Sequence[torch.Tensor]]()
        for kind, number in ready.program.columns:
            if kind == "input":
                columns.append(self.stages.columns(number, steps))
            elif kind == "next":  # the last one, if its step's backward has no use for it, only the range after holds
                kept = views["carry", number]
                columns.append(views.get(("leaving", number)) or (*kept[1:], torch.empty_like(kept[0])))
            else:
                columns.append(views[kind, number][: len(steps)])
                if kind == "carry":
                    columns[-1][0].copy_(carry[number])
        return columns

    # ---- backward

    def start_backward(self, output_gradients: Sequence[Any]) -> None:
        """See `Recorder`."""
        self.output_gradients = {k: stacked for k, stacked in enumerate(output_gradients) if stacked is not None}

    def backward(self, tape: _Tape, adjoint: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """See `Recorder`."""
        width, way = len(adjoint), self._way(tape.entry)
        carries = self.stages.traced.joint.carries
        there = {k: laid_out(each, value_of(carries[k])) for k, each in enumerate(adjoint) if each is not None}
        adjoint.clear()
        arriving = Arriving(frozenset(there), frozenset(self.output_gradients))
        with _as_traced():
            if way.sums is None:
                way.sums = Sums(way.menu, way.menu.reached(arriving, self.length), self.stages.shared)
            there = _Pass(self, way, tape, arriving).run(there)
            if tape.start == 0:
                self._finish(there)
        return [there.get(place) for place in range(width)]

    def _finish(self, there: dict[int, torch.Tensor]) -> None:
        """The last backward is over: gradients from sums; one of a tensor that is in several places of carry 0."""
        for way in self._ways.values():
            if way.sums is not None:
                for number, gradient in way.sums.gradients().items():
                    before = self.captured.gradients[number]
                    self.captured.gradients[number] = gradient if before is None else before.add_(gradient)
                way.sums = None
        for place in sorted(there):
            there[place] = there[place].contiguous()
            first = self._firsts[place]
            if first != place:
                gradient = there.pop(place)
                there[first] = there[first] + gradient if first in there else gradient


class _Pass:
    """The backward of one range."""

    def __init__(self, owner: TracedRanges, way: _Way, tape: _Tape, arriving: Arriving) -> None:
        assert way.sums is not None
        self.owner, self.way, self.tape, self.arriving = owner, way, tape, arriving
        self.sums = sums = way.sums
        plan, self.together = way.menu.plan, way.together
        self.slots = {
            ("slot", k): _slots(operand, self.together)
            for k, operand in enumerate(plan.slots)
            if any(operand in term.operands for term in sums.terms)
        }
        self.slot_views = {key: stack.unbind(operand_dim) for key, (stack, operand_dim) in self.slots.items()}
        self.waiting: list[Term] = []
        self.first = self.last = tape.stop  # steps whose operands wait

    def run(self, there: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """All steps, newest first; gradients of the leaving carry in, those of the entering carry out."""
        loop = self.owner.stages.loop
        wanted = [k for k, column in enumerate(loop.columns) if column.needs]
        index = self.tape.stop
        while index > self.tape.start:
            arriving = Arriving(frozenset(there), self.arriving.outputs)
            step = self.way.backward(arriving)
            results = step.ready.program.results
            carries = [(number, place) for (kind, number), place in results.items() if kind == "carry"]
            values = [(self.sums.values[n], place) for (kind, n), place in results.items() if kind == "value"]
            inputs = [results.get(("input", k)) for k in wanted]
            same = {number for number, _ in carries} == set(there)
            stop = self.tape.start if same else index - 1
            self._wait_for(step.ready.program.live)
            columns = self._columns(step.ready, range(stop, index))
            for row in _rows(columns, index - stop):
                index -= 1
                found = step.run(*[there[k] for k in step.threaded], *row, *step.bound)
                there = {number: found[place] for number, place in carries}
                for totals, place in values:
                    for total in totals:
                        total.add_(found[place])
                if wanted:
                    loop.take_input_gradients(index, [None if place is None else found[place] for place in inputs])
                del found, row
                self.first = index
                if self.last - index == self.together or index == self.owner.length - 1:  # whose end lies apart
                    self.flush()
        self.flush()
        return {place: _alone(gradient) for place, gradient in there.items()}

    def _wait_for(self, live: list[Term]) -> None:
        """Steps with other terms are added by themselves."""
        if live != self.waiting:
            self.flush()
        self.waiting = live

    def flush(self) -> None:
        """Add the terms of the steps that wait."""
        if self.first < self.last:
            self.sums.add(self._block, self.waiting)
        self.last = self.first

    def _block(self, operand: Operand) -> torch.Tensor:
        """An operand of the steps that wait, oldest first."""
        kind, number = key = self.way.menu.plan.sources[operand]
        if kind == "input":
            loop = self.owner.stages.loop
            return loop.columns[number].block(self.first, self.last)
        if kind == "slot":
            stack, dim = self.slots[key]
            return stack.narrow(dim, self.together - (self.last - self.first), self.last - self.first)
        first, last = self.first - self.tape.start, self.last - self.tape.start
        if kind != "leaving":
            return self.tape.stacks[key][first:last]
        if self.last == self.owner.length:
            return self.tape.views[key][-1].unsqueeze(0)
        return self.tape.stacks["carry", number][first + 1 : last + 1]

    def _columns(self, ready: Ready, steps: range) -> list[Any]:
        """What each of some steps has of its own, newest first."""
        here = slice(steps.start - self.tape.start, steps.stop - self.tape.start)
        columns: list[Any] = []
        for kind, number in ready.program.columns:
            if kind == "input":
                columns.append(self.owner.stages.columns(number, steps)[::-1])
            elif kind == "tangent":
                stacked = self.owner.output_gradients[number][steps.start : steps.stop].unbind()
                columns.append(map(torch.Tensor.contiguous, reversed(stacked)))
            elif kind == "slot":
                views = self.slot_views[kind, number]
                columns.append([views[-1 - (self.last - 1 - index) % self.together] for index in reversed(steps)])
            else:
                columns.append(self.tape.views[kind, number][here][::-1])
        return columns


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps no more memory alive than its own."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _rows(columns: list[Any], count: int) -> Any:
    return zip(*columns, strict=True) if columns else iter([()] * count)


def _slots(operand: Operand, steps: int) -> tuple[torch.Tensor, int]:
    """Slots for an operand of some steps, and the dimension of time."""
    value = value_of(operand.node)
    if not operand.swapped and not operand.batch:
        return stacked(value, steps), 0
    shape = list(value.shape)
    if operand.swapped:
        shape[-2:] = shape[:-3:-1]
    dim = 1 if operand.batch else 0
    shape.insert(dim, steps)
    return torch.empty(shape, dtype=value.dtype, device=value.device), dim
