"""One call of `scan`, taken apart: arguments, what the step can reach, what one step was seen to do and to cost."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Final, TypeVar

import torch

from .ambient import States, Surroundings
from .captures import reach
from .casts import is_cast
from .errors import LateGradient
from .inputs import Inputs, emptied, input_kind, is_sliced, with_tensor
from .interpreter import Interpreter
from .kept import Keeping, Place, keeping, known_places, remember, unique
from .loops import Loop, Outputs, Step
from .missed import Lookout
from .mutable import mutable_sources
from .needs import Flags, Needed, SeenNeeds, needs_like, united
from .nodes import apart_from_used_up
from .profiler import Sizes
from .ranges import AutogradRanges, Replays
from .recorded import needs_gradient, places_of
from .schedules import Action
from .stages import Needs
from .standins import StandIns
from .streams import random_sources
from .sums import Captured
from .traced.ranges import TracedRanges
from .traced.stages import TracedStages
from .traced.traced import Traced
from .trees import Leaves, Structure

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Nature:
    """What one step was seen to do.

    Attributes:
        needed: which leaves and outputs need gradients at any step, and what it changes beside them.
        orbit: what carry 1, carry 2, ... need, the last for all that follow, and the outputs of the steps before them.
        settled: whether that is certain, because from then on everything needs a gradient that can.
        copies: whether the step changes its carry in place.
        grad_mode: whether it computes otherwise when autograd is off.
        carry_bytes, output_bytes: bytes of the leaves of its results, 0 for what is no tensor of its own.
        moved_bytes: bytes of the carry but for tensors that stay where they are.
        unread: leaves of the carry in places that no gradient flows into at the first step, by number.
        casts: captured tensors of which autocast around the loop keeps a copy, by number.
        groups: process groups in which it communicates, by name.
        spoils_outputs: whether later steps would change outputs in place, as leaves of the carry share their storage.
    """

    needed: Needed
    orbit: tuple[tuple[Flags, Flags], ...]
    settled: bool
    copies: bool
    grad_mode: bool
    carry_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    moved_bytes: int
    unread: frozenset[int] = frozenset()
    casts: frozenset[int] = frozenset()
    groups: tuple[str, ...] = ()
    spoils_outputs: bool = False

    @property
    def sizes(self) -> Sizes:
        """Bytes of its results."""
        return Sizes(
            moved_bytes=self.moved_bytes,
            output_bytes=sum(self.output_bytes),
            output_gradient_bytes=sum(compress(self.output_bytes, self.needed.outputs)),
            final_gradient_bytes=sum(compress(self.carry_bytes, self.needed.carry)),
        )

    def wider(self, more: Needed) -> Nature:
        """The same, with room for what other steps do."""
        return replace(self, needed=self.needed.union(more))

    def of_length(self, length: int) -> Nature:
        """The same for a loop that ends before everything is as it will be."""
        if not self.settled or length >= len(self.orbit):
            return self
        outputs = united(outputs for _, outputs in self.orbit[:length])
        return replace(self, needed=self.needed._replace(outputs=outputs))


class Call:
    """One call of scan.

    Attributes:
        carry: leaves of the initial carry, until `release`.
        inputs: what the steps take, its tensors until `release`.
        captured: tensors that the step can reach and that need a gradient, or their stand-ins.
        needs: leaves of a carry that are known to need a gradient.
        sources: streams, buffers, lists, ... whose state belongs to a carry.
        modules: the modules that the step can reach.
        fixed: tensors that it can reach and must leave as they are.
        streams: the random streams among them, by number.
        places: where the step keeps tensors with gradients beside its carry; their contents are its last leaves.
        codes: the code that the step runs.
        bindings: what names in the step stand for, but for those that the carry fills.
        compiled: whether the step should be traced and run as a graph, and how.
        traced: that graph, once there is one.
        reached: all tensors that the walk from the step finds, if it should be traced.
        uses_arrays: whether it finds NumPy arrays.
        lookout: what finds tensors that the walk from the step has missed.
    """

    def __init__(
        self,
        step: Step,
        carry: Any,
        inputs: Inputs,
        *,
        check: bool = False,
        compiled: bool | str = False,
        places: Sequence[Place] = (),
    ) -> None:
        self.check, self.inputs, self.length = check, inputs, inputs.length
        self.compiled = compiled
        self.traced: Traced | None = None
        self._given: Any = step, carry
        self._inputs_captured: list[tuple[int, int]] = []
        reached = reach(step, exact=bool(compiled))
        self.step, self.structure = step, Structure(carry)
        self.carry = self.structure.flatten(carry)
        if places:
            remember(reached, places)
        self.places = unique((*places, *known_places(reached)))
        contents = [place.get() for place in self.places]
        if self.places:
            self.step, self.structure = keeping(step, self.places), Keeping(self.structure, self.places)
            self.carry += contents
        self._find_places()
        self._carry_like = *map(_like, self.carry), *self._first_place.items()
        self.input_needs = [leaf.requires_grad for leaf in self.inputs.tensors()]
        kept = set(map(id, contents))
        captured = [tensor for tensor in reached.differentiable() if id(tensor) not in kept]
        usable, used_up = apart_from_used_up(captured)
        self.stand_ins = StandIns(usable, reached.bindings)
        self.captured = self.stand_ins.tensors
        self.lookout = Lookout(
            "the step", "let the step close over it, or put it into the carry", self.captured, used_up
        )
        self.needs = tuple(map(needs_gradient, self.carry))
        tensors = [*self._carry_tensors(), *self.inputs.tensors(), *reached.tensors]
        devices = {tensor.device for tensor in tensors}
        self.device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self.surroundings = Surroundings({device.type for device in devices})
        if self.surroundings.casts:  # its copy is shared by all that uses it, so it must be the tensor itself
            known = set(map(id, self.captured))
            self.captured += [leaf for leaf in self._carry_tensors() if is_cast(leaf) and id(leaf) not in known]
        streams = random_sources(devices, reached.generators)
        self.sources = (*streams, *mutable_sources(reached, self.places))
        self.modules = reached.modules
        self.fixed = [tensor for tensor in reached.fixed if id(tensor) not in kept]
        self.streams = frozenset(range(len(streams)))
        buffers = (value for value in reached.changeable if isinstance(value, torch.Tensor))
        self._buffers = [buffer for buffer in buffers if id(buffer) not in kept]
        self._fingerprints: list[Any] | None = [None] * self.length if check else None
        carried = {place.identity for place in self.places}
        self.bindings = [each for each in self.stand_ins.among(reached.bindings) if each.identity not in carried]
        self.codes = tuple(reached.codes)
        self._code = (*self.codes, *reached.settings)
        self.reached = reached.tensors if compiled else []
        numpy = sys.modules.get("numpy")
        self.uses_arrays = numpy is not None and numpy.ndarray in reached.codes
        self._exact = (*map(_laid_out, self.reached), *reached.exact)

    def _find_places(self) -> None:
        self.carry_places = places_of(self.carry)
        self._first_place = {
            place: next(first for first in self.carry_places if self.carry[first] is leaf)
            for place, leaf in enumerate(self.carry)
            if isinstance(leaf, torch.Tensor)
        }

    def keeping(self, places: Sequence[Place]) -> Call:
        """The same call with more places in its carry."""
        step, carry = self._given
        return Call(step, carry, self.inputs, check=self.check, compiled=self.compiled, places=(*self.places, *places))

    def leave_unread(self, numbers: Iterable[int]) -> None:
        """Cut off what is in places that the step overwrites before it reads them; it may belong to a graph of old."""
        for number in numbers:
            leaf = self.carry[number]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and self._first_place[number] == number:
                self.carry = [leaf.detach() if other is leaf else other for other in self.carry]
        self._find_places()

    def returned(self, carry: Any) -> Any:
        """What the loop returns of a final carry, the rest going into its places."""
        if not self.places:
            return carry
        after, contents = carry
        for place, content in zip(self.places, contents, strict=True):
            place.put(content)
        return after

    def _carry_tensors(self) -> list[torch.Tensor]:
        return [self.carry[place] for place in self.carry_places]

    def tensors(self) -> list[torch.Tensor]:
        """All that takes part in autograd: the carry's tensors, the inputs', the captured ones."""
        return [*self._carry_tensors(), *self.inputs.tensors(), *self.stand_ins.originals(self.captured)]

    def merged(
        self, inputs: list[torch.Tensor | None], captured: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs and of the captured tensors, in place one sum where a tensor is both."""
        for number, place in self._inputs_captured:
            gradient, total = inputs[number], captured[place]
            if gradient is not None and total is not None and total.layout is torch.strided:
                captured[place], inputs[number] = total.add_(gradient), None
            del gradient, total
        return [*inputs, *captured]

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[Leaves, Leaves]:
        """The leaves of carry and inputs, their tensors taken from what `tensors` returned."""
        stream = iter(tensors)
        of_place = {place: next(stream) for place in self.carry_places}
        carry = [
            of_place[self._first_place[place]] if place in self._first_place else leaf
            for place, leaf in enumerate(self.carry)
        ]
        return carry, [with_tensor(leaf, next(stream)) if is_sliced(leaf) else leaf for leaf in self.inputs.leaves]

    def release(self) -> None:
        """Let go of the tensors that autograd has in its keeping now."""
        place_of = {id(tensor): place for place, tensor in enumerate(self.captured)}
        inputs = enumerate(self.inputs.tensors())
        self._inputs_captured = [(n, place_of[id(tensor)]) for n, tensor in inputs if id(tensor) in place_of]
        self.carry = [None if place in self._first_place else leaf for place, leaf in enumerate(self.carry)]
        self.inputs.leaves = [emptied(leaf) for leaf in self.inputs.leaves]
        self._given = None

    def loop(self, outputs: Outputs | None, carry: Leaves, inputs: Leaves) -> Loop:
        """The stages, over the leaves of carry and inputs."""
        return Loop(
            self.step,
            self.structure,
            carry,
            self.inputs.structure,
            inputs,
            self.length,
            outputs,
            self._fingerprints,
            len(self.places),
        )

    def interpreter(
        self,
        loop: Loop,
        nature: Nature,
        actions: Iterator[Action],
        carry: Leaves,
        states: States,
        length: int,
        *,
        entry: int = 0,
        turned: bool = True,
    ) -> Interpreter:
        """An interpreter over the call's stages.

        Args:
            loop, carry, length: the stages, what enters the first, and how many there are.
            nature: what they do.
            actions: what to run.
            states: whose state belongs to a carry.
            entry: the entry of the traced step's menu that entry 0 of a schedule means.
            turned: whether there is room to turn large sums of a traced step's gradients back at the end.
        """
        if self.traced is not None:
            found = self.found()
            stages = TracedStages(self.traced, loop, [found[number] for number in self.traced.externals])
            firsts, captured = [self._first_place.get(n, n) for n in range(len(carry))], Captured(self.captured)
            traced = TracedRanges(stages, length, captured=captured, firsts=firsts, entry=entry, turned=turned)
            return Interpreter(traced, actions, length, carry, states=states, surroundings=self.surroundings)
        needs: Needs = needs_like(carry, [flags for flags, _ in nature.orbit])
        copies, seen = (lambda _: nature.copies), None
        if not nature.settled:
            needs = loop.seen = seen = SeenNeeds(carry)
        captured, replays = Captured(self.captured), Replays(states, self.surroundings)
        captured.copied = sorted(nature.casts)
        recorder = AutogradRanges(loop, length, needs=needs, captured=captured, copies=copies, replays=replays)
        return Interpreter(
            recorder,
            actions,
            length,
            carry,
            states=states,
            surroundings=self.surroundings,
            copies=copies,
            # Those that have not been seen yet too, to see what of their results needs gradients.
            grad_mode=lambda stage: nature.grad_mode or (seen is not None and stage >= seen.reached),
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that the step could change."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def keeps_nothing(self, nature: Nature) -> bool:
        """Whether the step changes nothing in which it could keep tensors."""
        return not any(self.sources[number].kept for number in nature.needed.changes)

    def found(self) -> list[torch.Tensor]:
        """All tensors that the step can reach, those that the walk had missed at the end."""
        known = set(map(id, self.reached))
        return [*self.reached, *(tensor for tensor in self.captured if id(tensor) not in known)]

    def check_end(self, run: Interpreter) -> None:
        """Look at the newest nodes of the last recorded range; every step was looked at once already."""
        if isinstance(run.recorder, AutogradRanges):
            self.lookout.look(*run.recorder.newest(run.tapes[run.length]), _NODES)

    def look_at_all(self, run: Interpreter) -> None:
        """Let the backward check every range before it runs."""
        if isinstance(run.recorder, AutogradRanges):
            run.recorder.look = self.lookout.look_late

    def check_needs(self, loop: Loop, nature: Nature) -> None:
        """After a first pass: were there more gradients than the plan has room for?

        Raises:
            LateGradient: there were.
        """
        seen = loop.seen
        if seen is not None and nature.needed.union(late := Needed(seen.carries, seen.outputs)) != nature.needed:
            raise LateGradient(late)

    # ---- what is known of steps like this one

    def key(self) -> Hashable:
        """Equal for calls whose steps do and cost the same."""
        return (
            *self._code,
            self.structure,
            *self._carry_like,
            self.inputs.structure,
            *map(input_kind, self.inputs.leaves),
            self.check,
            *map(_like, self.captured),
            *map(_like, self._buffers),
            self.needs,
            self.surroundings.key(),
            torch.get_num_threads(),
        )

    def exact_key(self) -> Hashable:
        """Equal for calls whose steps are the same graph."""
        return self.key(), self._exact, *map(_laid_out, self.carry), *map(_laid_out, self.inputs.leaves)


_NODES: Final = 512  # of every call's newest recorded ones are looked at for what the walk from the step had missed


def _like(value: Any) -> Hashable:
    """What of a leaf decides about costs."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad, type(value)
    kind: type = type(value)
    return value if isinstance(value, int | str | None) else kind


def _laid_out(value: Any) -> Hashable:
    """What of a value decides about a graph: of tensors the layout too, of numbers the value."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return value.shape, strides, value.dtype, value.device, value.layout, value.requires_grad, type(value)
    kind: type = type(value)
    return (kind, value) if isinstance(value, int | float | complex | str | None) else kind
