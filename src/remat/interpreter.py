"""Carries a schedule out on real stages: the only place that runs one.

What a recorded range is, and why gradients come out bit for bit, stands in `recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import graph

from .ambient import States, Surroundings, recomputing
from .errors import LateGradient, StepError
from .recorded import (
    Boundary,
    Enter,
    RecordedRange,
    Resume,
    Root,
    added,
    can_need,
    copied,
    detached,
    edge_of,
    hooks_set_aside,
    needs_gradient,
    places_of,
    root_of,
    sequence_number,
    shared_leaves,
    start_of_sums,
    versions_of,
)
from .schedules import Action, Advance, Backward, Drop, Load, Record, Store
from .trees import Leaves


class Stages(Protocol):
    """Real stages, as the interpreter sees them."""

    def inputs(self, index: int, *, recording: bool) -> Leaves:
        """What stage `index` takes beside its carry; when recording, leaves that need a gradient are fresh aliases."""
        ...

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """Stage `index` on a carry: the next carry and the outputs; `first` when it runs for the first time."""
        ...

    def emit(self, index: int, outputs: Leaves) -> None:
        """Take the outputs of a first run."""
        ...

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Take the gradients of those inputs of stage `index` that need one."""
        ...


class Gradients(NamedTuple):
    """What a backward pass leaves: the adjoint of carry 0 by leaf, and the captured tensors' gradients."""

    carry: list[torch.Tensor | None]
    captured: list[torch.Tensor | None]


