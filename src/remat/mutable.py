"""State outside the carry: buffers, attributes, lists, counters that a step changes as it runs.

A replay must find them as the first run did, and leave them as one forward leaves them. Everything that the step can
reach and that can change is a `Source`, like a random stream: its state can be read, set and compared, and those that
a step is seen to change have their state kept with every stored carry. Containers are copied shallowly; what is inside
is reached, and watched, by itself.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from .ambient import Source
from .bindings import UNBOUND, content_of
from .captures import Reached, moving, named_globals
from .errors import StepError
from .kept import Place


def mutable_sources(reached: Reached, places: Sequence[Place] = ()) -> tuple[Source, ...]:
    """The sources among what a step can reach, without what is in places that the carry fills."""
    return tuple(source for value in reached.changeable for source in _sources_of(value, places))


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


def _sources_of(value: Any, places: Sequence[Place]) -> Iterator[Source]:
    own = {place.key for place in places if place.holder is value}
    if isinstance(value, torch.Tensor):
        if all(place.get() is not value for place in places):
            yield tensor_source(value)
    elif isinstance(value, types.FunctionType):
        carried = {place.identity for place in places}
        if value.__closure__:
            yield _cells_source(value, carried)
        if assigned := sorted(named_globals(value.__code__, assigned=True)):
            yield _globals_source(value, [name for name in assigned if Place(value, name).identity not in carried])
    elif isinstance(value, list | deque):
        yield _sequence_source(value, own)
    elif isinstance(value, set):
        yield Source(
            "a set", lambda: frozenset(value), lambda kept: _refill_set(value, kept), _equal, kept=_kept_in_set
        )
    elif isinstance(value, dict):
        yield _items_source("a dict", value, value, own, owner=dict)
    elif isinstance(value, types.GeneratorType) or _is_iterator(value):
        yield Source(f"a {type(value).__name__}", lambda: _progress(value), _cannot_rewind, _equal)
    else:
        yield _items_source(f"an attribute of {type(value).__name__}", value, vars(value), own, owner=type(value))


def tensor_source(tensor: torch.Tensor) -> Source:
    """A tensor that a step changes in place: a buffer."""
    # `.data`, because putting a value back is no change that autograd should complain of: recorded graphs saw it.
    return Source(
        _shaped(tensor.shape),
        lambda: tensor.detach().clone(),
        lambda kept: tensor.data.copy_(kept),
        _same_tensor,
        # Batch normalisation changes its statistics without counting; but then the first step shows it.
        lambda: tensor._version,
    )


def tensors_source(tensors: Sequence[torch.Tensor]) -> Source:
    """Several strided buffers as one, where it is only a matter of putting them back: all of a dtype in one piece.

    A replay of a block takes and puts back its buffers; one by one, those of a few batch norms would take longer than
    the rest that there is to do around the block.
    """
    kinds: dict[Hashable, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    groups = list(kinds.values())

    def get() -> list[torch.Tensor]:
        return [torch.cat([tensor.detach().reshape(-1) for tensor in group]) for group in groups]

    def put(kept: Sequence[torch.Tensor]) -> None:
        for group, state in zip(groups, kept, strict=True):
            parts = torch.split(state, [tensor.numel() for tensor in group])
            pairs = zip(parts, group, strict=True)
            torch._foreach_copy_([tensor.data for tensor in group], [part.view(t.shape) for part, t in pairs])

    return Source("buffers", get, put, lambda a, b: all(map(_same_tensor, a, b)))


@functools.cache
def _shaped(shape: torch.Size) -> str:
    return f"a tensor of shape {list(shape)}"


def _items_source(name: str, holder: Any, items: dict[Any, Any], own: set[Any], owner: Any) -> Source:
    """A dictionary, or the attributes of an object, without its own keys that are carried."""
    return Source(
        name,
        (lambda: {key: item for key, item in items.items() if key not in own}) if own else lambda: dict(items),
        lambda kept: _refill_dict(items, kept, own),
        _same_values,
        owner=owner,
        kept=lambda before, after: _kept_in_items(name, holder, before, after),
    )


def _sequence_source(items: list[Any] | deque[Any], own: set[int]) -> Source:
    name = f"a {type(items).__name__}"
    return Source(
        name,
        (lambda: tuple(UNBOUND if n in own else item for n, item in enumerate(items))) if own else lambda: tuple(items),
        lambda kept: _refill(items, [items[n] if n in own else item for n, item in enumerate(kept)] if own else kept),
        _same_items,
        kept=lambda before, after: _kept_in_sequence(name, items, before, after),
    )


def _cells_source(function: types.FunctionType, carried: set[Any]) -> Source:
    cells = {
        name: cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if Place(function, name).identity not in carried
    }

    def put(kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            if content_of(cells[name]) is not value:
                Place(function, name).put(value)

    name = f"a variable around {function.__name__}"
    return Source(
        name,
        lambda: {name: content_of(cell) for name, cell in cells.items()},
        put,
        _same_values,
        owner=function.__code__,
        kept=lambda before, after: _kept_in_items(name, function, before, after),
    )


def _globals_source(function: types.FunctionType, names: list[str]) -> Source:
    where = function.__globals__
    name = f"the global {', '.join(names)}"
    return Source(
        name,
        lambda: {name: where[name] for name in names if name in where},
        lambda kept: _update(where, kept),
        _same_values,
        owner=function.__code__,
        kept=lambda before, after: _kept_in_items(name, function, before, after),
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


def _refill(container: list[Any] | deque[Any], kept: Sequence[Any]) -> None:
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


def _refill_dict(container: dict[Any, Any], kept: dict[Any, Any], own: set[Any]) -> None:
    if [key for key in container if key not in own] != list(kept):  # the order of keys belongs to a dictionary's state
        carried = {key: item for key, item in container.items() if key in own}
        container.clear()
        container.update(carried)
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


# ---- tensors with gradients that a step puts beside its carry


def _kept_in_items(name: str, holder: Any, before: dict[Any, Any], after: dict[Any, Any]) -> list[Place]:
    known = {id(value) for value in before.values()}
    news = {key: value for key, value in after.items() if id(value) not in known}
    return [Place(holder, key) for key, value in news.items() if _needs_a_place(name, value)]


def _kept_in_sequence(name: str, holder: Any, before: tuple[Any, ...], after: tuple[Any, ...]) -> list[Place]:
    known = {id(value) for value in before}
    numbers = [n for n, value in enumerate(after) if id(value) not in known and _needs_a_place(name, value)]
    if numbers and (len(before) != len(after) or not isinstance(holder, list)):
        raise _gradients_beside_the_carry(name)
    return [Place(holder, number) for number in numbers]


def _kept_in_set(before: frozenset[Any], after: frozenset[Any]) -> list[Place]:
    if any(_needs_a_place("a set", value) for value in after - before):
        raise _gradients_beside_the_carry("a set")
    return []


def _needs_a_place(name: str, value: Any) -> bool:
    """Whether gradients flow through what a step has put somewhere.

    Raises:
        StepError: it could change unseen.
    """
    if isinstance(value, list | dict | set | deque):
        raise StepError(
            f"the step puts a new {type(value).__name__} into {name}, whose mutations a replay could not "
            "follow; make it part of the carry, or create it before the loop"
        )
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def _gradients_beside_the_carry(name: str) -> StepError:
    return StepError(
        f"the step keeps ever more tensors that need a gradient in {name}, and gradients cannot follow them there; "
        "make what is mutated part of the carry, keep value.detach(), or return them as outputs"
    )
