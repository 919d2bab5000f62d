"""Blocks of a chain: what each is, what it uses and may change; and all of them as stages for the interpreter.

A call of a chain has to know its blocks again each time, at a cost that is small beside running them. Most are modules
that hold nothing but parameters, buffers and plain settings; a quick walk says all about those. Everything else is
walked through as a step of `scan` is (`captures.reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch

from ..ambient import Source
from ..captures import Reached, reach
from ..errors import StepError
from ..loops import described, fingerprint, kind_of
from ..missed import Lookout
from ..mutable import mutable_sources, tensor_source, tensors_source
from ..nodes import apart_from_used_up
from ..trees import Leaves, Mismatch, Structure
from .plain import Seen, plain


class Block:
    """One block, as it is now.

    Attributes:
        function: what is called.
        tensors: all that it can reach, each once, but for those with a graph that a backward has gone through.
        devices: where those are.
        key: equal for blocks that do and cost the same on the same carry.
        bindings: what names in it stand for.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._members: tuple[Block, ...] = ()
        seen = plain(function)
        self._buffers, self._used_up = None if seen is None else seen.buffers, frozenset[Any]()
        if seen is None:
            tensors, self._used_up = apart_from_used_up(self.reached.tensors)
            settings = (*self.reached.codes, *self.reached.settings, len(self._used_up))
            seen = Seen(tensors, [], settings, [], self.reached.bindings)
        self._take(seen)

    def _take(self, seen: Seen) -> None:
        self.tensors, self.captured, self.devices = seen.tensors, seen.captured, seen.devices
        self.key, self.bindings = seen.key, seen.bindings

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """Neighbours as one block, all of them modules that hold nothing but tensors and settings."""
        group = cls.__new__(cls)
        group.function, group._members = Group([block.function for block in blocks]), tuple(blocks)
        tensors = {id(tensor): tensor for block in blocks for tensor in block.tensors}
        buffers = {id(buffer): buffer for block in blocks for buffer in block._buffers or ()}
        places = {key: number for number, key in enumerate(tensors)}  # so that tied ones look so
        tied = tuple(places[id(tensor)] for block in blocks for tensor in block.tensors)
        settings = (Group, *(block.key for block in blocks), tied)
        bindings = [binding for block in blocks for binding in block.bindings]
        seen = Seen(list(tensors.values()), list(buffers.values()), settings, [], bindings)
        group._buffers, group._used_up = seen.buffers, frozenset()
        group._take(seen)
        return group

    @cached_property
    def reached(self) -> Reached:
        """All that the block can reach."""
        if not self._members:
            return reach(self.function)
        parts = [block.reached for block in self._members]
        return Reached(
            **{
                each.name: list({id(item): item for part in parts for item in getattr(part, each.name)}.values())
                for each in fields(Reached)
            }
        )

    @property
    def name(self) -> str:
        """What to call it."""
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    def lookout(self, captured: Sequence[torch.Tensor]) -> Lookout:
        """What finds tensors that the block uses beside those that are known."""
        return Lookout(f"block {self.name}", "pass it to remat.chain as a shared argument", captured, self._used_up)

    @property
    def plain(self) -> bool:
        """Whether it is a module that holds nothing but tensors and settings."""
        return self._buffers is not None

    @property
    def sort(self) -> Hashable:
        """Equal for blocks made of the same kinds of parts in the same sizes, whatever their settings."""
        if not self.plain or not isinstance(self.function, torch.nn.Module):
            return self.key
        sizes = tuple((tensor.shape, tensor.dtype) for tensor in self.tensors)
        return tuple(type(module) for module in self.function.modules()), sizes

    @property
    def generators(self) -> list[object]:
        """Its own generators of random numbers."""
        return self.reached.generators if self._buffers is None else []

    def sources(self) -> tuple[Source, ...]:
        """All beside its carry and random streams that it could change, in an order that depends on its key alone."""
        if self._buffers is None:
            return mutable_sources(self.reached)
        others = [value for value in self.reached.changeable if not isinstance(value, torch.Tensor)]
        return (*map(tensor_source, self._buffers), *mutable_sources(Reached(changeable=others)))

    def sources_of(self, numbers: Sequence[int]) -> list[Source]:
        """Some of them, as few sources as can be, to be put back together."""
        if not numbers:
            return []
        if self._buffers is not None and all(number < len(self._buffers) for number in numbers):
            buffers = [self._buffers[number] for number in numbers]
            if all(type(buffer) is torch.Tensor and buffer.layout is torch.strided for buffer in buffers):
                return [tensors_source(buffers)]
        sources = self.sources()
        return [sources[number] for number in numbers]


