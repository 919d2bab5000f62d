"""What blocks do and cost: each kind of block on each kind of carry is looked at and measured once, and remembered.

A walk along the chain knows from what it has seen which carry leaves a block. It runs blocks only to reach one that is
new, on the real carry that enters it: once without autograd, once recorded and looked at, then measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..ambient import Source, States, Surroundings, recomputing, refuse_kept
from ..chains import Stage
from ..errors import KeptTensors, StepError
from ..gauges import Gauge
from ..mutable import note_moving, refuse_changes
from ..recent import Recent
from ..recorded import can_need, copied, detached, needs_gradient, sequence_number
from ..silence import silence
from ..streams import random_sources
from ..trees import Leaves, Structure
from .block import Block, Blocks
from .costs import Clock, Subject, as_they_were, measured


class Kind(NamedTuple):
    """What of a carry decides what blocks do and cost: its structure, its leaves, which of them need a gradient."""

    structure: Structure
    leaves: tuple[Hashable, ...]
    needs: tuple[bool, ...]

    @classmethod
    def of(cls, structure: Structure, leaves: Leaves) -> Kind:
        """The kind of a carry."""
        return cls(structure, tuple(map(_kind, leaves)), tuple(map(needs_gradient, leaves)))


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, type(leaf)
    kind: type = type(leaf)
    return leaf if isinstance(leaf, int | str | None) else kind


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a block on a carry.

    Attributes:
        leaving: the kind of the carry that leaves it.
        carry_bytes, leaving_bytes: of the carries that enter and leave, by storage.
        copies: whether it changes its carry in place.
        aliases: whether the leaving carry shares storage with the entering one.
        grad_mode: whether it computes otherwise when autograd is off.
        changes: what it changes beside its carry, by number among `Block.sources`.
        state_bytes: bytes of that.
        draws: which random streams it draws from, by number.
        stage: its costs, without gradients that stay.
        gradients: bytes of the gradients of what it has captured, in the order of `used_by`.
    """

    leaving: Kind
    carry_bytes: int
    leaving_bytes: int
    copies: bool
    aliases: bool
    grad_mode: bool
    changes: tuple[int, ...]
    state_bytes: int
    draws: frozenset[int]
    stage: Stage
    gradients: tuple[int, ...]


_KEPT: Final = 4096
_known: Recent[Hashable, Known] = Recent(_KEPT)


def survey(
    blocks: Sequence[Block],
    structure: Structure,
    carry: Leaves,
    *,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    shared: Sequence[torch.Tensor],
    summed: frozenset[int],
    streams: tuple[Source, ...],
    surroundings: Surroundings,
    gauge: Gauge,
    seen: Callable[[], object] = lambda: None,
) -> list[Known]:
    """What is known of every block, in order; leaves no trace.

    Args:
        blocks: the blocks.
        structure, carry: of carry 0, leaves that need a gradient saying so.
        arguments, keywords: what every block takes beside its carry.
        shared: the tensors among those that need a gradient.
        summed: ids of tensors that several blocks may use.
        streams: random streams that blocks may draw from.
        surroundings: the settings to run under.
        gauge: what measures bytes and seconds.
        seen: called after each block.

    Raises:
        StepError: a block does what a chain cannot follow.
        MissedTensors: a block uses tensors that are not known.
    """
    walk = _Walk(blocks, structure, carry, arguments, keywords, shared, summed, streams, surroundings, gauge)
    return walk.all(seen)