class Interpreter:
    """One run of a schedule: `forward` up to the first Backward, then `backward` from there to the end.

    Args:
        stages: the real stages.
        actions: the schedule.
        length: how many stages there are.
        carry: leaves of carry 0.
        states: what belongs to carries beside their leaves (random states, buffers).
        surroundings: settings to run under.
        needs: whether carry leaf k needs a gradient anywhere beyond carry 0.
        captured: tensors whose gradients are asked for, besides carry 0 and the inputs.
        copies: whether the stages change their carry in place, so that stored ones must be copied.
        grad_mode: run advanced stages with autograd on, for stages that compute otherwise without it.
    """

    def __init__(
        self,
        stages: Stages,
        actions: Iterator[Action],
        length: int,
        carry: Leaves,
        *,
        states: States,
        surroundings: Surroundings,
        needs: Sequence[bool],
        captured: Sequence[torch.Tensor],
        copies: bool = False,
        grad_mode: bool = False,
    ) -> None:
        self.stages, self.actions, self.length = stages, actions, length
        self.states, self.surroundings = states, surroundings
        self.needs, self.captured = tuple(needs), tuple(captured)
        self.copies, self.grad_mode = copies, grad_mode
        self.caller = Boundary(detached(carry), states.start)
        self._caller_needs = [needs_gradient(leaf) for leaf in carry]
        self.live: Boundary | None = self._unshared(self.caller)
        self.slots: dict[int, Boundary] = {}
        self.ranges: dict[int, RecordedRange] = {}  # by the carry at their end
        self.frontier = 0  # stages from here on have not run yet
        self.adjoint: list[torch.Tensor | None] = []
        self.output_gradients: Sequence[torch.Tensor | None] = ()
        self.captured_gradients: list[torch.Tensor | None] = [None] * len(self.captured)
        self.final: Leaves = []  # carry L with the history of its range
        self.anchor = torch.zeros((), requires_grad=True)
        self._one = torch.ones(())
        self._pending: Action | None = None

    @property
    def aside_bytes(self) -> int:
        """Bytes stored with a carry beside its leaves: states, and a copy where stages change what they run on."""
        size = sum(self.caller.leaves[place].nbytes for place in places_of(self.caller.leaves)) if self.copies else 0
        return size + self.states.nbytes

    def settle(self) -> None:
        """The first pass is over: let go of the states of all that it left unchanged.

        Raises:
            LateChange, StepError: as `States.settle`.
        """
        self.states.settle()
        ends = (recorded.end for recorded in self.ranges.values())
        for boundary in (self.caller, self.live, *self.slots.values(), *ends):
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

    def backward(
        self, adjoint: Sequence[torch.Tensor | None], output_gradients: Sequence[torch.Tensor | None]
    ) -> Gradients:
        """Run the rest, with the gradients that arrived for carry L and for the outputs, stacked over stages."""
        self.start_backward(adjoint, output_gradients)
        with hooks_set_aside(self.captured):
            if self._pending is not None:
                self.do(self._pending)
            for action in self.actions:
                self.do(action)
        return Gradients(self.adjoint, self.captured_gradients)

    def start_backward(
        self, adjoint: Sequence[torch.Tensor | None], output_gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Take the gradients that arrived from outside."""
        self.adjoint, self.output_gradients = list(adjoint), output_gradients

    def do(self, action: Action) -> None:
        """Carry out one action."""
        _VERBS[type(action)](self, action)

    # ---- carries

    def _take_live(self) -> Boundary:
        boundary, self.live = self.live, None
        assert boundary is not None, "the simulator refuses schedules that run from no carry"
        return boundary

    def _unshared(self, kept: Boundary) -> Boundary:
        """What stages may run on from: the carry itself, or a copy where they would change it."""
        return Boundary(copied(kept.leaves), kept.states, kept.shared) if self.copies else kept

    def _store(self, action: Store) -> None:
        live = self.live
        assert live is not None
        leaves = copied(live.leaves) if self.copies else live.leaves
        self.slots[action.at] = Boundary(leaves, self.states.take(), live.shared, versions_of(leaves))

    def _load(self, action: Load) -> None:
        kept = self.slots.get(action.at)
        if kept is None:
            at_end = self.ranges.get(action.at)
            kept = self.caller if at_end is None else at_end.end
        assert kept is not None
        if kept.versions and kept.versions != versions_of(kept.leaves):
            raise StepError(
                f"the carry that enters step {action.at} was changed in place after it had been stored; "
                "return new tensors from the step, or change a clone of the carry"
            )
        self.states.restore(kept.states)
        self.live = self._unshared(kept)

    def _drop(self, action: Drop) -> None:
        del self.slots[action.at]

    # ---- running stages

    @contextmanager
    def _running(self, start: int, stop: int) -> Iterator[bool]:
        """Whether stages run for the first time, in a cast cache of their own, marked as a replay if not."""
        first = start >= self.frontier
        self.frontier = max(self.frontier, stop)
        with self.surroundings.own_cast_cache():
            if first:
                yield True
            else:
                with recomputing():
                    yield False

    def _advance(self, action: Advance) -> None:
        carry = self._take_live().leaves
        stages, last = self.stages, action.stop - 1
        if self.grad_mode:
            carry = self._as_recorded(carry)
        shared: tuple[tuple[int, int], ...] = ()
        with self._running(action.start, action.stop) as first, torch.set_grad_enabled(self.grad_mode):
            for index in range(action.start, action.stop):
                carry, outputs = stages.run(index, carry, stages.inputs(index, recording=False), first=first)
                if index == last:
                    shared = shared_leaves(outputs, carry)
                if self.grad_mode:
                    carry = self._as_recorded(carry) if index < last else detached(carry)
                if first:
                    stages.emit(index, outputs)
                del outputs  # or it would live through the next stage
        if first and action.stop == self.length:
            self.final = carry
        self.live = Boundary(carry, (), shared)

    def _as_recorded(self, carry: Leaves) -> Leaves:
        """The carry without history, but needing gradients, for stages that ask for them."""
        leaves = detached(carry)
        for place in places_of(leaves):
            leaves[place].requires_grad_(self.needs[place] and can_need(leaves[place]))
        with torch.enable_grad():
            return copied(leaves) if self.copies else leaves  # leaves of autograd cannot be changed in place

    def _record(self, action: Record) -> None:
        boundary = self._take_live()
        stages, last = self.stages, action.stop - 1
        outputs: Leaves = []
        born = sequence_number()
        with self._running(action.start, action.stop) as first, torch.enable_grad():
            recorded, carry, handed = self._enter(action, boundary)
            recorded.first_sequence = born
            del boundary  # the graph keeps of it what it needs
            for index in range(action.start, action.stop):
                inputs = stages.inputs(index, recording=True)
                if aliases := [leaf for leaf in inputs if needs_gradient(leaf)]:
                    recorded.inputs.append((index, aliases))
                del aliases
                carry, outputs = stages.run(index, carry, inputs, first=first)
                if first:
                    stages.emit(index, outputs)
                for number in reversed(range(len(outputs))):  # the newest stack of the plain run adds first
                    if needs_gradient(outputs[number]):
                        recorded.outputs.append((number, index, root_of(outputs[number])))
                if index < last:
                    del outputs  # or it would live through the next stage
            shared = shared_leaves(outputs, carry)
            if action.stop < self.length:
                self._leave_to_next_range(recorded, last, shared)
            if self.captured or handed:
                recorded.resume = Resume.apply(recorded.box, self.anchor, *self.captured, *handed)
        if first and action.stop == self.length:
            self.final = carry
        self._leave(recorded, carry, shared)
        self.ranges[action.stop] = recorded
        assert recorded.end is not None
        self.live = self._unshared(recorded.end)

    def _enter(self, action: Record, boundary: Boundary) -> tuple[RecordedRange, Leaves, list[torch.Tensor]]:
        """A new graph: its carry, and the aliases that `Resume` hands gradients of outputs to (rule 3)."""
        leaves, index = boundary.leaves, action.start
        places = places_of(leaves)
        needs = tuple(self._needs(index, place, leaves[place]) for place in places)
        if any(needs):
            aliases = Enter.apply(self.anchor, needs, *(leaves[place] for place in places))
        else:
            aliases = tuple(leaves[place].detach() for place in places)
        alias_of = {id(leaves[place]): alias for place, alias in zip(places, aliases, strict=True)}
        needed = {place: alias for place, alias in zip(places, aliases, strict=True) if alias.requires_grad}
        handed = [(output, index - 1, place) for output, place in boundary.shared if place in needed]
        recorded = RecordedRange(
            action.start, action.stop, [(place, edge_of(alias)) for place, alias in needed.items()], tuple(handed)
        )
        carry = [alias_of[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return recorded, copied(carry) if self.copies else carry, [needed[place] for _, _, place in handed]

    def _needs(self, index: int, place: int, leaf: torch.Tensor) -> bool:
        """Whether a leaf of the carry that enters stage `index` needs a gradient."""
        return self._caller_needs[place] if index == 0 else self.needs[place] and can_need(leaf)

    def _leave_to_next_range(self, recorded: RecordedRange, last: int, shared: tuple[tuple[int, int], ...]) -> None:
        """Rule 3: the next range hands in the gradients of outputs that are its entering carry."""
        given = {output for output, place in shared if self.needs[place]}
        recorded.outputs = [item for item in recorded.outputs if item[1] != last or item[0] not in given]

    def _leave(self, recorded: RecordedRange, carry: Leaves, shared: tuple[tuple[int, int], ...]) -> None:
        """The end of a graph: roots for its backward, and its carry without history."""
        late = [place for place, leaf in enumerate(carry) if needs_gradient(leaf) and not self.needs[place]]
        if late:
            raise LateGradient(late)
        recorded.leaving = [(place, root_of(carry[place])) for place in places_of(carry) if carry[place].requires_grad]
        recorded.end = Boundary(detached(carry), self.states.take(), shared)

    # ---- backward

    def _backward(self, action: Backward) -> None:
        recorded = self.ranges.pop(action.stop)
        self.live = recorded.end = None
        roots, gradients = self._roots(recorded)
        handed = [self._output_gradient(output, stage) for output, stage, _ in recorded.handed]
        self.adjoint = [None] * len(self.adjoint)
        if not roots:  # nothing flows in from behind: what is handed in is all there is
            for (_, _, place), gradient in zip(recorded.handed, handed, strict=True):
                self.adjoint[place] = added(self.adjoint[place], gradient)
            return
        if action.stop == self.length:
            self.captured_gradients = start_of_sums(roots, self.captured)
        if recorded.resume is not None:
            recorded.box.gradients = (*self.captured_gradients, *handed)
            if any(gradient is not None for gradient in recorded.box.gradients):
                roots.append(recorded.resume)
                gradients.append(self._one)
        self.captured_gradients = []  # the box alone holds them now, so that the engine may add to them in place
        del handed
        self._take_gradients(recorded, self._run_engine(recorded, roots, gradients))

    def _roots(self, recorded: RecordedRange) -> tuple[list[Root], list[torch.Tensor]]:
        """Where gradients go into a range, and those that are there."""
        pairs = [(root, self.adjoint[place]) for place, root in recorded.leaving]
        gradients = {
            output: stacked[recorded.start : recorded.stop].unbind()
            for output, stacked in enumerate(self.output_gradients)
            if stacked is not None and recorded.outputs
        }
        pairs += [
            (root, gradients[output][stage - recorded.start])
            for output, stage, root in recorded.outputs
            if output in gradients
        ]
        there = [(root, gradient) for root, gradient in pairs if gradient is not None]
        return [root for root, _ in there], [gradient for _, gradient in there]

    def _output_gradient(self, output: int, stage: int) -> torch.Tensor | None:
        stacked = self.output_gradients[output]
        return None if stacked is None else stacked[stage]

    def _run_engine(
        self, recorded: RecordedRange, roots: list[Root], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        wanted: list[Root] = [edge for _, edge in recorded.entering]
        for _, aliases in recorded.inputs:
            wanted += aliases
        wanted += self.captured
        recorded.leaving, recorded.outputs, recorded.resume = [], [], None
        if not wanted:
            return ()
        # What torch.autograd.grad does after checks that cost as much as a small step: keep nothing, build nothing on
        # top, leave out what is not reached.
        found: tuple[torch.Tensor | None, ...] = graph._engine_run_backward(
            tuple(roots), tuple(gradients), False, False, tuple(wanted), True, accumulate_grad=False
        )
        return found

    def _take_gradients(self, recorded: RecordedRange, found: Sequence[torch.Tensor | None]) -> None:
        stream = iter(found)
        for place, _ in recorded.entering:
            self.adjoint[place] = next(stream)
        for stage, aliases in recorded.inputs:
            self.stages.take_input_gradients(stage, [next(stream) for _ in aliases])
        self.captured_gradients = list(stream)


_VERBS: dict[type, Callable[[Interpreter, Any], None]] = {
    Advance: Interpreter._advance,
    Store: Interpreter._store,
    Load: Interpreter._load,
    Drop: Interpreter._drop,
    Record: Interpreter._record,
    Backward: Interpreter._backward,
}
