"""Ranges of stages recorded as autograd graphs, one way to be a `Recorder`.

What such a range is, and why gradients come out bit for bit, stands in `recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import graph

from .ambient import States, Surroundings, recomputing
from .errors import StepError
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
    needs_gradient,
    places_of,
    root_of,
    sequence_number,
    shared_leaves,
    start_of_sums,
)
from .schedules import Record
from .selective import recording, storages_of
from .silence import silence
from .trees import Leaves

Needs = Callable[[int], Sequence[bool]]  # which leaves of carry i need a gradient
ByStage = Callable[[int], bool]


def needs_of(carry: Leaves, later: Sequence[bool]) -> Needs:
    """What carry 0 says itself, and the same for all carries after it."""
    first = [needs_gradient(leaf) for leaf in carry]
    return lambda boundary: later if boundary else first


def never(_: int) -> bool:
    """No stage does."""
    return False


class Stages(Protocol):
    """Real stages, as interpreter and recorders see them."""

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


class Recording(NamedTuple):
    """What recording a range gives.

    Attributes:
        tape: what its backward needs, in whatever form the recorder likes.
        carry: leaves of the leaving carry, as the caller of the whole chain may have them.
        shared: (output, leaf) wherever an output of the last stage is a leaf of that carry.
    """

    tape: Any
    carry: Leaves
    shared: tuple[tuple[int, int], ...]


class Recorder(Protocol):
    """How ranges of stages are recorded, and how their tapes are consumed."""

    captured: Captured

    def record(self, action: Record, take: Callable[[], Boundary], *, first: bool) -> Recording:
        """Run the stages of `action` and keep their tapes.

        Args:
            action: the stages, and the entry of their menus.
            take: hands over the entering carry, once; nobody else holds it then, unless a slot or a range does.
            first: whether the stages run for the first time, so that their outputs are to be emitted.
        """
        ...

    def start_backward(self, output_gradients: Sequence[Any]) -> None:
        """Take the gradients of the outputs, each stacked over stages, or None."""
        ...

    def backward(self, tape: Any, adjoint: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Consume the tapes of a range, newest stage first.

        Adds to the gradients of what is captured, and hands those of inputs to the stages.

        Args:
            tape: from `record`.
            adjoint: gradients by leaf of the carry that left the range; emptied.

        Returns:
            Those of the carry that entered it.
        """
        ...


