"""One call of `scan`, taken apart: arguments, what the step can reach, what one step was seen to do and to cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import torch

from .ambient import States, Surroundings, random_sources, recomputing
from .budgets import budget_bytes
from .captures import reach, unseen_leaves
from .errors import StepError
from .inputs import Inputs, emptied, input_kind, is_sliced, with_tensor
from .interpreter import Interpreter
from .loops import Loop, Outputs, Step
from .mutable import mutable_sources, refuse_hidden_gradients
from .planners.room import smallest
from .plans import Plan, plan
from .profiler import STEPS, Costs, Sizes, Trial, profile
from .recorded import (
    RecordedRange,
    Root,
    can_need,
    copied,
    detached,
    needs_gradient,
    places_of,
    sequence_number,
    versions_of,
)
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
        return Interpreter(
            loop,
            actions,
            length,
            carry,
            states=states,
            surroundings=self.surroundings,
            needs=nature.needs,
            captured=self.captured,
            copies=nature.copies,
            grad_mode=nature.grad_mode,
        )

    def check_range(self, recorded: RecordedRange, anchor: torch.Tensor) -> None:
        """`check_seen` for the newest nodes of a recorded range; every step has been looked at once already."""
        newest = recorded.outputs[-1][1] if recorded.outputs else 0
        outputs = (item for item in recorded.outputs if item[1] == newest)
        roots: list[Root] = [root for _, root in recorded.leaving] + [root for _, _, root in outputs]
        nodes = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
        known = [anchor, *(alias for _, aliases in recorded.inputs for alias in aliases)]
        self.check_seen(nodes, known, recorded.first_sequence, _NODES)

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
_KEPT: Final = 256  # steps and plans are remembered


class _Memory(OrderedDict[Hashable, Any]):
    """The latest results, by key."""

    def recall(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key in self:
            self.move_to_end(key)
            found: Value = self[key]
            return found
        made = self[key] = make()
        while len(self) > _KEPT:
            self.popitem(last=False)
        return made


_natures, _costs, _plans = _Memory(), _Memory(), _Memory()


def nature_of(call: Call) -> Nature:
    """What the call's step does, seen in a first run or remembered.

    Raises:
        StepError: it does not do what a step must.
        MissedTensors: it uses tensors that the call does not know of.
    """
    return _natures.recall(call.key(), lambda: _Discovery(call).nature())


def plan_of(call: Call, budget: int | str | None, planner: str) -> tuple[Nature, Plan]:
    """The call's plan, made or remembered.

    It depends on shapes and budget only, not on measured seconds, so processes that run the same step at the same
    budget plan the same without a word between them.

    Raises:
        InfeasibleBudget: the budget is too small.
        StepError, MissedTensors: as `nature_of`.
    """
    limit = budget_bytes(budget, call.device)
    nature = nature_of(call)
    key = call.key()
    gradients = sum(leaf.nbytes for leaf in call.inputs.tensors() if leaf.requires_grad)
    costs = _costs.recall(key, lambda: _measure(call, nature, limit, gradients))
    chain = costs.chain(call.length, gradients)
    if call.inputs.owned_bytes:
        chain = msgspec.structs.replace(chain, output_bytes=chain.output_bytes + call.inputs.owned_bytes)
    return nature, _plans.recall(
        (key, call.length, gradients, call.inputs.owned_bytes, limit, planner), lambda: plan(chain, limit, planner)
    )


def _measure(call: Call, nature: Nature, limit: int, input_gradient_bytes: int) -> Costs:
    """The costs of one step, measured in small runs on copies of the carry."""
    loop = call.loop(Outputs(STEPS), call.carry, call.inputs.leaves)
    states = States(call.sources, nature.changes)
    carry = _marked(copied(detached(call.carry)), nature.needs)

    def start() -> Trial:
        if loop.outputs is not None:
            loop.outputs.flush()  # what waits from the trial before must not be released in the next
        states.restart()
        return Trial(call.interpreter(loop, nature, iter(()), carry, states, STEPS), arriving)

    def arriving() -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        assert loop.outputs is not None
        outputs = zip(loop.outputs.buffers, nature.output_needs, strict=True)
        adjoint = [torch.zeros_like(leaf) if needs_gradient(leaf) else None for leaf in _firsts(carry)]
        return adjoint, [torch.zeros_like(buffer) if need else None for buffer, need in outputs]

    def room_bytes(costs: Costs) -> int:
        return limit - smallest(costs.chain(call.length, input_gradient_bytes)).peak_bytes

    with torch.enable_grad(), States(call.sources, call.watched | nature.changes).undisturbed():
        return profile(start, nature.sizes, call.device, room_bytes)


class _Discovery:
    """Runs one step a few times, with and without autograd, and looks."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.loop = call.loop(None, call.carry, call.inputs.leaves)
        self.states = States(call.sources)

    def nature(self) -> Nature:
        """What the step does.

        Raises:
            StepError: it breaks the contract of `scan`.
            MissedTensors: it uses tensors that the call does not know of.
        """
        with recomputing(), self.states.undisturbed():
            carry = copied(detached(self.call.carry))
            before = versions_of(carry)
            plain = self._without_autograd(carry)
            copies = versions_of(carry) != before
            needs = self.call.needs
            while True:
                after, outputs = self._record(needs)
                wider = tuple(a or needs_gradient(b) for a, b in zip(needs, after, strict=True))
                if wider == needs:
                    break
                needs = wider
            changes = self._changes()
        same = plain is not None and all(map(_same_bits, plain, [*after, *outputs]))
        sizes = _sizes(needs, after, outputs)
        return Nature(needs, tuple(map(needs_gradient, outputs)), copies, not same, changes, sizes)

    def _without_autograd(self, carry: Leaves) -> Leaves | None:
        """What the step returns when autograd is off; None if it cannot do without, as when it takes gradients."""
        try:
            with torch.no_grad(), self.call.surroundings.own_cast_cache():
                after, outputs = self.loop.run(0, carry, self.loop.inputs(0, recording=False), first=True)
        except StepError:
            raise
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            return None
        return [*after, *outputs]

    def _record(self, needs: tuple[bool, ...]) -> tuple[Leaves, Leaves]:
        first_sequence = sequence_number()
        self.states.restart()
        with torch.enable_grad(), self.call.surroundings.own_cast_cache():
            carry = _marked(copied(detached(self.call.carry)), needs)
            inner = [leaf.clone() if needs_gradient(leaf) else leaf for leaf in carry]  # may be changed in place
            inputs = self.loop.inputs(0, recording=True)
            after, outputs = self.loop.run(0, inner, inputs, first=True)
        known = [leaf for leaf in (*carry, *inputs) if needs_gradient(leaf)]
        nodes = (leaf.grad_fn for leaf in (*after, *outputs) if needs_gradient(leaf))
        self.call.check_seen(nodes, known, first_sequence)
        return after, outputs

    def _changes(self) -> frozenset[int]:
        """What the step changed beside its results."""
        self.states.take()
        start, end = self.states.start, self.states.take()
        changed = [n for n, source in enumerate(self.call.sources) if not source.same(start[n], end[n])]
        for number in set(changed) - self.call.streams:
            refuse_hidden_gradients(self.call.sources[number], start[number], end[number])
        return frozenset(changed)


