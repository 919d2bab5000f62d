"""Ranges of stages recorded as autograd graphs, one way to be a `Recorder`.

What such a range is, and why gradients come out bit for bit, stands in `recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd import graph

from .ambient import States, Surroundings, recomputing
from .boundary_nodes import Resumption, autograd_on, enter
from .casts import cast_edge, stopped
from .errors import StepError
from .recorded import (
    UNTIED,
    Boundary,
    Given,
    RecordedRange,
    Root,
    Ties,
    can_need,
    copied,
    detached,
    flat,
    followed,
    hand_over,
    needs_gradient,
    places_of,
    root_of,
    sequence_number,
    start_of_sums,
    summed,
    unflat,
)
from .schedules import Advance, Record
from .selective import recording, storages_of
from .silence import silence
from .stages import ByStage, Needs, Recording, Stages, never
from .sums import Captured
from .trees import Leaves

WHOLE, SELECTIVE = 0, 1  # the entries of a stage's menu


class Replays(NamedTuple):
    """What a stage's replay within a backward needs: states that belong to carries, and settings to run under."""

    states: States
    surroundings: Surroundings


class AutogradRanges:
    """A `Recorder` that leaves the tapes to autograd: one graph and one backward call a range.

    Args:
        stages: the real stages.
        length: how many there are.
        needs: which leaves of a carry need a gradient, by boundary.
        captured: tensors whose gradients are asked for, besides the carry's and the inputs'.
        copies: whether a stage changes its carry in place.
        replays: what selective tapes need; without it, all are whole. Stages that change their carry have none.
        look: if there is one, is shown each range before its backward: nodes, leaves of the range's own, first number.
    """

    def __init__(
        self,
        stages: Stages,
        length: int,
        *,
        needs: Needs,
        captured: Captured,
        copies: ByStage = never,
        replays: Replays | None = None,
    ) -> None:
        self.stages, self.length = stages, length
        self.needs, self.captured, self.copies, self.replays = needs, captured, copies, replays
        self.output_gradients: Sequence[Any] = ()
        self.look: Callable[[list[Any], list[torch.Tensor], int], None] | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        self._one = torch.ones(())
        self._resumption: Resumption | None = None
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}

    @cached_property
    def _alive(self) -> frozenset[int]:
        """Storages that are alive anyway."""
        return storages_of(self.captured.tensors)

    # ---- advancing

    def advance(
        self, action: Advance, take: Callable[[], Boundary], *, first: bool, grad_mode: bool
    ) -> tuple[Leaves, Ties]:
        """See `Recorder`."""
        stages, last, captured = self.stages, action.stop - 1, self.captured
        carry, ties = self._taken_for(take())
        if grad_mode:
            carry = self._as_recorded(action.start, carry)
        with torch.set_grad_enabled(grad_mode):
            for index in range(action.start, action.stop):
                before = carry
                carry, outputs = stages.run(index, before, stages.inputs(index, recording=grad_mode), first=first)
                ties = self._followed(ties, index, before, outputs, carry)
                del before
                if grad_mode:
                    carry = self._as_recorded(index + 1, carry) if index < last else detached(carry)
                if first:
                    stages.emit(index, outputs)
                    captured.note(index, outputs)
                del outputs  # or it would live through the next stage
        return carry, ties

    def _taken_for(self, boundary: Boundary) -> tuple[Leaves, Ties]:
        """A carry for stages that are advanced, its captured tensors themselves."""
        return self.captured.themselves(boundary), boundary.ties

    def _own(self, boundary: int, leaves: Leaves) -> Leaves:
        """Copies of what a stage may change; captured tensors are not among that."""
        if not self.copies(boundary):
            return leaves
        number_of = self.captured.number_of
        made = copied([None if id(leaf) in number_of else leaf for leaf in leaves])
        return [leaf if new is None else new for leaf, new in zip(leaves, made, strict=True)]

    def _as_recorded(self, boundary: int, carry: Leaves) -> Leaves:
        """The carry without history, but needing gradients, for stages that ask for them."""
        leaves, needs, number_of = detached(carry), self.needs(boundary), self.captured.number_of
        for place in places_of(leaves):
            leaves[place].requires_grad_(needs[place] and can_need(leaves[place]))
        leaves = [old if id(old) in number_of else new for old, new in zip(carry, leaves, strict=True)]
        with torch.enable_grad():  # leaves of autograd cannot be changed in place
            return self._own(boundary, leaves)

    def _followed(self, ties: Ties, index: int, before: Leaves, outputs: Leaves, after: Leaves) -> Ties:
        """What the leaves of the carry after a stage are besides, as `followed` says; mostly nothing, seen at once."""
        number_of = self.captured.number_of
        if (
            ties is UNTIED
            and number_of.keys().isdisjoint(ids := set(map(id, after)))
            and ids.isdisjoint(map(id, outputs))
        ):
            return UNTIED
        return followed(UNTIED if self.copies(index) else ties, index, before, outputs, after, number_of)

    # ---- recording

    def record(self, action: Record, take: Callable[[], Boundary], *, first: bool) -> Recording:
        """See `Recorder`."""
        stages, captured = self.stages, self.captured
        run = stages.run if action.entry == WHOLE else self._run_selectively
        born = sequence_number()
        roots: list[tuple[int, int, Root]] = []
        wanted: list[tuple[int, list[torch.Tensor]]] = []
        with autograd_on():
            recorded, carry, given, ties = self._enter(action, take())  # the graph keeps of it what it needs
            recorded.first_sequence = born
            entered: dict[int, int] = {}  # by id the leaves that entered, as long as they are handed on
            if not self.copies(action.start):
                entered = {id(carry[place]): place for place in recorded.entering}
            for index in range(action.start, action.stop):
                before = carry
                inputs = stages.inputs(index, recording=True)
                if aliases := [leaf for leaf in inputs if needs_gradient(leaf)]:
                    wanted.append((index, aliases))
                del aliases
                carry, outputs = run(index, before, inputs, first=first)
                given += self._take_outputs(roots, index, outputs, entered)
                ties = self._followed(ties, index, before, outputs, carry)
                if entered:
                    entered = {id(leaf): entered[id(leaf)] for leaf in carry if id(leaf) in entered}
                del before
                if first:
                    stages.emit(index, outputs)
                    captured.note(index, outputs)
                del outputs  # or it would live through the next stage
            if wanted:
                recorded.inputs = wanted
            if roots:  # the plain run's newest stack adds first, from the first stage to the last
                recorded.outputs = sorted(roots, key=lambda root: -root[0])
            if given or ties.given:
                hand_over(recorded, given, entered, carry, ties, self.needs(action.stop), self.length)
            if captured.copied:
                edges = ((number, cast_edge(captured.tensors[number])) for number in captured.copied)
                recorded.casts = [(number, edge) for number, edge in edges if edge is not None]
            recorded.captured = captured.numbers(action.start, action.stop)
            recorded.resumed = captured.shared(recorded.captured)
            recorded.next_sequence = sequence_number()
            if recorded.resumed:
                if not captured.is_alike:
                    recorded.resume = self._resumption_of(recorded)
                elif action.stop == self.length:
                    self._shared_resumption(recorded)
        self._leave(recorded, carry, ties)
        return Recording(recorded, carry, ties)

    def _resumption_of(self, tape: RecordedRange) -> Resumption:
        return Resumption(self.anchor, [self.captured.tensors[number] for number in tape.resumed])

    def _shared_resumption(self, tape: RecordedRange) -> Resumption:
        """What hands in the sums for a range of stages that all use the same tensors: a node newer than its own.

        Numbers of nodes are counted thread by thread. One is made when the last stage is recorded, for all ranges of
        the first pass, by the thread that recorded them. A newer range is one that the thread of the backward has
        recorded since, and so is what is made for it now.
        """
        found = self._resumption
        if found is None or found.sequence < tape.next_sequence:
            with autograd_on():
                found = self._resumption = self._resumption_of(tape)
        return found

    def _run_selectively(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """Stage `index` with a selective tape, which keeps the carry and its states for the replay."""
        assert self.replays is not None, "planners choose what is on the menu"
        assert not self.copies(index)
        stages, (replay_states, surroundings) = self.stages, self.replays
        entered, needs, states = detached(carry), [needs_gradient(leaf) for leaf in carry], replay_states.take()

        def rerun() -> None:
            with surroundings.entered(), recomputing(), replay_states.undisturbed(), silence():
                replay_states.restore(states)
                leaves = detached(entered)
                for place in places_of(leaves):
                    leaves[place].requires_grad_(needs[place])
                stages.run(index, leaves, inputs, first=False)

        given = storages_of(leaf for leaf in (*carry, *inputs) if isinstance(leaf, torch.Tensor))
        with recording(rerun, given, self._alive):
            return stages.run(index, carry, inputs, first=first)

    def _enter(self, action: Record, boundary: Boundary) -> tuple[RecordedRange, Leaves, list[Given], Ties]:
        """A new graph: its carry, and what the leaves of that are besides."""
        leaves, wanted = self.captured.themselves(boundary), self.needs(action.start)
        places = places_of(leaves)
        if boundary.ties.captured:
            captured = {place for place, _ in boundary.ties.captured}
            places = [place for place in places if place not in captured]
        tensors = [leaves[place] for place in places]
        needs = [wanted[place] and can_need(leaf) for place, leaf in zip(places, tensors, strict=True)]
        aliases = enter(self.anchor, needs, *tensors) if any(needs) else [leaf.detach() for leaf in tensors]
        alias_of = {id(leaf): alias for leaf, alias in zip(tensors, aliases, strict=True)}
        entering = self._same([place for place, alias in zip(places, aliases, strict=True) if alias.requires_grad])
        entered = flat(alias for alias in aliases if alias.requires_grad)
        carry = [alias_of.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        recorded = RecordedRange(action.start, action.stop, len(leaves), entering, entered)
        return recorded, self._own(action.start, carry), list(boundary.ties.given), boundary.ties

    def _take_outputs(
        self, roots: list[tuple[int, int, Root]], stage: int, outputs: Leaves, entered: dict[int, int]
    ) -> list[Given]:
        """Roots for gradients of a stage's outputs; returns those that are leaves of the entering carry (rule 3)."""
        handed: list[Given] = []
        for number in reversed(range(len(outputs))):
            leaf = outputs[number]
            if not needs_gradient(leaf) or id(leaf) in self.captured.number_of:
                continue
            if id(leaf) in entered:
                handed.append(Given(number, stage, stage + 1, entered[id(leaf)]))
            else:
                roots.append((number, stage, root_of(leaf)))
        return handed

    def _leave(self, recorded: RecordedRange, carry: Leaves, ties: Ties) -> None:
        """The end of a graph: roots for its backward."""
        needs = self.needs(recorded.stop)
        late = [place for place, leaf in enumerate(carry) if needs_gradient(leaf) and not needs[place]]
        if late:
            raise StepError(
                f"leaves {', '.join(map(str, late))} of the carry that leaves step {recorded.stop - 1} need a gradient "
                "now, and did not in the first run; the step is not deterministic"
            )
        recorded.returned = ties.captured
        captured = {place for place, _ in ties.captured}
        leaving = [place for place in places_of(carry) if carry[place].requires_grad and place not in captured]
        recorded.leaving = self._same(leaving)
        recorded.left_by = flat((carry[place] for place in leaving), small=True)

    def _same(self, places: list[int]) -> tuple[int, ...]:
        """Places as one and the same tuple for all ranges that have them."""
        return self._places.setdefault(key := tuple(places), key)

    def newest(self, tape: RecordedRange) -> tuple[list[Any], list[torch.Tensor], int]:
        """The newest nodes of a range, leaves that belong to it, and the number of its first node."""
        newest = max((stage for _, stage, _ in tape.outputs), default=0)
        roots = unflat(tape.left_by) + [root for _, stage, root in tape.outputs if stage == newest]
        return self._seen_from(roots, tape)

    def _seen_from(self, roots: list[Root], tape: RecordedRange) -> tuple[list[Any], list[torch.Tensor], int]:
        known = [self.anchor, *(alias for _, aliases in tape.inputs for alias in aliases)]
        nodes = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
        return nodes, known, tape.first_sequence

    # ---- backward

    def start_backward(self, output_gradients: Sequence[Any]) -> None:
        """See `Recorder`."""
        self.output_gradients = output_gradients

    def backward(self, tape: RecordedRange, adjoint: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """See `Recorder`."""
        captured = self.captured
        if tape.stop == self.length:
            captured.begin(tape.returned, adjoint, self.output_gradients)
        roots, gradients = self._roots(tape, adjoint)
        adjoint.clear()
        if not roots:  # nothing flows in from behind
            return [None] * tape.width
        if self.look is not None:
            self.look(*self._seen_from(roots, tape))
        self._start_sums(tape, roots)
        if tape.resumed:
            resume = tape.resume or self._shared_resumption(tape)
            if resume.give(captured.take(tape.resumed)):
                roots.append(resume.root)
                gradients.append(self._one)
        return self._taken(tape, self._run_engine(tape, roots, gradients))

    def _start_sums(self, tape: RecordedRange, roots: list[Root]) -> None:
        captured = self.captured
        newest = [
            number
            for number in tape.resumed
            if captured.begins(number, tape.stop, self.length)
            and captured.gradients[number] is None
            and number not in captured.copied
        ]
        if newest:
            starts = start_of_sums(roots, [captured.tensors[number] for number in newest])
            for number, start in zip(newest, starts, strict=True):
                captured.gradients[number] = start

    def _roots(self, tape: RecordedRange, adjoint: list[torch.Tensor | None]) -> tuple[list[Root], list[torch.Tensor]]:
        """Where gradients go into a range, and those that are there."""
        pairs: list[tuple[Root, torch.Tensor | None]] = []
        if tape.handed:
            for place, edge in zip(tape.entering, unflat(tape.entered), strict=True):
                if place in tape.handed:
                    start = None
                    if tape.left and place in tape.left:
                        start, adjoint[tape.left[place]] = adjoint[tape.left[place]], None
                    pairs.append((edge, summed(start, tape.handed[place], self.output_gradients)))
        pairs += zip(unflat(tape.left_by), [adjoint[place] for place in tape.leaving], strict=True)
        gradients = {
            output: stacked[tape.start : tape.stop].unbind()
            for output, stacked in enumerate(self.output_gradients)
            if stacked is not None and tape.outputs
        }
        pairs += [
            (root, gradients[output][stage - tape.start]) for output, stage, root in tape.outputs if output in gradients
        ]
        pairs += [(edge, self.captured.copies.pop(number, None)) for number, edge in tape.casts]
        there = [(root, gradient) for root, gradient in pairs if gradient is not None]
        return [root for root, _ in there], [gradient for _, gradient in there]

    def _run_engine(
        self, tape: RecordedRange, roots: list[Root], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        wanted = unflat(tape.entered)
        for _, aliases in tape.inputs:
            wanted += aliases
        wanted += (self.captured.tensors[number] for number in tape.captured)
        if tape.start:
            wanted += (stopped(edge) for _, edge in tape.casts)
        tape.left_by, tape.outputs, tape.resume = (), (), None
        if not wanted:
            return ()
        # What torch.autograd.grad does after checks that cost as much as a small step: keep nothing, build nothing on
        # top, leave out what is not reached.
        found: tuple[torch.Tensor | None, ...] = graph._engine_run_backward(
            tuple(roots), tuple(gradients), False, False, tuple(wanted), True, accumulate_grad=False
        )
        return found

    def _taken(self, tape: RecordedRange, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients to where they belong; returns those of the entering carry."""
        stream = iter(found)
        entering: list[torch.Tensor | None] = [None] * tape.width
        for place in tape.entering:
            entering[place] = next(stream)
        for stage, aliases in tape.inputs:
            self.stages.take_input_gradients(stage, [next(stream) for _ in aliases])
        for number in tape.captured:
            self.captured.gradients[number] = next(stream)
        if tape.start:
            self.captured.copies.update((number, next(stream)) for number, _ in tape.casts)
        return entering