class _Walk:
    """A walk along the chain; the arguments are those of `survey`."""

    def __init__(
        self,
        blocks: Sequence[Block],
        structure: Structure,
        carry: Leaves,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        shared: Sequence[torch.Tensor],
        summed: frozenset[int],
        streams: tuple[Source, ...],
        surroundings: Surroundings,
        gauge: Gauge,
    ) -> None:
        self.blocks, self.shared, self.summed, self.streams = blocks, shared, summed, streams
        self.arguments, self.keywords = arguments, keywords
        self.surroundings, self.clock = surroundings, Clock(gauge)
        self._structure, self._carry = structure, carry
        self._kind = Kind.of(structure, carry)
        self._needs = self._kind.needs
        self._at = 0  # the carry at hand enters this block
        places = Structure((arguments, keywords))
        around = tuple(map(_kind, (*places.flatten((arguments, keywords)), *shared)))
        self._around = (places, around, surroundings.key(), torch.get_num_threads(), gauge)

    def all(self, seen: Callable[[], object]) -> list[Known]:
        """What is known of every block."""
        found: list[Known] = []
        for block in self.blocks:
            summed = tuple(id(tensor) in self.summed for tensor in block.captured)
            key = (block.key, summed if any(summed) else (), self._kind, self._around)
            known = _known.recall(key, partial(self._look, block, found))
            found.append(known)
            self._kind = known.leaving
            seen()
        return found

    @property
    def entering(self) -> Kind:
        """The kind of the carry that enters the block at hand."""
        return self._kind

    def _look(self, block: Block, before: list[Known]) -> Known:
        """Go to a block that is new, and look at it."""
        _refuse_gathering(block)
        states = States(self.streams)
        with recomputing(), silence(), states.undisturbed():
            self._go(before)
            return _Look(self, block, self._structure, _marked(detached(self._carry), self._kind.needs)).known()

    def _go(self, before: list[Known]) -> None:
        """Run the blocks up to the one that is new."""
        for index in range(self._at, len(before)):
            changes = [self.blocks[index].sources_of(before[index].changes)]
            stage = Blocks([self.blocks[index].function], self._structure, changes, self.arguments, self.keywords)
            known, needs = before[index], before[index - 1].leaving.needs if index else self._needs
            with (
                torch.set_grad_enabled(known.grad_mode),
                self.surroundings.own_cast_cache(),
                as_they_were(changes[0]),
            ):
                carry = _marked(detached(self._carry), needs) if known.grad_mode else self._carry
                carry = copied(carry) if known.copies or known.grad_mode else carry
                self._carry = detached(stage.run(0, carry, [], first=True)[0])
            after = stage.structures[1]
            assert after is not None
            self._structure = after
        self._at = len(before)


def _refuse_gathering(block: Block) -> None:
    """A block that gathers its parameters itself would scatter the gradients before they are there.

    Raises:
        StepError: it is one.
    """
    for module in block.reached.modules:
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise StepError(
                f"block {block.name} is, or calls, a {type(module).__name__} that fully_shard wraps on its own; wrap "
                "the module whose forward calls remat.chain instead, so that parameters are gathered once before the "
                "chain and reduced once after it"
            )


