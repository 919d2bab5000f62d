"""What one block costs: bytes and seconds off a gauge, by running it alone on its real carry.

The interpreter runs it, so what is measured is what will be done. The rules of what is alive stand in `chains`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import torch

from ..ambient import Source, States, Surroundings
from ..chains import Stage, Tape
from ..gauges import Gauge, Reading, no_collections
from ..interpreter import Interpreter
from ..profiler import keeps_less, menu_of
from ..ranges import SELECTIVE, WHOLE, AutogradRanges, Replays
from ..recorded import Boundary, bytes_of, copied, hooks_set_aside, needs_gradient
from ..schedules import Advance, Backward, Record
from ..stages import Stages
from ..sums import Captured
from ..trees import Leaves

_ROUNDS: Final = 3  # of seconds, beside the run in which bytes are counted, whose seconds have the meter's in them


class Subject(NamedTuple):
    """A block to be measured.

    Attributes:
        sort: what it is made of: blocks of one sort that take the same bytes take the same seconds.
        stages: the block as a chain of one.
        carry: leaves of the carry that enters, those that need a gradient saying so.
        carry_bytes, leaving_bytes: of the carries that enter and leave.
        needs: which leaves of the leaving carry need a gradient.
        leaving: tensors like those leaves on the meta device, else None.
        devices: where they are.
        captured: what the block uses besides, what other blocks use too last.
        summed: how many of those others use: their gradients are sums, which have begun.
        copies: whether it changes its carry in place.
        grad_mode: whether it computes otherwise when autograd is off.
        sources: what it changes: set back after each run.
        streams: random streams that it draws from.
    """

    sort: Hashable
    stages: Stages
    carry: Leaves
    carry_bytes: int
    leaving_bytes: int
    needs: Sequence[bool]
    leaving: Sequence[torch.Tensor | None]
    devices: Sequence[torch.device | None]
    captured: Sequence[torch.Tensor]
    summed: int
    copies: bool
    grad_mode: bool
    sources: Sequence[Source]
    streams: tuple[Source, ...]


class Clock:
    """Seconds of blocks, taken once of all that are of one sort and take the same bytes.

    So blocks that differ in a number that decides about nothing, as their place among the layers, have equal costs, and
    noise in a clock does not make plans think one of them cheaper.

    Args:
        gauge: what measures.
        rounds: how often seconds are taken; 0: those that come with the bytes will do.
    """

    def __init__(self, gauge: Gauge, rounds: int = _ROUNDS) -> None:
        self.gauge, self.rounds = gauge, rounds
        self._known: dict[Hashable, list[float]] = {}

    def readings(
        self, sort: Hashable, job: Callable[[Callable[[], object]], list[int]]
    ) -> tuple[list[Reading], list[int]]:
        """What happens between the marks of a job, and what it returns."""
        readings, made = self.gauge.bytes_of(job)
        readings = readings[1:]
        if not self.rounds:
            return readings, made
        key = sort, tuple((reading.net_bytes, reading.peak_bytes) for reading in readings), tuple(made)
        if key not in self._known:
            rounds = [self.gauge.seconds_of(job) for _ in range(self.rounds)]
            self._known[key] = [min(spans) for spans in zip(*rounds, strict=True)]
        spans = self._known[key]
        return [reading._replace(seconds=span) for reading, span in zip(readings, spans, strict=False)], made


def measured(of: Subject, surroundings: Surroundings, clock: Clock) -> tuple[Stage, list[int]]:
    """What the block costs as a stage, and the bytes of the gradients of what it has captured, in order.

    Args:
        of: the block.
        surroundings: the settings to run under.
        clock: what measures.
    """
    with no_collections(), as_they_were([*of.sources, *of.streams]):
        whole = _Run(of, surroundings, clock, WHOLE)
        others = [] if of.copies else list(_selective(of, surroundings, clock))
    less = (tape for tape in others if keeps_less(tape, whole.tape))
    menu = menu_of(whole.tape, less, whole.advance.seconds)
    workspace = max(whole.advance.peak_bytes - of.leaving_bytes, 0)
    return Stage(of.carry_bytes, menu, forward_s=whole.advance.seconds, workspace_bytes=workspace), whole.gradients


def _selective(of: Subject, surroundings: Surroundings, clock: Clock) -> Iterator[Tape]:
    """The selective tape, if the block can have one."""
    with suppress(Exception):  # transforms inside, a backward of its own, ...: it has run whole, so it is the hooks
        yield _Run(of, surroundings, clock, SELECTIVE).tape


class _Run:
    """The block advanced, recorded with one entry of its menu, and taken back.

    Attributes:
        advance: what it costs to run it without a tape.
        tape: what it costs to record it.
        gradients: bytes of the gradients of what it has captured.
    """

    def __init__(self, of: Subject, surroundings: Surroundings, clock: Clock, entry: int) -> None:
        self._of, self._surroundings, self._entry = of, surroundings, entry
        readings, self.gradients = clock.readings((of.sort, entry), self._job)
        advance, _, record, left, entered, _, backward = readings[:7]
        self.advance = advance
        tape_bytes = max(record.net_bytes - of.leaving_bytes, 0)
        self.tape = Tape(
            tape_bytes=tape_bytes,
            entering_bytes=max(of.carry_bytes + min(entered.net_bytes, 0), 0),
            leaving_bytes=max(of.leaving_bytes + min(left.net_bytes, 0), 0),
            forward_s=record.seconds,
            backward_s=backward.seconds,
            workspace_bytes=max(record.peak_bytes - tape_bytes - of.leaving_bytes, 0),
            backward_workspace_bytes=backward.peak_bytes,
            name="whole" if entry == WHOLE else "selective",
        )

    def _job(self, mark: Callable[[], object]) -> list[int]:
        """One run; its marks stand between what is measured. Returns the bytes of gradients."""
        of, run = self._of, self._interpreter()
        with hooks_set_aside(run.captured.tensors):
            mark()
            if self._entry == WHOLE:
                run.do(Advance(0, 1))
            mark()
            entering = copied(of.carry)  # held by this name and the boundary alone
            run.live = Boundary([leaf.detach() if needs_gradient(leaf) else leaf for leaf in entering])
            mark()
            run.do(Record(0, 1, self._entry))
            mark()
            run.live = None
            del run.ends[1]
            mark()
            del entering
            mark()
            pairs = zip(of.leaving, of.devices, strict=True)
            run.start_backward([None if leaf is None else torch.zeros_like(leaf, device=d) for leaf, d in pairs], ())
            mark()
            run.do(Backward(0, 1))
            mark()
        return [0 if gradient is None else bytes_of(gradient) for gradient in run.captured.gradients]

    def _interpreter(self) -> Interpreter:
        """The block, and after it another that is never run: the leaving carry is not the caller's."""
        of = self._of
        needs = (list(map(needs_gradient, of.carry)), list(of.needs))
        everything = range(len(of.captured))
        summed = everything[len(everything) - of.summed :]
        captured = Captured(of.captured, (everything, summed))
        for number in summed:  # its sum has begun with the block after
            captured.gradients[number] = torch.zeros_like(of.captured[number])

        def copies(stage: int) -> bool:
            return of.copies and stage == 0

        states = States(of.streams)
        replays = Replays(states, self._surroundings)
        return Interpreter(
            AutogradRanges(of.stages, 2, needs=needs.__getitem__, captured=captured, copies=copies, replays=replays),
            iter(()),
            2,
            of.carry,
            states=states,
            surroundings=self._surroundings,
            copies=copies,
            grad_mode=lambda _: of.grad_mode,
        )


@contextmanager
def as_they_were(sources: Sequence[Source]) -> Iterator[None]:
    """Leave sources as they were at entry."""
    states = [source.get() for source in sources]
    try:
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.set(state)
