"""A traced step, ready to run: its programs, lowered when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch

from ..recorded import can_need
from ..trees import Leaves
from .ahead import products_ahead
from .deferring import Term
from .graphs import ancestors, base_of_memory, name_of, nbytes, value_of
from .layouts import format_of, laid_out
from .lowering import lowered
from .programs import (
    Arriving,
    Key,
    Plan,
    Program,
    backward_program,
    finish_program,
    forward_program,
    hoisted_nodes,
    plan_deferral,
    shared_program,
)
from .splitting import Entry, Parts, bare_entry, entries
from .tracing import Joint, Problem, trace

_HEAVY: Final = [["mm"], ["addmm"], ["bmm"], ["baddbmm"], ["convolution"], ["_softmax"], ["embedding"]]
Function = Callable[..., Sequence[torch.Tensor]]
Lowering = Callable[[Program], Function]


@dataclass
class Ready:
    """A program and its function."""

    program: Program
    function: Function
    after_places: list[tuple[int, int]] = field(default_factory=list)  # (leaf of the carry, place in what is returned)
    output_places: list[int | None] = field(default_factory=list)
    plain_outputs: list[Any] = field(default_factory=list)

    def after(self, found: Sequence[torch.Tensor], carry: Leaves) -> Leaves:
        """The leaving carry."""
        leaves = list(carry)
        for leaf, place in self.after_places:
            leaves[leaf] = found[place]
        return leaves

    def outputs(self, found: Sequence[torch.Tensor]) -> Leaves:
        """The outputs by leaf."""
        pairs = zip(self.output_places, self.plain_outputs, strict=True)
        return [plain if place is None else found[place] for place, plain in pairs]


class Menu:
    """One way to keep the step's tape: its recording program and backward programs.

    Args:
        owner: the step.
        entry: what is kept.
        in_pieces: see `deferred`.
        written_by: the entry whose program records this one too, which keeps some of the same.

    Attributes:
        places: where the tape has what the recording program calls a saved value, by number.
    """

    def __init__(self, owner: Traced, entry: Entry, *, in_pieces: bool, written_by: Menu | None = None) -> None:
        self.owner, self.entry, self.written_by = owner, entry, written_by or self
        saved = self.written_by.entry.saved
        self.places = {k: entry.saved.index(node) for k, node in enumerate(saved) if node in entry.saved}
        self.plan: Plan = plan_deferral(owner.parts, entry, in_pieces=in_pieces)
        self._records: dict[bool, Ready] = {}
        self._programs: dict[Arriving, Program] = {}
        self._backwards: dict[Arriving, Ready] = {}
        self._finishes: dict[frozenset[Term], tuple[Ready, list[tuple[Term, ...]]]] = {}

    def stacked(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """What is kept of every step, with an example each."""
        for place in self.entry.carries:
            yield ("carry", place), value_of(self.owner.joint.carries[place])
        for number, node in enumerate(self.entry.saved):
            yield ("saved", number), value_of(node)

    def record(self, *, outputs: bool) -> Ready:
        """A recorded step."""
        if self.written_by is not self:  # what is fused with what decides about last bits, see `Traced.advance`
            return self.written_by.record(outputs=outputs)
        outputs = outputs or self.owner.light_outputs
        if outputs not in self._records:
            self._records[outputs] = self.owner.forward(self.entry, outputs=outputs)
        return self._records[outputs]

    def backward(self, arriving: Arriving) -> Ready:
        """A step's backward, where these gradients arrive."""
        if arriving not in self._backwards:
            program = self._program(arriving)
            # What arrives at the last steps only is not worth a compiler's time.
            lowering = self.owner.lowering if self.before(arriving) == arriving else lowered
            self._backwards[arriving] = Ready(program, lowering(program))
        return self._backwards[arriving]

    def _program(self, arriving: Arriving) -> Program:
        if arriving not in self._programs:
            owner = self.owner
            program = backward_program(owner.parts, owner.hoisted, self.entry, self.plan, arriving)
            self._programs[arriving] = program
        return self._programs[arriving]

    def finish(self, reached: frozenset[Term]) -> tuple[Ready, list[tuple[Term, ...]]]:
        """Gradients of captured tensors from sums of terms, and which terms each sum is over."""
        if reached not in self._finishes:
            program, groups = finish_program(self.owner.parts, self.owner.hoisted, self.plan, reached)
            self._finishes[reached] = Ready(program, lowered(program)), groups
        return self._finishes[reached]

    def reached(self, arriving: Arriving, steps: int) -> frozenset[Term]:
        """The terms that gradients flow into, of those that arrive at the last of some steps."""
        found: set[Term] = set()
        seen: set[Arriving] = set()
        while steps and arriving not in seen:
            seen.add(arriving)
            program = self._program(arriving)
            found.update(program.live)
            found.update(term for k, term in enumerate(self.plan.values) if ("value", k) in program.results)
            arriving = self.before(arriving)
            steps -= 1
        return frozenset(found)

    def before(self, arriving: Arriving) -> Arriving:
        """What arrives at the step before."""
        results = self._program(arriving).results
        return Arriving(frozenset(number for kind, number in results if kind == "carry"), arriving.outputs)


