"""Carries a schedule out on real stages: the only place that runs one.

It keeps carries: live, in slots, at the ends of recorded ranges. How a range is advanced or recorded, and how its tapes
are consumed, is a `Recorder`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from .ambient import States, Surroundings, recomputing
from .errors import StepError
from .recorded import (
    Boundary,
    copied,
    detached,
    hooks_set_aside,
    places_of,
    versions_of,
)
from .schedules import Action, Advance, Backward, Drop, Load, Record, Store
from .stages import ByStage, Recorder, never
from .trees import Leaves

_FIRST: Final = nullcontext()


class Gradients(NamedTuple):
    """What a backward pass leaves: the adjoint of carry 0 by leaf, and the captured tensors' gradients."""

    carry: list[torch.Tensor | None]
    captured: list[torch.Tensor | None]


class Interpreter:
    """One run of a schedule: `forward` up to the first Backward, then `backward` from there to the end.

    Args:
        recorder: how real stages are advanced and recorded.
        actions: the schedule.
        length: how many stages there are.
        carry: leaves of carry 0.
        states: what belongs to carries beside their leaves (random states, buffers).
        surroundings: settings to run under.
        copies: whether a stage changes its carry in place, so that what is kept must be copied for it.
        grad_mode: whether a stage that is advanced runs with autograd on, as it computes otherwise without.
        singly: run every stage of a range by itself: stages differ, and `backward_of` can stop after each.
    """

    def __init__(
        self,
        recorder: Recorder,
        actions: Iterator[Action],
        length: int,
        carry: Leaves,
        *,
        states: States,
        surroundings: Surroundings,
        copies: ByStage = never,
        grad_mode: ByStage = never,
        singly: bool = False,
    ) -> None:
        self.recorder, self.actions, self.length = recorder, actions, length
        self.states, self.surroundings = states, surroundings
        self.captured = recorder.captured
        self.copies, self.grad_mode, self.singly = copies, grad_mode, singly
        self.caller = Boundary(detached(carry), states.start, self.captured.ties(carry))
        self.live: Boundary | None = self._unshared(0, self.caller)
        self.slots: dict[int, Boundary] = {}
        self.tapes: dict[int, Any] = {}  # of recorded ranges, by the carry at their end
        self.ends: dict[int, Boundary] = {}  # these carries, but for those that only the next range needs
        self.frontier = 0  # stages from here on have not run yet
        self.done = length  # stages from here on have had their backward
        self.adjoint: list[torch.Tensor | None] = []
        self.final: Leaves = []  # carry L with the history of its range
        self._pending: Backward | None = None

    @property
    def aside_bytes(self) -> int:
        """Bytes stored with a carry beside its leaves: states, and a copy where stages change what they run on."""
        size = sum(self.caller.leaves[place].nbytes for place in places_of(self.caller.leaves)) if self.copies(0) else 0
        return size + self.states.nbytes

    def settle(self) -> None:
        """The first pass is over: let go of the states of all that it left unchanged.

        Raises:
            LateChange, StepError: as `States.settle`.
        """
        self.states.settle()
        for boundary in (self.caller, self.live, *self.slots.values(), *self.ends.values()):
            if boundary is not None:
                boundary.states = self.states.kept(boundary.states)

    # ---- the two halves

    def forward(self) -> Leaves:
        """Run up to the first Backward; returns carry L, its leaves still tied to the last range's graph."""
        for action in self.actions:
            if type(action) is Backward:
                self._pending = action
                break
            self.do(action)
        final, self.final = self.final, []
        return final

    def backward(self, adjoint: Sequence[torch.Tensor | None], output_gradients: Sequence[Any]) -> Gradients:
        """Run the rest, with the gradients that arrived for carry L and for the outputs, stacked over stages.

        Stages run in the forward's surroundings; a backward runs in those of now, autocast for instance, as the plain
        run's does.
        """
        self.start_backward(adjoint, output_gradients)
        with hooks_set_aside(self.captured.tensors):
            if self._pending is not None:
                self.do(self._pending)
            for action in self.actions:
                if isinstance(action, Advance | Record):
                    with self.surroundings.entered():
                        self.do(action)
                else:
                    self.do(action)
        return Gradients(self.adjoint, self.captured.gradients)

    def start_backward(self, adjoint: Sequence[torch.Tensor | None], output_gradients: Sequence[Any]) -> None:
        """Take the gradients that arrived from outside."""
        self.adjoint = list(adjoint)
        self.recorder.start_backward(output_gradients)

    def backward_of(self, stage: int, replaying: Callable[[], AbstractContextManager[None]]) -> None:
        """Run on until the backward of `stage` has been done, and no further; only where ranges are recorded singly.

        Args:
            stage: the stage.
            replaying: what stages are to be run in; a backward alone runs as the plain run's does.
        """
        while self.done > stage:
            action = self._pending or next(self.actions)
            if not isinstance(action, Backward):
                with replaying():
                    while not isinstance(action, Backward):
                        self.do(action)
                        action = next(self.actions)
            newest = action.stop - 1
            self._pending = Backward(action.start, newest) if action.start < newest else None
            self.do(Backward(newest, action.stop))

    def do(self, action: Action) -> None:
        """Carry out one action."""
        _VERBS[type(action)](self, action)

    # ---- carries

    def _take_live(self) -> Boundary:
        boundary, self.live = self.live, None
        assert boundary is not None, "the simulator refuses schedules that run from no carry"
        return boundary

    def _unshared(self, at: int, kept: Boundary) -> Boundary:
        """What stages may run on from carry `at`: the carry itself, or a copy where they would change it."""
        return Boundary(copied(kept.leaves), kept.states, kept.ties) if self.copies(at) else kept

    def _store(self, action: Store) -> None:
        live = self.live
        assert live is not None
        leaves = copied(live.leaves) if self.copies(action.at) else live.leaves
        self.slots[action.at] = Boundary(leaves, self.states.take(), live.ties, versions_of(leaves))

    def _load(self, action: Load) -> None:
        kept = self.slots.get(action.at)
        if kept is None:
            kept = self.ends[action.at] if action.at else self.caller
        if kept.versions and kept.versions != versions_of(kept.leaves):
            raise StepError(
                f"the carry that enters step {action.at} was changed in place after it had been stored; "
                "return new tensors from the step, or change a clone of the carry"
            )
        self.states.restore(kept.states)
        self.live = self._unshared(action.at, kept)

    def _drop(self, action: Drop) -> None:
        del self.slots[action.at]

    # ---- running stages

    def _is_first(self, action: Advance | Record) -> bool:
        """Whether stages run for the first time; from now on they have."""
        if action.start < self.frontier:
            self.frontier = max(self.frontier, action.stop)
            return False
        self.frontier = action.stop
        return True

    def _running(self, *, first: bool) -> AbstractContextManager[object]:
        """What stages are run in: no cast crosses their ends, and replays are known for that."""
        run = _FIRST if first else recomputing()
        return self._with_own_casts(run) if self.surroundings.casts else run

    @contextmanager
    def _with_own_casts(self, run: AbstractContextManager[object]) -> Iterator[None]:
        with self.surroundings.own_cast_cache(), run:
            yield

    def _advance(self, action: Advance) -> None:
        if not self.singly:
            self._advance_range(action)
            return
        for stage in range(action.start, action.stop):
            self._advance_range(Advance(stage, stage + 1))

    def _advance_range(self, action: Advance) -> None:
        first, grad_mode = self._is_first(action), self.grad_mode(action.start)
        with self._running(first=first):
            carry, ties = self.recorder.advance(action, self._take_live, first=first, grad_mode=grad_mode)
        if first and action.stop == self.length:
            self.final = carry
        self.live = Boundary(carry, (), ties)

    def _record(self, action: Record) -> None:
        if not self.singly:
            self._record_range(action)
            return
        for stage in range(action.start, action.stop):
            self._record_range(Record(stage, stage + 1, action.entry))
            if stage > action.start:
                del self.ends[stage]  # inside a range, tapes alone keep the carry

    def _record_range(self, action: Record) -> None:
        first = self._is_first(action)
        with self._running(first=first):
            recording = self.recorder.record(action, self._take_live, first=first)
        if first and action.stop == self.length:
            self.final = recording.carry
        end = Boundary(detached(recording.carry), self.states.take(), recording.ties)
        self.tapes[action.stop], self.ends[action.stop] = recording.tape, end
        self.live = self._unshared(action.stop, end)

    def _backward(self, action: Backward) -> None:
        self.live = None
        self.ends.pop(action.stop, None)
        tape = self.tapes.pop(action.stop)
        adjoint, self.adjoint = self.adjoint, []
        self.adjoint = self.recorder.backward(tape, adjoint)
        self.done = action.start


_VERBS: dict[type, Callable[[Interpreter, Any], None]] = {
    Advance: Interpreter._advance,
    Store: Interpreter._store,
    Load: Interpreter._load,
    Drop: Interpreter._drop,
    Record: Interpreter._record,
    Backward: Interpreter._backward,
}