def untraced(
    functions: Sequence[Callable[..., Any]], x: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """What blocks return, run without autograd, everything they change put back."""
    with recomputing(), silence(), torch.no_grad():
        for function in functions:
            block = Block(function)
            devices = {tensor.device for tensor in block.tensors}
            with as_they_were([*random_sources(devices, block.generators), *block.sources()]):
                x = function(x, *arguments, **keywords)
    return x


def used_by(block: Block, shared: Sequence[torch.Tensor], summed: frozenset[int]) -> list[torch.Tensor]:
    """What a block may use: its own, then what other blocks may use too, what all blocks take last."""
    ids = set(map(id, shared))
    own = [tensor for tensor in block.captured if id(tensor) not in ids]
    alone = [tensor for tensor in own if id(tensor) not in summed]
    return [*alone, *(tensor for tensor in own if id(tensor) in summed), *shared]


class _Look:
    """Runs one block a few times and looks."""

    def __init__(self, walk: _Walk, block: Block, structure: Structure, carry: Leaves) -> None:
        self.walk, self.block, self.structure, self.carry = walk, block, structure, carry
        self.captured = used_by(block, walk.shared, walk.summed)
        self.summed = sum(id(tensor) in walk.summed for tensor in self.captured)
        self.sources = block.sources()

    def known(self) -> Known:
        """What the block does and costs."""
        states = States((*self.walk.streams, *self.sources))
        with states.undisturbed():
            carry = copied(detached(self.carry))
            fixed = [*self.block.reached.fixed, *self.captured]
            versions = [tensor._version for tensor in fixed]
            before = tuple(leaf._version for leaf in carry if isinstance(leaf, torch.Tensor))
            plain = self._without_autograd(carry)
            copies = before != tuple(leaf._version for leaf in carry if isinstance(leaf, torch.Tensor))
            aliases = plain is not None and bool(set(_storages(carry)) & set(_storages(plain[1])))
            refuse_changes(fixed, versions)
            del carry
            states.restart()
            inner, structure, after = self._record(copies=copies or plain is None)
            if plain is None:  # it would not run without autograd, and shows now what it does
                copies = any(map(_changed, inner))
                aliases = bool(set(_storages(inner)) & set(_storages(after)))
            del inner
            changed = self._changes(states)
        same = plain is not None and structure == plain[0] and all(map(_same_bits, plain[1], after))
        leaving = Kind.of(structure, after)
        own = tuple(number - len(self.walk.streams) for number in changed if number >= len(self.walk.streams))
        draws = frozenset(number for number in changed if number < len(self.walk.streams))
        state_bytes = sum(_state_bytes(self.sources[number]) for number in own)
        sizes = storage_bytes(self.carry), storage_bytes(after)
        empty = [_without_memory(leaf) if need else None for leaf, need in zip(after, leaving.needs, strict=True)]
        devices = [None if like is None else leaf.device for leaf, like in zip(after, empty, strict=True)]
        del after, plain
        stage, gradients = measured(
            Subject(
                (self.block.sort, self.walk.entering),
                self.stages([self.sources[number] for number in own]),
                self.carry,
                *sizes,
                leaving.needs,
                empty,
                devices,
                self.captured,
                self.summed,
                copies,
                not same,
                [self.sources[number] for number in own],
                tuple(self.walk.streams[number] for number in draws),
            ),
            self.walk.surroundings,
            self.walk.clock,
        )
        return Known(leaving, *sizes, copies, aliases, not same, own, state_bytes, draws, stage, tuple(gradients))

    def stages(self, changes: Sequence[Source] = ()) -> Blocks:
        """The block as a chain of one."""
        return Blocks([self.block.function], self.structure, [changes], self.walk.arguments, self.walk.keywords)

    def _without_autograd(self, carry: Leaves) -> tuple[Structure, Leaves] | None:
        """What the block returns when autograd is off; None if it cannot do without."""
        stages = self.stages()
        ran = self.walk.surroundings.without_autograd(lambda: stages.run(0, carry, [], first=True))
        if ran is None:
            return None
        structure = stages.structures[1]
        assert structure is not None
        return structure, ran[0]

    def _changes(self, states: States) -> list[int]:
        changes = [
            (number, source, start, end)
            for number, (source, start) in enumerate(zip(states.sources, states.start, strict=True))
            if not source.same(start, end := source.get())
        ]
        for _, source, start, end in changes:
            note_moving(source, start, end)
        try:
            refuse_kept((source, start, end) for _, source, start, end in changes)
        except KeptTensors as kept:
            names = ", ".join(str(place.name) for place in kept.places)
            raise StepError(
                f"block {self.block.name} keeps a tensor with a gradient beside its carry, in {names}, and gradients "
                "cannot follow it there; return it as a part of the carry, or keep value.detach()"
            ) from None
        return [number for number, *_ in changes]

    def _record(self, *, copies: bool) -> tuple[Leaves, Structure, Leaves]:
        """What the block was given, a clone where it may be changed in place, and what it returned."""
        first_sequence = sequence_number()
        stages = self.stages()
        with torch.enable_grad(), self.walk.surroundings.own_cast_cache():
            tensors = (leaf for leaf in self.carry if isinstance(leaf, torch.Tensor))
            clones = {id(leaf): leaf.clone() for leaf in tensors if copies or needs_gradient(leaf)}
            inner = [clones.get(id(leaf), leaf) for leaf in self.carry]
            after, _ = stages.run(0, inner, [], first=True)
        known = filter(needs_gradient, self.carry)
        nodes = [leaf.grad_fn for leaf in after if needs_gradient(leaf)]
        self.block.lookout(self.captured).look(nodes, known, first_sequence)
        structure = stages.structures[1]
        assert structure is not None
        return inner, structure, after


# ---- small things


def _marked(leaves: Leaves, needs: Sequence[bool]) -> Leaves:
    for leaf, need in zip(leaves, needs, strict=True):
        if need and isinstance(leaf, torch.Tensor) and can_need(leaf):
            leaf.requires_grad_()
    return leaves


def _changed(clone: Any) -> bool:
    return isinstance(clone, torch.Tensor) and clone._version > 0


def _without_memory(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(leaf, device="meta", requires_grad=False)


def _storages(leaves: Leaves) -> dict[int, int]:
    """Bytes of every storage behind some leaves, by its address."""
    return {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    }


def storage_bytes(leaves: Leaves) -> int:
    """Bytes of some leaves, each storage once."""
    return sum(_storages(leaves).values())


def _state_bytes(source: Source) -> int:
    state = source.get()
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
