"""Tensors that a step keeps outside of its carry, and through which gradients flow: they become part of it.

A spiking neuron that stores its membrane in itself, a cell with `self.state`, a variable around a function: in the
plain loop such a tensor leads from one step to the next as a carry does. So scan makes it one. Each `Place` is filled
from the carry before a step and emptied after it, so that no graph outlives its range, and after the loop it is left
with what the plain loop leaves there: the last step's tensor, with its history.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from .bindings import UNBOUND, content_of
from .captures import Reached
from .trees import Leaves, Structure

_AWAY: Final = object()  # stands in a place whose tensor is in the carry
_REMEMBERED: Final = 256
_known: dict[Hashable, tuple[tuple[int, Any], ...]] = {}  # places by what the step does, as (holder's number, key)


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where a step keeps a tensor: an item of a dictionary or list, an attribute, a variable around a function.

    Attributes:
        holder: the dictionary, list, object or function.
        key: the key, index or name.
    """

    holder: Any
    key: Any

    @property
    def name(self) -> str:
        """What to call it."""
        kind = "variable" if isinstance(self.holder, types.FunctionType) else type(self.holder).__name__
        return f"{kind}.{self.key}"

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for places that are the same: functions share variables."""
        where = self._where()
        return (id(where), None) if isinstance(where, types.CellType) else (id(where), self.key)

    def _where(self) -> Any:
        holder = self.holder
        if isinstance(holder, dict | list):
            return holder
        if not isinstance(holder, types.FunctionType):
            return vars(holder)
        names = holder.__code__.co_freevars
        return (holder.__closure__ or ())[names.index(self.key)] if self.key in names else holder.__globals__

    def get(self) -> Any:
        """What is there; `UNBOUND` if nothing."""
        where = self._where()
        if isinstance(where, types.CellType):
            return content_of(where)
        if isinstance(where, list):
            return where[self.key] if self.key < len(where) else UNBOUND
        return where.get(self.key, UNBOUND)

    def put(self, value: Any) -> None:
        """Put something there, or nothing if it is `UNBOUND`."""
        where = self._where()
        if isinstance(where, types.CellType):
            if value is not UNBOUND:
                where.cell_contents = value
            elif content_of(where) is not UNBOUND:
                del where.cell_contents
        elif value is not UNBOUND:
            where[self.key] = value
        elif isinstance(where, dict):
            where.pop(self.key, None)

    def take(self) -> Any:
        """What is there, leaving the place empty."""
        value = self.get()
        if value is not UNBOUND:
            self.put(_AWAY)
        return value


# ---- what is known of steps like this one


def known_places(reached: Reached) -> tuple[Place, ...]:
    """The places in which steps of the same code were seen to keep tensors."""
    holders = _holders(reached)
    found = [(holders[number], key) for number, key in _known.get(tuple(reached.codes), ()) if number < len(holders)]
    return unique(Place(holder, key) for holder, key in found if _has_place(holder, key))


def remember(reached: Reached, places: Iterable[Place]) -> None:
    """Let the next call start with these places."""
    number_of = {id(holder): number for number, holder in enumerate(_holders(reached))}
    numbers = tuple((number_of[id(p.holder)], p.key) for p in places if id(p.holder) in number_of)
    while len(_known) >= _REMEMBERED:
        _known.pop(next(iter(_known)))
    _known[tuple(reached.codes)] = numbers


def unique(places: Iterable[Place]) -> tuple[Place, ...]:
    """Each place once."""
    return tuple({place.identity: place for place in places}.values())


def _holders(reached: Reached) -> list[Any]:
    return [value for value in reached.changeable if not isinstance(value, torch.Tensor)]


def _has_place(holder: Any, key: Any) -> bool:
    if isinstance(holder, types.FunctionType):
        return key in holder.__code__.co_freevars or key in holder.__globals__
    if isinstance(holder, list):
        return isinstance(key, int) and key < len(holder)
    return isinstance(holder, dict) or isinstance(getattr(holder, "__dict__", None), dict)


# ---- carrying


class Keeping(Structure):
    """The structure of a carry with the contents of places beside it: (carry, [content, ...])."""

    __slots__ = ("_base", "_names")

    def __init__(self, base: Structure, places: Sequence[Place]) -> None:
        self._base, self._names = base, [place.name for place in places]
        self.count = base.count + len(places)

    def flatten(self, value: Any) -> Leaves:
        return [*self._base.flatten(value[0]), *value[1]]

    def build(self, leaves: Sequence[Any]) -> Any:
        count = self._base.count
        return self._base.build(leaves[:count]), list(leaves[count:])

    def paths(self) -> list[str]:
        return [*self._base.paths(), *self._names]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keeping) and (self._base, self._names) == (other._base, other._names)

    def __hash__(self) -> int:
        return hash((self._base, *self._names))

    def __repr__(self) -> str:
        return f"{self._base!r} with {', '.join(self._names)}"


def keeping(step: Callable[[Any, Any], Any], places: Sequence[Place]) -> Callable[[Any, Any], Any]:
    """The step with its places as part of the carry: `((carry, contents), x) -> ((carry, contents), y)`."""

    def stepping(carried: Any, x: Any) -> Any:
        carry, contents = carried
        for place, content in zip(places, contents, strict=True):
            place.put(content)
        result = step(carry, x)
        if type(result) is not tuple or len(result) != 2:
            return result
        return (result[0], [place.take() for place in places]), result[1]

    return stepping


@contextmanager
def left_alone(places: Sequence[Place]) -> Iterator[None]:
    """Leave in the places what was there at entry."""
    contents = [place.get() for place in places]
    try:
        yield
    finally:
        for place, content in zip(places, contents, strict=True):
            place.put(content)


@contextmanager
def left_if_stopped(places: Sequence[Place], restarts: tuple[type[BaseException], ...]) -> Iterator[None]:
    """After an error, leave what the step left, and in places that are empty what was there at entry.

    Args:
        places: the places.
        restarts: errors after which the loop starts again, from what was there at entry.
    """
    contents = [place.get() for place in places]
    try:
        yield
    except BaseException as error:
        for place, content in zip(places, contents, strict=True):
            if isinstance(error, restarts) or place.get() is _AWAY:
                place.put(content)
        raise