def _firsts(leaves: Leaves) -> Leaves:
    """Every tensor at its first place only, None elsewhere."""
    places = set(places_of(leaves))
    return [leaf if place in places else None for place, leaf in enumerate(leaves)]


def _marked(leaves: Leaves, needs: tuple[bool, ...]) -> Leaves:
    for leaf, need in zip(leaves, needs, strict=True):
        if need and can_need(leaf):
            leaf.requires_grad_()
    return leaves


def _sizes(needs: tuple[bool, ...], carry: Leaves, outputs: Leaves) -> Sizes:
    def size(leaves: Leaves, wanted: Iterable[bool]) -> int:
        return sum(leaf.nbytes for leaf, want in zip(leaves, wanted, strict=True) if want and leaf is not None)

    tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in outputs]
    return Sizes(
        output_bytes=size(tensors, [True] * len(tensors)),
        output_gradient_bytes=size(tensors, map(needs_gradient, outputs)),
        final_gradient_bytes=size(_firsts(carry), needs),
    )


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two results of the same step are equal; a NaN equals a NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True  # other values are compared by nobody: the step may make them anew each time
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _like(value: Any) -> Hashable:
    """What of a leaf decides about costs."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad, type(value)
    kind: type = type(value)
    return value if isinstance(value, int | str | None) else kind
