"""The recorder of a traced loop: ranges of steps advanced, recorded, and their tapes consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..recorded import UNTIED, Boundary, Ties
from ..schedules import Advance, Record
from ..stages import Recording
from ..sums import Captured
from ..trees import Leaves
from .graphs import value_of
from .layouts import laid_out
from .passes import Pass, Tape, Way, by_step
from .programs import Arriving, Key
from .stages import Step, TracedStages, as_traced
from .sums import Sums


class TracedRanges:
    """A `Recorder` over a traced step: tapes are stacks of kept values, parameters' gradients products over them.

    Args:
        stages: the stages.
        length: how many there are.
        captured: tensors whose gradients are asked for, besides the carry's and the inputs'.
        firsts: for every leaf of carry 0 the first one that is the same tensor.
        entry: the entry of the step's own menu that stands for entry 0.
        turned: whether there is room to turn large sums of gradients back at the end.
    """

    def __init__(
        self,
        stages: TracedStages,
        length: int,
        *,
        captured: Captured,
        firsts: Sequence[int],
        entry: int = 0,
        turned: bool = True,
    ) -> None:
        self.stages, self.length, self.captured, self._firsts = stages, length, captured, firsts
        self.output_gradients: dict[int, torch.Tensor] = {}
        self._first_entry, self._turned = entry, turned
        self._ways: dict[int, Way] = {}
        self._sums: Sums | None = None

    def _way(self, entry: int) -> Way:
        if entry not in self._ways:
            self._ways[entry] = Way(self.stages, self.stages.traced.menu[self._first_entry + entry])
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
        with as_traced():
            carry, ahead = self._taken(action.start, take), stages.window().at
            for index in range(action.start, action.stop):
                columns = step.columns_of(carry, stages.inputs(index, recording=False))
                found = run(*[carry[k] for k in threaded], *columns, *ahead(index), *bound)
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
        with as_traced():
            carry = self._taken(action.start, take)
            tape = self._blank_tape(action, way)
            rows, ahead = by_step(self._columns(way, step, tape, carry), len(steps)), self.stages.window().at
            for index in steps:
                column = next(rows)  # zipped with the steps, the first row would live as long as the range
                found = run(*[carry[k] for k in threaded], *column, *ahead(index), *bound)
                carry = ready.after(found, carry)
                if first:
                    loop.emit(index, ready.outputs(found))
                del found, column
        if action.stop == self.length:
            carry = self.stages.traced.marked(carry)
        return Recording(tape, carry, UNTIED)

    def _taken(self, start: int, take: Callable[[], Boundary]) -> Leaves:
        """A carry to run on from; the caller's may be laid out otherwise, and is copied while it is used."""
        leaves = take().leaves
        return leaves if start else self.stages.traced.laid_out(leaves)

    def _blank_tape(self, action: Record, way: Way) -> Tape:
        """Memory for a range."""
        count, last = action.stop - action.start, action.stop == self.length
        stacks: dict[Key, torch.Tensor] = {}
        views: dict[Key, Sequence[torch.Tensor]] = {}
        for key, stack_of, leaves in way.stacked:
            stacks[key] = stack = stack_of(count + 1 if leaves and not last else count)
            views[key] = rows = stack.unbind()
            if leaves:
                views["leaving", key[1]] = (*rows[1:], torch.empty_like(rows[0])) if last else rows[1:]
        return Tape(action.start, action.stop, stacks, views, action.entry)

    def _columns(self, way: Way, step: Step, tape: Tape, carry: Leaves) -> list[Any]:
        """What each step has of its own: inputs, and the slots that it reads and writes; or passing memory."""
        views, steps = tape.views, range(tape.start, tape.stop)
        columns: list[Iterable[torch.Tensor]] = []
        for kind, number, make in step.columns:
            key = way.place_of(kind, number)
            if kind == "input":
                columns.append(self.stages.columns(number, steps))
            elif key is None:
                columns.append(_passing(make))
            elif kind == "next":  # the last one, if its step's backward has no use for it, only the range after holds
                kept = views[key]
                columns.append(views.get(("leaving", number)) or (*kept[1:], torch.empty_like(kept[0])))
            else:
                columns.append(views[key][: len(steps)])
                if kind == "carry":
                    views[key][0].copy_(carry[number])
        return columns

    # ---- backward

    def start_backward(self, output_gradients: Sequence[Any]) -> None:
        """See `Recorder`."""
        self.output_gradients = {k: stacked for k, stacked in enumerate(output_gradients) if stacked is not None}

    def backward(self, tape: Tape, adjoint: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """See `Recorder`."""
        width, way = len(adjoint), self._way(tape.entry)
        carries = self.stages.traced.joint.carries
        there = {k: laid_out(each, value_of(carries[k])) for k, each in enumerate(adjoint) if each is not None}
        adjoint.clear()
        arriving = Arriving(frozenset(there), frozenset(self.output_gradients))
        with as_traced():
            if self._sums is None:  # one for all entries, whose terms are the same
                reached = way.menu.reached(arriving, self.length)
                self._sums = Sums(way.menu, reached, self.stages.shared, turned=self._turned)
            there = Pass(way, self._sums, tape, arriving, self.output_gradients, self.length).run(there)
            tape.stacks.clear()
            tape.views.clear()
            if tape.start == 0:
                self._finish(there)
        return [there.get(place) for place in range(width)]

    def _finish(self, there: dict[int, torch.Tensor]) -> None:
        """The last backward is over: gradients from sums; one of a tensor that is in several places of carry 0."""
        assert self._sums is not None
        for number, gradient in self._sums.gradients().items():
            self.captured.gradients[number] = gradient
        self._sums = None
        for place in sorted(there):
            there[place] = there[place].contiguous()
            first = self._firsts[place]
            if first != place:
                gradient = there.pop(place)
                there[first] = there[first] + gradient if first in there else gradient


def _passing(make: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Fresh memory for every step."""
    while True:
        yield make()