class Traced:
    """A step as programs.

    Args:
        problem: the step.
        lowering: makes a function of a program.

    Attributes:
        joint, parts: its graph.
        menu: the ways to keep its tape.
        ahead: products of inputs that are taken for several steps at once.
        externals: numbers of the tensors beside its arguments that it uses, among those that it can reach.
    """

    def __init__(self, problem: Problem, lowering: Lowering = lowered) -> None:
        self.joint: Joint = trace(problem)
        self.lowering, self._fuses = lowering, lowering is not lowered
        self.parts = Parts(self.joint)
        self.hoisted = hoisted_nodes(self.parts)
        self.externals = list(self.joint.externals.values())
        self.ahead = products_ahead(self.parts)
        self._constants = list(self.joint.constants.values())
        self._shared = lowered(shared_program(self.joint, self.hoisted))
        self._advances: dict[bool, Ready] = {}
        self._fuses_forward = self._fuses and self._is_light([*self.joint.outputs, *self.menu[0].entry.saved])
        self.light_outputs = self._fuses_forward or self._is_light(self.joint.outputs)
        self.needing = self.joint.needing[: len(self.joint.after)]

    @cached_property
    def menu(self) -> list[Menu]:
        """The ways to keep its tape."""
        found = entries(self.parts)
        if self._fuses:
            found = found[-1:]  # fused, what is left out costs next to nothing to compute again
        whole, pieces = (plan_deferral(self.parts, found[-1], in_pieces=flag).slot_bytes for flag in (False, True))
        menu = [Menu(self, entry, in_pieces=pieces < whole) for entry in found]
        bare = bare_entry(self.parts, found[-1]) if self._fuses else None
        return menu if bare is None else [*menu, Menu(self, bare, in_pieces=pieces < whole, written_by=menu[-1])]

    def _is_light(self, values: Sequence[Any]) -> bool:
        """Whether values cost so little beside the leaving carry that replays may as well compute them."""
        after, found = (
            ancestors([node for node in nodes if isinstance(node, torch.fx.Node)], stop=self.parts.invariant)
            for nodes in (self.joint.after, values)
        )
        return not any(name_of(node).split(".")[1:2] in _HEAVY for node in found - after)

    @property
    def shared_bytes(self) -> int:
        """Bytes of what is computed once for all steps."""
        outside = {*self.joint.externals, *self.joint.constants}
        owners = {base_of_memory(node) for node in self.hoisted}
        return sum(nbytes(node) for node in owners - outside)

    def laid_out(self, carry: Leaves) -> Leaves:
        """An initial carry as programs want it, without history."""
        return [
            laid_out(leaf.detach(), value_of(self.joint.carries[place])) if isinstance(leaf, torch.Tensor) else leaf
            for place, leaf in enumerate(carry)
        ]

    def entering_bytes(self, carry: Leaves) -> int:
        """Bytes of the copies that `laid_out` makes."""
        pairs = [(carry[place], format_of(value_of(node))) for place, node in self.joint.carries.items()]
        return sum(leaf.nbytes for leaf, layout in pairs if not leaf.is_contiguous(memory_format=layout))

    def copied_bytes(self, places: Iterable[int]) -> int:
        """Bytes of those leaves of a carry that are not laid out as callers want them."""
        nodes = [self.joint.carries[place] for place in places if place in self.joint.carries]
        return sum(nbytes(node) for node in nodes if not value_of(node).is_contiguous())

    def shared(self, externals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is the same in every step, of the tensors that it uses."""
        return list(self._shared(*(tensor.detach() for tensor in externals), *self._constants))

    def advance(self, *, outputs: bool) -> Ready:
        """A step without a tape.

        What is fused with what decides about last bits, so a fused step is advanced by the program that records it:
        replays meet the very carries that were stored, and a neuron at its threshold does what it did before. Where a
        step records much that advancing need not compute, such as a large read-out, neither is fused.
        """
        if self._fuses_forward:
            return self.menu[0].record(outputs=outputs)
        outputs = outputs or self.light_outputs
        if outputs not in self._advances:
            self._advances[outputs] = self.forward(None, outputs=outputs)
        return self._advances[outputs]

    def forward(self, entry: Entry | None, *, outputs: bool) -> Ready:
        """A step's forward program, lowered."""
        joint = self.joint
        program = forward_program(
            self.parts, self.hoisted, entry, [ahead.node for ahead in self.ahead], outputs=outputs
        )
        ready = Ready(program, (self.lowering if self._fuses_forward else lowered)(program))
        firsts = {id(node): place for place, node in reversed(list(enumerate(joint.after)))}
        for place, node in enumerate(joint.after):
            if isinstance(node, torch.fx.Node):
                ready.after_places.append((place, program.results["after", firsts[id(node)]]))
        results = program.results
        ready.output_places = [results.get(("output", number)) for number in range(len(joint.outputs))]
        ready.plain_outputs = list(joint.outputs)
        return ready

    def marked(self, carry: Leaves) -> Leaves:
        """The final carry, its leaves needing gradients where they would in the plain loop."""
        marked = {}
        for leaf, need in zip(carry, self.needing, strict=True):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in marked:
                marked[id(leaf)] = leaf.detach().contiguous().requires_grad_(need and can_need(leaf))
        return [marked.get(id(leaf), leaf) for leaf in carry]