class Captured:
    """Tensors that stages use beside carry and inputs, and the sums of their gradients.

    Args:
        tensors: all of them, each once.
        used: for every stage the numbers of those it may use; None if every stage may use all.

    Attributes:
        gradients: the sums so far, by number; what a backward is adding to is out of here meanwhile.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], used: Sequence[Sequence[int]] | None = None) -> None:
        self.tensors = tuple(tensors)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.tensors)
        self._all = tuple(range(len(self.tensors)))
        self._used = used
        self.first: dict[int, int] = {}  # by number, the first stage that may use it; only where stages differ
        self.last: dict[int, int] = {}
        for stage, numbers in enumerate(used or ()):
            for number in numbers:
                self.first.setdefault(number, stage)
                self.last[number] = stage

    def numbers(self, start: int, stop: int) -> tuple[int, ...]:
        """Of those that stages start … stop−1 may use."""
        if self._used is None:
            return self._all
        return tuple(dict.fromkeys(number for stage in range(start, stop) for number in self._used[stage]))

    def shared(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Those among them that several stages may use: their gradients are sums over ranges."""
        if self._used is None:
            return tuple(numbers)
        return tuple(number for number in numbers if self.first[number] < self.last[number])

    def begins(self, number: int, stop: int, length: int) -> bool:
        """Whether no stage from `stop` on may use it, so that its sum begins before."""
        return self.last[number] < stop if self.last else stop == length

    def take(self, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        """Sums, out of here: what is held once only can be added to in place, or become a `.grad` as it is."""
        taken = [self.gradients[number] for number in numbers]
        for number in numbers:
            self.gradients[number] = None
        return taken


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
        self.anchor = torch.zeros((), requires_grad=True)
        self._one = torch.ones(())

    @cached_property
    def _alive(self) -> frozenset[int]:
        """Storages that are alive anyway."""
        return storages_of(self.captured.tensors)

    # ---- recording

    def record(self, action: Record, take: Callable[[], Boundary], *, first: bool) -> Recording:
        """See `Recorder`."""
        stages, last = self.stages, action.stop - 1
        outputs: Leaves = []
        born = sequence_number()
        with torch.enable_grad():
            recorded, carry, handed = self._enter(action, take())  # the graph keeps of it what it needs
            recorded.first_sequence = born
            for index in range(action.start, action.stop):
                inputs = stages.inputs(index, recording=True)
                if aliases := [leaf for leaf in inputs if needs_gradient(leaf)]:
                    recorded.inputs.append((index, aliases))
                del aliases
                run = stages.run if action.entry == WHOLE else self._run_selectively
                carry, outputs = run(index, carry, inputs, first=first)
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
            recorded.captured = self.captured.numbers(action.start, action.stop)
            recorded.resumed = self.captured.shared(recorded.captured)
            if recorded.resumed or handed:
                resumed = (self.captured.tensors[number] for number in recorded.resumed)
                recorded.resume = Resume.apply(recorded.box, self.anchor, *resumed, *handed)
        self._leave(recorded, carry)
        return Recording(recorded, carry, shared)

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

    def _enter(self, action: Record, boundary: Boundary) -> tuple[RecordedRange, Leaves, list[torch.Tensor]]:
        """A new graph: its carry, and the aliases that `Resume` hands gradients of outputs to (rule 3)."""
        leaves, wanted = boundary.leaves, self.needs(action.start)
        places = places_of(leaves)
        needs = tuple(wanted[place] and can_need(leaves[place]) for place in places)
        if any(needs):
            aliases = Enter.apply(self.anchor, needs, *(leaves[place] for place in places))
        else:
            aliases = tuple(leaves[place].detach() for place in places)
        alias_of = {id(leaves[place]): alias for place, alias in zip(places, aliases, strict=True)}
        needed = {place: alias for place, alias in zip(places, aliases, strict=True) if alias.requires_grad}
        handed = [(output, action.start - 1, place) for output, place in boundary.shared if place in needed]
        entering = [(place, edge_of(alias)) for place, alias in needed.items()]
        recorded = RecordedRange(action.start, action.stop, len(leaves), entering, tuple(handed))
        carry = [alias_of[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return (
            recorded,
            copied(carry) if self.copies(action.start) else carry,
            [needed[place] for _, _, place in handed],
        )

    def _leave_to_next_range(self, recorded: RecordedRange, last: int, shared: tuple[tuple[int, int], ...]) -> None:
        """Rule 3: the next range hands in the gradients of outputs that are its entering carry."""
        needs = self.needs(recorded.stop)
        given = {output for output, place in shared if needs[place]}
        recorded.outputs = [item for item in recorded.outputs if item[1] != last or item[0] not in given]

    def _leave(self, recorded: RecordedRange, carry: Leaves) -> None:
        """The end of a graph: roots for its backward."""
        needs = self.needs(recorded.stop)
        late = [place for place, leaf in enumerate(carry) if needs_gradient(leaf) and not needs[place]]
        if late:
            raise StepError(
                f"leaves {', '.join(map(str, late))} of the carry that leaves step {recorded.stop - 1} need a gradient "
                "now, and did not in the first run; the step is not deterministic"
            )
        recorded.leaving = [(place, root_of(carry[place])) for place in places_of(carry) if carry[place].requires_grad]

    def newest(self, tape: RecordedRange) -> tuple[list[Any], list[torch.Tensor], int]:
        """The newest nodes of a range, leaves that belong to it, and the number of its first node."""
        newest = tape.outputs[-1][1] if tape.outputs else 0
        roots = [root for _, root in tape.leaving] + [root for _, stage, root in tape.outputs if stage == newest]
        known = [self.anchor, *(alias for _, aliases in tape.inputs for alias in aliases)]
        return (
            [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots],
            known,
            tape.first_sequence,
        )

    # ---- backward

    def start_backward(self, output_gradients: Sequence[Any]) -> None:
        """See `Recorder`."""
        self.output_gradients = output_gradients

    def backward(self, tape: RecordedRange, adjoint: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """See `Recorder`."""
        captured = self.captured
        roots, gradients = self._roots(tape, adjoint)
        handed = [self._output_gradient(output, stage) for output, stage, _ in tape.handed]
        adjoint.clear()
        if not roots:  # nothing flows in from behind: what is handed in is all there is
            entering: list[torch.Tensor | None] = [None] * tape.width
            for (_, _, place), gradient in zip(tape.handed, handed, strict=True):
                entering[place] = added(entering[place], gradient)
            return entering
        self._start_sums(tape, roots)
        if tape.resume is not None:
            tape.box.gradients = (*captured.take(tape.resumed), *handed)  # held once: added to in place
            if any(gradient is not None for gradient in tape.box.gradients):
                roots.append(tape.resume)
                gradients.append(self._one)
        del handed
        return self._taken(tape, self._run_engine(tape, roots, gradients))

    def _start_sums(self, tape: RecordedRange, roots: list[Root]) -> None:
        captured = self.captured
        newest = [number for number in tape.resumed if captured.begins(number, tape.stop, self.length)]
        if newest:
            starts = start_of_sums(roots, [captured.tensors[number] for number in newest])
            for number, start in zip(newest, starts, strict=True):
                captured.gradients[number] = start

    def _roots(
        self, tape: RecordedRange, adjoint: Sequence[torch.Tensor | None]
    ) -> tuple[list[Root], list[torch.Tensor]]:
        """Where gradients go into a range, and those that are there."""
        pairs = [(root, adjoint[place]) for place, root in tape.leaving]
        gradients = {
            output: stacked[tape.start : tape.stop].unbind()
            for output, stacked in enumerate(self.output_gradients)
            if stacked is not None and tape.outputs
        }
        pairs += [
            (root, gradients[output][stage - tape.start]) for output, stage, root in tape.outputs if output in gradients
        ]
        there = [(root, gradient) for root, gradient in pairs if gradient is not None]
        return [root for root, _ in there], [gradient for _, gradient in there]

    def _output_gradient(self, output: int, stage: int) -> torch.Tensor | None:
        stacked = self.output_gradients[output]
        return None if stacked is None else stacked[stage]

    def _run_engine(
        self, tape: RecordedRange, roots: list[Root], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        wanted: list[Root] = [edge for _, edge in tape.entering]
        for _, aliases in tape.inputs:
            wanted += aliases
        wanted += (self.captured.tensors[number] for number in tape.captured)
        tape.leaving, tape.outputs, tape.resume = [], [], None
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
        for place, _ in tape.entering:
            entering[place] = next(stream)
        for stage, aliases in tape.inputs:
            self.stages.take_input_gradients(stage, [next(stream) for _ in aliases])
        for number in tape.captured:
            self.captured.gradients[number] = next(stream)
        return entering
