"""Blocks of a chain: what each is, what it uses and may change; and all of them as stages for the interpreter.

A call of a chain has to know its blocks again each time, at a cost that is small beside running them. Most are modules
that hold nothing but parameters, buffers and plain settings; a quick walk says all about those. Everything else is
walked through as a step of `scan` is (`captures.reach`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch

from .ambient import Source
from .captures import ATOMS, Reached, installed, methods_of, moving, named_globals, reach
from .errors import StepError
from .loops import described, fingerprint, kind_of
from .mutable import mutable_sources, tensor_source, tensors_source
from .trees import Leaves, Mismatch, Structure

_PRIVATE: Final = frozenset(inspect.get_annotations(torch.nn.Module)) | {"training"}


class Block:
    """One block, as it is now.

    Attributes:
        function: what is called.
        tensors: all that it can reach, each once.
        devices: where those are.
        key: equal for blocks that do and cost the same on the same carry.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        seen = _plain(function)
        self._buffers: list[torch.Tensor] | None = None
        if seen is not None:
            self.tensors, self._buffers, settings = seen
        else:
            self.tensors = self.reached.tensors
            settings = (*self.reached.codes, *self.reached.settings)
        self.captured = [tensor for tensor in self.tensors if tensor.requires_grad]
        likes = [*map(_like, self.tensors)]
        self.devices = {like[2] for like in likes}
        self.key: Hashable = (settings, *likes)

    @cached_property
    def reached(self) -> Reached:
        """All that the block can reach."""
        return reach(self.function)

    @property
    def name(self) -> str:
        """What to call it."""
        return getattr(self.function, "__name__", None) or type(self.function).__name__

    @property
    def plain(self) -> bool:
        """Whether it is a module that holds nothing but tensors and settings."""
        return self._buffers is not None

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
        if self._buffers is not None and all(number < len(self._buffers) for number in numbers):
            return [tensors_source([self._buffers[number] for number in numbers])] if numbers else []
        sources = self.sources()
        return [sources[number] for number in numbers]


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor decides about costs; a gradient that exists already need not be made."""
    made = tensor.requires_grad and tensor.is_leaf and tensor.grad is not None
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, made, type(tensor)


# ---- the quick walk


def _plain(function: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], Hashable] | None:
    """Tensors, buffers and settings of a module that holds nothing else; None if it does."""
    if not isinstance(function, torch.nn.Module):
        return None
    tensors: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    settings: list[Any] = []
    numbers: dict[int, int] = {}  # of modules and tensors, so that tied ones look so
    queue = [function]
    while queue:
        module = queue.pop()
        fresh = len(numbers)
        known = numbers.setdefault(id(module), fresh)
        settings.append(known)
        if known < fresh:
            continue
        values = vars(module)
        if not _settings(module, values, settings):
            return None
        parameters, own, children = values["_parameters"], values["_buffers"], values["_modules"]
        for group in (parameters, own):
            for tensor in group.values():
                fresh = len(numbers)
                known = -1 if tensor is None else numbers.setdefault(id(tensor), fresh)
                settings.append(known)
                if known == fresh:
                    tensors.append(tensor)
                    if group is own and not tensor.requires_grad:
                        buffers.append(tensor)
        if children:
            queue.extend(child for child in children.values() if child is not None)
    return tensors, buffers, tuple(settings)


class _Own(NamedTuple):
    """A type's own attributes, as found on one of its modules: plain ones, taken all at once, and others."""

    plain: Callable[[dict[str, Any]], Any]
    others: tuple[str, ...]
    names: frozenset[str]


_own: dict[tuple[type, int, int], _Own] = {}


def _own_of(kind: type, values: dict[str, Any]) -> _Own:
    found = _own.get((kind, len(values), len(moving)))
    if found is None or not found.names <= values.keys():
        names = [name for name in values if name not in _PRIVATE and (kind, name) not in moving]
        plain = [name for name in names if type(values[name]) in _DIRECT]
        others = tuple(name for name in names if name not in plain)
        found = _own[kind, len(values), len(moving)] = _Own(
            itemgetter("training", "training", *plain), others, frozenset(names)
        )
    return found


def _settings(module: torch.nn.Module, values: dict[str, Any], settings: list[Any]) -> bool:
    """Add the module's type and plain attributes; False if it has others, or hooks."""
    kind: Any = type(module)
    if values["_forward_hooks"] or values["_forward_pre_hooks"]:
        return False
    if values["_backward_hooks"] or values["_backward_pre_hooks"]:
        return False
    library = kind.__module__.startswith("torch.nn.modules")
    if not library and not _plain_class(kind):
        return False
    own = _own_of(kind, values)
    plain = own.plain(values)
    if not _DIRECT.issuperset(map(type, plain)):
        del _own[kind, len(values), len(moving)]  # they have other types now
        return _settings(module, values, settings)
    settings.append(kind)
    settings.append(plain)
    for name in own.others:
        value = values[name]
        sort = type(value)
        if sort in _DIRECT:
            settings.append(value)
        elif sort is float:
            settings.append(value != 0)  # it matters at most whether it is 0
        elif (sort is tuple or (library and sort is list)) and _DIRECT.issuperset(map(type, value)):
            settings.append(tuple(value))
        else:
            return False
    return True


_DIRECT: Final = frozenset({int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


_plain_classes: dict[type, bool] = {}


def _plain_class(kind: type) -> bool:
    """Whether the methods of a class reach nothing but functions, types and libraries."""
    known = _plain_classes.get(kind)
    if known is None:
        functions, seen = list(methods_of(kind)), set[Any]()
        known = True
        while functions and known:
            function = functions.pop()
            if function in seen or not isinstance(function, types.FunctionType):
                known = known and not isinstance(function, torch.Tensor)
                continue
            seen.add(function)
            known = all(isinstance(cell.cell_contents, type) for cell in function.__closure__ or ())
            if not installed(function.__module__):
                for name in named_globals(function.__code__) & function.__globals__.keys():
                    value = function.__globals__[name]
                    if isinstance(value, types.FunctionType):
                        functions.append(value)
                    elif isinstance(value, types.ModuleType):
                        known = known and installed(value.__name__)
                    else:
                        known = known and isinstance(value, (*ATOMS, type, types.BuiltinFunctionType))
                known = known and not named_globals(function.__code__, assigned=True)
        _plain_classes[kind] = known
    return known


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