class Group:
    """Neighbouring blocks, run as one."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions = functions
        self.__name__ = f"group of {len(functions)} blocks"

    def __call__(self, x: Any, *shared: Any, **named: Any) -> Any:
        """The loop over them."""
        for function in self.functions:
            x = function(x, *shared, **named)
        return x


# ---- stages


class Blocks:
    """Blocks as stages, for one call.

    Args:
        functions: the blocks.
        structure: of carry 0.
        changes: for every block what it changes beside its carry, by its nature.
        arguments, keywords: what every block takes beside the carry.
        check: compare replays with first runs.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        structure: Structure,
        changes: Sequence[Sequence[Source]],
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
        *,
        check: bool = False,
    ) -> None:
        self.functions, self.changes = functions, changes
        self.structures: list[Structure | None] = [structure, *(None for _ in functions)]
        self._arguments, self._keywords = arguments, keywords or {}
        self._kinds: list[Any] = [None] * len(functions)
        self._fingerprints: list[Any] | None = [None] * len(functions) if check else None
        self._before: list[list[Any] | None] = [None] * len(functions)

    def inputs(self, index: int, *, recording: bool) -> Leaves:
        """None: shared arguments are captured tensors."""
        del index, recording
        return []

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """One block; a replay must return what the first run did."""
        del inputs, first
        structure = self.structures[index]
        assert structure is not None, "blocks run in order"
        sources = self.changes[index]
        if sources and self._before[index] is not None:
            with self._as_first(index):
                result = self.functions[index](structure.build(carry), *self._arguments, **self._keywords)
        else:
            if sources:
                self._before[index] = [source.get() for source in sources]
            result = self.functions[index](structure.build(carry), *self._arguments, **self._keywords)
        after = self.structures[index + 1]
        if after is None:
            after = self.structures[index + 1] = Structure(result)
        try:
            leaves = after.flatten(result)
        except Mismatch as error:
            raise StepError(
                f"a replay of block {index} returned another structure than its first run: {error}"
            ) from None
        self._compare(index, after, leaves)
        return leaves, []

    def emit(self, index: int, outputs: Leaves) -> None:
        """A chain has no outputs but its final carry."""

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Nor inputs."""

    def restart(self) -> None:
        """Put everything back to what it was before the first runs."""
        for sources, states in zip(reversed(self.changes), reversed(self._before), strict=True):
            for source, state in zip(sources, states or (), strict=False):
                source.set(state)

    @contextmanager
    def _as_first(self, index: int) -> Iterator[None]:
        """A replay finds what the first run of its block found, and leaves no trace."""
        sources = self.changes[index]
        now = [source.get() for source in sources]
        for source, state in zip(sources, self._before[index] or (), strict=True):
            source.set(state)
        try:
            yield
        finally:
            for source, state in zip(sources, now, strict=True):
                source.set(state)

    def _compare(self, index: int, structure: Structure, leaves: Leaves) -> None:
        kinds = [kind_of(leaf) for leaf in leaves]
        if self._kinds[index] is None:
            self._kinds[index] = kinds
        for place, (kind, wanted) in enumerate(zip(kinds, self._kinds[index], strict=True)):
            if kind != wanted:
                raise StepError(
                    f"a replay of block {index} returned {structure.paths()[place] or 'a value'} as {described(kind)} "
                    f"instead of {described(wanted)}: it reads something that has changed since its first run"
                )
        if self._fingerprints is None:
            return
        found = list(map(fingerprint, leaves))
        wanted = self._fingerprints[index]
        if wanted is None:
            self._fingerprints[index] = found
        elif found != wanted:
            place = next(place for place, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise StepError(
                f"a replay of block {index} gives another {structure.paths()[place] or 'value'} than its first run; it "
                "is not deterministic: it reads something that has changed meanwhile, or uses a kernel that is not"
            )
