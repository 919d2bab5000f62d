"""What one block costs: bytes from the meter, seconds from the clock, by running it alone on its real carry.

The interpreter runs it, so what is measured is what will be done. The rules of what is alive stand in `chains`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .ambient import Source, States, Surroundings
from .chains import Stage, Tape
from .interpreter import Interpreter
from .meter import Session, metering
from .profiler import no_collections
from .ranges import AutogradRanges, Captured, Stages
from .recorded import Boundary, bytes_of, copied, hooks_set_aside, needs_gradient
from .schedules import Advance, Backward, Load, Record
from .trees import Leaves


class Subject(NamedTuple):
    """A block to be measured.

    Attributes:
        stages: the block as a chain of one.
        carry: leaves of the carry that enters, those that need a gradient saying so.
        carry_bytes, leaving_bytes: of the carries that enter and leave.
        needs: which leaves of the leaving carry need a gradient.
        leaving: tensors like those leaves, else None.
        captured: what the block uses besides, what all blocks share last.
        shared: how many of those are shared.
        copies: whether it changes its carry in place.
        grad_mode: whether it computes otherwise when autograd is off.
        sources: what it changes: set back after each run.
    """

    stages: Stages
    carry: Leaves
    carry_bytes: int
    leaving_bytes: int
    needs: Sequence[bool]
    leaving: Sequence[torch.Tensor | None]
    captured: Sequence[torch.Tensor]
    shared: int
    copies: bool
    grad_mode: bool
    sources: Sequence[Source]


def measured(of: Subject, surroundings: Surroundings, device: torch.device) -> tuple[Stage, list[int]]:
    """What the block costs as a stage, and the bytes of the gradients of what it has captured, in order.

    Two rounds: in one somebody else keeps the entering carry, in the other the tape alone does.
    """
    with no_collections(), as_they_were(of.sources):
        kept, gradients = _round(of, surroundings, device, keep=True)
        alone, _ = _round(of, surroundings, device, keep=False)
    tape_bytes = max(kept.record.net - of.leaving_bytes, 0)
    entering = alone.record.net + of.carry_bytes - of.leaving_bytes - tape_bytes
    tape = Tape(
        tape_bytes=tape_bytes,
        entering_bytes=min(max(entering, 0), of.carry_bytes),
        leaving_bytes=max(of.leaving_bytes + min(kept.drop.net, 0), 0),
        forward_s=min(kept.record.seconds, alone.record.seconds),
        backward_s=min(kept.backward.seconds, alone.backward.seconds),
        workspace_bytes=max(kept.record.peak - tape_bytes - of.leaving_bytes, 0),
        backward_workspace_bytes=kept.backward.peak,
    )
    advance_s = min(kept.advance.seconds, alone.advance.seconds)
    workspace = max(kept.advance.peak - of.leaving_bytes, 0)
    return Stage(of.carry_bytes, (tape,), forward_s=advance_s, workspace_bytes=workspace), gradients


class _Phase(NamedTuple):
    """Bytes gained, most bytes over those at the start, and seconds."""

    net: int
    peak: int
    seconds: float


class _Round(NamedTuple):
    advance: _Phase
    record: _Phase
    drop: _Phase
    backward: _Phase


def _round(of: Subject, surroundings: Surroundings, device: torch.device, *, keep: bool) -> tuple[_Round, list[int]]:
    """The block advanced, recorded, its leaving carry let go, its tape consumed."""
    run = _interpreter(of, surroundings)
    with hooks_set_aside(run.captured.tensors), metering(device) as session:
        clock = _Clock(session)
        run.do(Advance(0, 1))
        clock.mark()
        run.do(Load(0))
        if not keep:
            run.live = Boundary(copied(run.caller.leaves))
        clock.mark()
        run.do(Record(0, 1))
        clock.mark()
        run.live = run.ranges[1].end = None
        clock.mark()
        run.start_backward([None if leaf is None else torch.zeros_like(leaf) for leaf in of.leaving], ())
        clock.mark()
        run.do(Backward(0, 1))
        clock.mark()
    advance, _, record, drop, _, backward = clock.phases()
    gradients = [0 if gradient is None else bytes_of(gradient) for gradient in run.captured.gradients]
    return _Round(advance, record, drop, backward), gradients


def _interpreter(of: Subject, surroundings: Surroundings) -> Interpreter:
    """The block, and after it another that is never run: the leaving carry is not the caller's."""
    needs = (list(map(needs_gradient, of.carry)), list(of.needs))
    everything = range(len(of.captured))
    captured = Captured(of.captured, (everything, everything[len(everything) - of.shared :]))
    for number in everything[len(everything) - of.shared :]:  # its sum has begun with the block after
        captured.gradients[number] = torch.zeros_like(of.captured[number])

    def copies(stage: int) -> bool:
        return of.copies and stage == 0

    return Interpreter(
        of.stages,
        AutogradRanges(of.stages, 2, needs=needs.__getitem__, captured=captured, copies=copies),
        iter(()),
        2,
        of.carry,
        states=States(()),
        surroundings=surroundings,
        needs=needs.__getitem__,
        copies=copies,
        grad_mode=lambda _: of.grad_mode,
    )


class _Clock:
    """The phases of a session with the time of each; the first begins when this is made."""

    def __init__(self, session: Session) -> None:
        self._session = session
        session.mark("")
        self._starts = [time.perf_counter()]
        self._ends: list[float] = []

    def mark(self) -> None:
        """End a phase here."""
        self._session.synchronize()
        self._ends.append(time.perf_counter())
        self._session.mark("")
        self._starts.append(time.perf_counter())

    def phases(self) -> list[_Phase]:
        """All of them, once the session is over."""
        spans = [end - start for start, end in zip(self._starts, self._ends, strict=False)]
        phases = self._session.phases[1 : len(spans) + 1]
        return [_Phase(phase.net_bytes, phase.peak_bytes, span) for phase, span in zip(phases, spans, strict=True)]


@contextmanager
def as_they_were(sources: Sequence[Source]) -> Iterator[None]:
    """Leave sources as they were at entry."""
    states = [source.get() for source in sources]
    try:
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.set(state)
