"""What one step of a loop does, found out by running it a few times and looking."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from .aliases import Aliases
from .ambient import States, recomputing, refuse_kept
from .calls import Call, Nature
from .casts import cast_among
from .collectives import calls_so_far, groups_used
from .errors import StepError
from .kept import left_alone
from .mutable import note_moving, refuse_changes
from .needs import Flags, Needed, could_need, flags_of, united
from .nodes import reached_leaves
from .recorded import can_need, copied, detached, needs_gradient, places_of, sequence_number
from .trees import Leaves

_TRANSIENT: Final = 6  # runs of a step at most, until what needs gradients stays as it is


class Discovery:
    """Runs one step a few times, with and without autograd, and looks."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.loop = call.loop(None, call.carry, call.inputs.leaves)
        self.states = States(call.sources)
        self.casts: frozenset[int] = frozenset()
        self.aliases = Aliases()
        self.changed: set[int] = set()  # leaves of the carry that a recorded step changes in place
        self.moved: set[int] = set()  # leaves of the carry that any step replaces
        self.needs_autograd = False  # or a step without it returns the same

    def nature(self) -> Nature:
        """What the step does.

        Raises:
            StepError: it breaks the contract of `scan`.
            MissedTensors: it uses tensors that the call does not know of.
        """
        with recomputing(), self._no_gathering(), self.states.undisturbed(), left_alone(self.call.places):
            carry = copied(detached(self.call.carry))
            communicated = calls_so_far()
            # At every place: which of those that begin as one tensor are changed shows later.
            before = {place: leaf._version for place, leaf in enumerate(carry) if isinstance(leaf, torch.Tensor)}
            fixed = [*self.call.fixed, *self.call.captured]
            versions = [tensor._version for tensor in fixed]
            plain = self._without_autograd(0, carry)
            left = self._left()
            changed = {place for place, version in before.items() if carry[place]._version != version}
            orbit, after, outputs, unread = self._orbit(plain, left)
            changed |= self.changed
            if self.aliases.foreign & self.aliases.overwritten(changed):
                raise StepError(
                    "the step changes its carry in place, and returns as its carry an input or a tensor from outside, "
                    "which a later step would change, and every replay again; return a clone of it"
                )
            moved = [leaf if place in self.moved else None for place, leaf in enumerate(after)]
            moved_bytes = max(_moved_bytes(carry, (plain or after)[: len(carry)]), _moved_bytes([], moved))
            refuse_changes(fixed, versions)
            changes = self._changes()
            groups = groups_used(communicated)
        could = tuple(map(could_need, after)), tuple(map(could_need, outputs))
        return Nature(
            needed=Needed(united(flags for flags, _ in orbit), united(flags for _, flags in orbit), changes),
            orbit=tuple(orbit),
            settled=orbit[-1] == could,
            copies=bool(changed),
            grad_mode=self.needs_autograd,
            carry_bytes=tuple(map(_bytes_of, firsts(after))),
            output_bytes=tuple(map(_bytes_of, outputs)),
            moved_bytes=moved_bytes,
            unread=unread,
            casts=self.casts,
            groups=groups,
            spoils_outputs=self.aliases.spoil_outputs(changed),
        )

    def _orbit(
        self, plain: Leaves | None, left: dict[int, Any]
    ) -> tuple[list[tuple[Flags, Flags]], Leaves, Leaves, frozenset[int]]:
        """What needs gradients after each step until nothing changes any more, the last results, and what is unread.

        Once everything needs a gradient that can, nothing changes any more. Each step is compared with itself without
        autograd, of which `plain` returned and `left` the first: a step may ask whether something needs a gradient.
        """
        needs, orbit = self.call.needs, []
        after, outputs, unread = self._record(0, self.call.carry, needs)
        self._compare(plain, [*after, *outputs], left, self._left())
        for index in range(1, _TRANSIENT + 1):
            orbit.append((flags_of(after), flags_of(outputs)))
            if orbit[-1][0] == needs:
                break
            needs, before = orbit[-1][0], after
            after, outputs, _ = self._record(index, before, needs)
            if not self.needs_autograd:
                left = self._left()
                self.states.restart()
                plain = self._without_autograd(index, copied(detached(before)))
                self._compare(plain, [*after, *outputs], left, self._left())
        return orbit, after, outputs, unread

    def _left(self) -> dict[int, Any]:
        """Buffers, other tensors and random streams that a step has changed, by number of the source."""
        pairs = enumerate(zip(self.call.sources, self.states.start, strict=True))
        return {
            number: now
            for number, (source, before) in pairs
            if not source.kept and not source.same(before, now := source.get())  # containers hold other objects
        }

    def _compare(self, plain: Leaves | None, results: Leaves, left: dict[int, Any], now: dict[int, Any]) -> None:
        same = plain is not None and all(map(_same_bits, plain, detached(results)))
        same = same and left.keys() == now.keys()
        self.needs_autograd |= not (same and all(self.call.sources[k].same(left[k], now[k]) for k in left))

    @contextmanager
    def _no_gathering(self) -> Iterator[None]:
        """Refuse a step that calls a module which gathers its parameters itself, before it does."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        wrapped = getattr(fsdp, "FSDPModule", ())
        with ExitStack() as stack:
            for module in self.call.modules:
                if isinstance(module, wrapped):
                    handle = module.register_forward_pre_hook(_refuse_gathering, prepend=True)
                    stack.callback(handle.remove)
            yield

    def _inputs(self, index: int) -> Leaves:
        """Copies of a step's inputs, which it may change before that is seen."""
        inputs = self.loop.inputs(index, recording=True)
        return marked(copied(detached(inputs)), tuple(map(needs_gradient, inputs)))

    def _without_autograd(self, index: int, carry: Leaves) -> Leaves | None:
        """What a step returns when autograd is off; None if it cannot do without."""

        def job() -> Leaves:
            inputs = copied(self.loop.inputs(index, recording=False))
            after, outputs = self.loop.run(index, carry, inputs, first=True)
            return [*after, *outputs]

        return self.call.surroundings.without_autograd(job)

    def _record(self, index: int, leaves: Leaves, needs: Flags) -> tuple[Leaves, Leaves, frozenset[int]]:
        """Carry and outputs of a recorded step, and the leaves in places that no gradient would flow into."""
        first_sequence = sequence_number()
        self.states.restart()
        with torch.enable_grad(), self.call.surroundings.own_cast_cache():
            carry = marked(copied(detached(leaves)), needs)
            own = {id(leaf): leaf.clone() for leaf in carry if needs_gradient(leaf)}  # may be changed in place
            inner = [own.get(id(leaf), leaf) for leaf in carry]
            inputs = self._inputs(index)
            versions = [leaf._version for leaf in inputs if isinstance(leaf, torch.Tensor)]
            before = [
                (place, leaf, leaf._version) for place, leaf in enumerate(inner) if isinstance(leaf, torch.Tensor)
            ]
            after, outputs = self.loop.run(index, inner, inputs, first=True)
            if versions != [leaf._version for leaf in inputs if isinstance(leaf, torch.Tensor)]:
                raise StepError(
                    "the step changes its input in place, and every replay would again; change a clone of it"
                )
            nodes = [leaf.grad_fn for leaf in (*after, *outputs) if needs_gradient(leaf)]
            self.casts |= cast_among(nodes, self.call.captured)
        self.changed |= {place for place, leaf, version in before if leaf._version != version}
        given = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        self.aliases.note(inner, after, outputs, [*given, *self.call.fixed, *self.call.captured])
        self.moved |= {place for place, (old, new) in enumerate(zip(inner, after, strict=True)) if old is not new}
        known = [leaf for leaf in (*carry, *inputs) if needs_gradient(leaf)]
        self.call.lookout.look(nodes, known, first_sequence)
        kept = range(len(carry) - len(self.call.places), len(carry))
        reached = reached_leaves(nodes, [carry[place] for place in kept if needs_gradient(carry[place])])
        return after, outputs, frozenset(place for place in kept if id(carry[place]) not in reached)

    def _changes(self) -> frozenset[int]:
        """What the step changed beside its results."""
        changes = [
            (number, source, before, after)
            for number, (source, before) in enumerate(zip(self.call.sources, self.states.start, strict=True))
            if not source.same(before, after := source.get())
        ]
        for _, source, before, after in changes:
            note_moving(source, before, after)
        refuse_kept((source, before, after) for _, source, before, after in changes)
        return frozenset(number for number, *_ in changes)


