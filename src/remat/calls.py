"""One call of `scan`, taken apart: arguments, what the step can reach, what one step was seen to do and to cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from .ambient import States, Surroundings, random_sources
from .captures import reach, unseen_leaves
from .errors import StepError
from .inputs import Inputs, emptied, input_kind, is_sliced, with_tensor
from .interpreter import Interpreter
from .loops import Loop, Outputs, Step
from .mutable import mutable_sources
from .profiler import Sizes
from .ranges import AutogradRanges, Captured, needs_of
from .recorded import needs_gradient, places_of
from .schedules import Action
from .trees import Leaves, Structure

Value = TypeVar("Value")


class MissedTensors(Exception):  # never reaches the user
    """A recorded graph reaches leaves that the walk from the step had missed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(frozen=True, slots=True)
class Nature:
    """What one step was seen to do.

    Attributes:
        needs: which leaves of a carry need a gradient once the loop runs.
        output_needs: which outputs need one.
        copies: whether the step changes its carry in place.
        grad_mode: whether it computes otherwise when autograd is off.
        changes: which streams, buffers, lists, ... it changed, by number.
        sizes: bytes of its results.
    """

    needs: tuple[bool, ...]
    output_needs: tuple[bool, ...]
    copies: bool
    grad_mode: bool
    changes: frozenset[int]
    sizes: Sizes


class Call:
    """One call of scan.

    Attributes:
        carry: leaves of the initial carry, until `release`.
        inputs: what the steps take, its tensors until `release`.
        captured: tensors that the step can reach and that need a gradient.
        needs: leaves of a carry that are known to need a gradient.
        sources: streams, buffers, lists, ... whose state belongs to a carry.
        modules: the modules that the step can reach.
        fixed: tensors that it can reach and must leave as they are.
        streams: the random streams among them, by number.
        watched: those that a first pass watches, by number.
    """

    def __init__(self, step: Step, carry: Any, inputs: Inputs, *, check: bool = False) -> None:
        self.step, self.check = step, check
        self.structure = Structure(carry)
        self.carry = self.structure.flatten(carry)
        self.inputs = inputs
        self.length = self.inputs.length
        reached = reach(step)
        self.carry_places = places_of(self.carry)
        self._first_place = {
            place: next(first for first in self.carry_places if self.carry[first] is leaf)
            for place, leaf in enumerate(self.carry)
            if isinstance(leaf, torch.Tensor)
        }
        self.input_needs = [leaf.requires_grad for leaf in self.inputs.tensors()]
        self.captured = reached.differentiable()
        self.needs = tuple(map(needs_gradient, self.carry))
        tensors = [*self._carry_tensors(), *self.inputs.tensors(), *reached.tensors]
        devices = {tensor.device for tensor in tensors}
        self.device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self.surroundings = Surroundings({device.type for device in devices})
        streams = random_sources(devices, reached.generators)
        self.sources = (*streams, *mutable_sources(reached))
        self.modules = reached.modules
        self.fixed = reached.fixed
        self.streams = frozenset(range(len(streams)))
        self.watched = set(self.streams)
        self._buffers = [value for value in reached.changeable if isinstance(value, torch.Tensor)]
        self._fingerprints: list[Any] | None = [None] * self.length if check else None
        self._code = (*reached.codes, *reached.settings)

    def _carry_tensors(self) -> list[torch.Tensor]:
        return [self.carry[place] for place in self.carry_places]

    def tensors(self) -> list[torch.Tensor]:
        """All that takes part in autograd: the carry's tensors, the inputs', the captured ones."""
        return [*self._carry_tensors(), *self.inputs.tensors(), *self.captured]

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
        self.carry = [None if place in self._first_place else leaf for place, leaf in enumerate(self.carry)]
        self.inputs.leaves = [emptied(leaf) for leaf in self.inputs.leaves]

    def loop(self, outputs: Outputs | None, carry: Leaves, inputs: Leaves) -> Loop:
        """The stages, over the leaves of carry and inputs."""
        return Loop(
            self.step, self.structure, carry, self.inputs.structure, inputs, self.length, outputs, self._fingerprints
        )

    def interpreter(
        self, loop: Loop, nature: Nature, actions: Iterator[Action], carry: Leaves, states: States, length: int
    ) -> Interpreter:
        """An interpreter over the call's stages."""
        needs = needs_of(carry, nature.needs)
        recorder = AutogradRanges(loop, length, needs=needs, captured=Captured(self.captured), copies=nature.copies)
        return Interpreter(
            loop,
            recorder,
            actions,
            length,
            carry,
            states=states,
            surroundings=self.surroundings,
            needs=needs,
            copies=nature.copies,
            grad_mode=nature.grad_mode,
        )

    def check_end(self, run: Interpreter) -> None:
        """`check_seen` for the newest nodes of the last recorded range; every step was looked at once already."""
        if isinstance(run.recorder, AutogradRanges):
            nodes, known, first_sequence = run.recorder.newest(run.ranges[run.length].tape)
            self.check_seen(nodes, known, first_sequence, _NODES)

    def check_seen(
        self, nodes: Iterable[Any], known: list[torch.Tensor], first_sequence: int, limit: int | None = None
    ) -> None:
        """Refuse, or report, what a recorded graph reaches beyond what is known.

        Raises:
            MissedTensors: leaves that the walk from the step had missed.
            StepError: the result of something outside, that the walk from the step had missed.
        """
        unseen = unseen_leaves(nodes, [*self.captured, *known], first_sequence, limit)
        leaves = [item for item in unseen if isinstance(item, torch.Tensor)]
        for node in unseen:
            if not isinstance(node, torch.Tensor):
                raise StepError(
                    f"the step uses the result of {type(node).__name__}, computed outside of it, in a way that cannot "
                    "be seen, so its gradient would be lost; let the step close over it, or put it into the carry"
                )
        if leaves:
            raise MissedTensors(leaves)

    # ---- what is known of steps like this one

    def key(self) -> Hashable:
        """Equal for calls whose steps do and cost the same."""
        return (
            *self._code,
            self.structure,
            *map(_like, self.carry),
            self.inputs.structure,
            *map(input_kind, self.inputs.leaves),
            self.check,
            *map(_like, self.captured),
            *map(_like, self._buffers),
            self.needs,
            self.surroundings.key(),
            torch.get_num_threads(),
        )


_NODES: Final = 512  # of every call's newest recorded ones are looked at for what the walk from the step had missed


def _like(value: Any) -> Hashable:
    """What of a leaf decides about costs."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad, type(value)
    kind: type = type(value)
    return value if isinstance(value, int | str | None) else kind
