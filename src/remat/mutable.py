"""State outside the carry: buffers, attributes, lists, counters that a step changes as it runs.

A replay must find them as the first run did, and leave them as one forward leaves them. Everything that the step can
reach and that can change is a `Source`, like a random stream: its state can be read, set and compared, and those that
a step is seen to change have their state kept with every stored carry. Containers are copied shallowly; what is inside
is reached, and watched, by itself.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .ambient import Source
from .captures import UNBOUND, Reached, content_of, moving, named_globals
from .errors import StepError


def mutable_sources(reached: Reached) -> tuple[Source, ...]:
    """The sources among what a step can reach."""
    return tuple(source for value in reached.changeable for source in _sources_of(value))


def refuse_changes(tensors: list[torch.Tensor], versions: list[int]) -> None:
    """Tensors that a step can reach, and that are neither carry nor buffers, must stay as they are.

    Raises:
        StepError: one was changed in place.
    """
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise StepError(
                f"the step changes a tensor of shape {list(tensor.shape)} in place, neither part of its carry nor "
                "a buffer of a module, so a replay would meet a mutated value; put it into the carry"
            )


def _sources_of(value: Any) -> Iterator[Source]:
    if isinstance(value, torch.Tensor):
        yield _tensor_source(value)
    elif isinstance(value, types.FunctionType):
        if value.__closure__:
            yield _cells_source(value)
        if assigned := sorted(named_globals(value.__code__, assigned=True)):
            yield _globals_source(value, assigned)
    elif isinstance(value, list | deque):
        yield Source(f"a {type(value).__name__}", lambda: tuple(value), lambda kept: _refill(value, kept), _same_items)
    elif isinstance(value, set):
        yield Source("a set", lambda: frozenset(value), lambda kept: _refill_set(value, kept), _equal)
    elif isinstance(value, dict):
        yield Source("a dict", lambda: dict(value), lambda kept: _refill_dict(value, kept), _same_values, owner=dict)
    elif isinstance(value, types.GeneratorType) or _is_iterator(value):
        yield Source(f"a {type(value).__name__}", lambda: _progress(value), _cannot_rewind, _equal)
    else:
        name = f"an attribute of {type(value).__name__}"
        attributes = vars(value)
        yield Source(
            name,
            lambda: dict(attributes),
            lambda kept: _refill_dict(attributes, kept),
            _same_values,
            owner=type(value),
        )


def _tensor_source(tensor: torch.Tensor) -> Source:
    # `.data`, because putting a value back is no change that autograd should complain of: recorded graphs saw it.
    return Source(
        f"a tensor of shape {list(tensor.shape)}",
        lambda: tensor.detach().clone(),
        lambda kept: tensor.data.copy_(kept),
        _same_tensor,
        # Batch normalisation changes its statistics without counting; but then the first step shows it.
        lambda: tensor._version,
    )


def _cells_source(function: types.FunctionType) -> Source:
    cells = function.__closure__ or ()

    def get() -> tuple[Any, ...]:
        return tuple(content_of(cell) for cell in cells)

    def put(kept: tuple[Any, ...]) -> None:
        for cell, value in zip(cells, kept, strict=True):
            if value is UNBOUND:
                del cell.cell_contents
            else:
                cell.cell_contents = value

    return Source(f"a variable around {function.__name__}", get, put, _same_items, owner=function.__code__)


def _globals_source(function: types.FunctionType, names: list[str]) -> Source:
    where = function.__globals__
    return Source(
        f"the global {', '.join(names)}",
        lambda: {name: where[name] for name in names if name in where},
        lambda kept: _update(where, kept),
        _same_values,
        owner=function.__code__,
    )


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__length_hint__") and hasattr(value, "__next__")


def _progress(iterator: Any) -> Any:
    if not isinstance(iterator, types.GeneratorType):
        return iterator.__length_hint__()
    frame = iterator.gi_frame
    return frame and (frame.f_lasti, tuple((name, id(value)) for name, value in frame.f_locals.items()))


def _cannot_rewind(_: Any) -> None:
    raise StepError(
        "the step takes items from an iterator, which cannot be rewound for a replay; pass them as xs, or let the step "
        "index a list"
    )


# Only what differs is put back: other threads may be reading the rest, a module's attributes for instance.


def _refill(container: list[Any] | deque[Any], kept: tuple[Any, ...]) -> None:
    if _same_objects(container, kept):
        return
    if isinstance(container, list):
        container[:] = kept
    else:
        container.clear()
        container.extend(kept)


def _refill_set(container: set[Any], kept: frozenset[Any]) -> None:
    if container != kept:
        container.clear()
        container.update(kept)


def _refill_dict(container: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if list(container) != list(kept):  # the order of the keys belongs to a dictionary's state
        container.clear()
    _update(container, kept)


def _update(container: dict[Any, Any], kept: dict[Any, Any]) -> None:
    for key, value in kept.items():
        if container.get(key, UNBOUND) is not value:
            container[key] = value


def _same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _same_items(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _same_values(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) in _VALUES and type(b) is type(a) and a == b)


_VALUES = frozenset({int, float, complex, bool, str, bytes})


def note_moving(source: Source, before: Any, after: Any) -> None:
    """Remember which plain values a step changes, so that they do not make it look like another step next time."""
    if isinstance(after, dict):
        names = [name for name, value in after.items() if name not in before or not _same(value, before[name])]
        moving.update((source.owner, name) for name in names)
    elif isinstance(source.owner, types.CodeType):
        pairs = zip(source.owner.co_freevars, before, after, strict=True)
        moving.update((source.owner, name) for name, old, new in pairs if not _same(old, new))


def refuse_hidden_gradients(source: Source, before: Any, after: Any) -> None:
    """A step may change state outside its carry, but gradients must not flow through it.

    Raises:
        StepError: what was put there has a gradient, or could change unseen.
    """
    for value in _news(before, after):
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise StepError(
                f"the step keeps a tensor that needs a gradient outside of its carry, in {source.name}, and gradients "
                "cannot follow it there; make what is mutated part of the carry, or keep value.detach()"
            )
        if isinstance(value, list | dict | set | deque):
            raise StepError(
                f"the step puts a new {type(value).__name__} into {source.name}, whose mutations a replay could not "
                "follow; make it part of the carry, or create it before the loop"
            )


def _news(before: Any, after: Any) -> Iterator[Any]:
    if isinstance(after, torch.Tensor):
        return
    if isinstance(after, dict | tuple | frozenset):
        known = {id(value) for value in _values(before)}
        yield from (value for value in _values(after) if id(value) not in known)


def _values(kept: dict[Any, Any] | tuple[Any, ...] | frozenset[Any]) -> Iterable[Any]:
    return kept.values() if isinstance(kept, dict) else kept