def _refuse_gathering(module: torch.nn.Module, _: Any) -> None:
    raise StepError(
        f"the step calls a {type(module).__name__} that fully_shard wraps on its own; wrap the module whose forward "
        "calls remat.scan instead, so that parameters are gathered once before the loop and reduced once after it"
    )


def firsts(leaves: Leaves) -> Leaves:
    """Every tensor at its first place only, None elsewhere."""
    places = set(places_of(leaves))
    return [leaf if place in places else None for place, leaf in enumerate(leaves)]


def marked(leaves: Leaves, needs: tuple[bool, ...]) -> Leaves:
    for leaf, need in zip(leaves, needs, strict=True):
        if need and isinstance(leaf, torch.Tensor) and can_need(leaf):
            leaf.requires_grad_()
    return leaves


def _bytes_of(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, torch.Tensor) else 0


def _moved_bytes(before: Leaves, after: Leaves) -> int:
    """Bytes of what a carry holds, without what stood at the same place before."""
    stayed = {id(old) for old, new in zip(before, after, strict=False) if old is new}
    moved = [leaf for leaf in after if isinstance(leaf, torch.Tensor) and id(leaf) not in stayed]
    return sum({leaf.untyped_storage()._cdata: leaf.nbytes for leaf in moved}.values())


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two results of the same step are equal; a NaN equals a NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True  # other values are compared by nobody: the step may make them anew each time
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
