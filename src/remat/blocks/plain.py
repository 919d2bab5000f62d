"""The quick walk: what a block can reach that is a module of nothing but parameters, buffers and plain settings.

Settings may lie in objects that hold nothing else, as configurations do, and be functions of installed packages.

What it found is remembered with the module. In later calls a look suffices that tells whether anything has changed
since: types, hooks, settings, which tensors are held, and of tensors what decides about costs.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from copy import deepcopy
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch

from ..bindings import Binding, bindings_of
from ..captures import ATOMS, HOOKS, installed, methods_of, moving, named_globals, refuse_lazy

_PRIVATE: Final = frozenset(inspect.get_annotations(torch.nn.Module)) | {"training"}


class _Key:
    """A long tuple whose hash is remembered, and which is one object for all that are equal."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._hash == other._hash and self.value == other.value)


_MOST_KEYS: Final = 4096
_keys: dict[_Key, _Key] = {}


def _one(value: tuple[Any, ...]) -> _Key:
    key = _Key(value)
    if len(_keys) >= _MOST_KEYS:
        _keys.clear()
    return _keys.setdefault(key, key)


_traits = attrgetter("shape", "dtype", "device", "requires_grad", "is_leaf")


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor decides about costs; a gradient that exists already need not be made."""
    made = tensor.requires_grad and tensor.is_leaf and tensor.grad is not None
    return *_traits(tensor), made, type(tensor)


class _Visited:
    """A module as it was found, to tell whether it is as it was; the first of a walk is not kept alive."""

    __slots__ = ("_inside", "_kind", "_module", "_others", "_own", "_plain")

    def __init__(self, module: torch.nn.Module | None, own: _Own, values: dict[str, Any]) -> None:
        self._module, self._own, self._kind = module, own, own.kind
        self._plain, self._others = own.plain(values), deepcopy(own.inside(values))
        self._inside = _inside(values)

    def same(self, first: torch.nn.Module) -> bool:
        """Whether it is as it was; `first` is the first of the walk."""
        module, own = self._module or first, self._own
        values = module.__dict__
        return (
            type(module) is self._kind
            and len(values) == own.size
            and not any(_hooks(values))
            and own.plain(values) == self._plain
            and (not own.others or _equal(own.inside(values), self._others))
            and _inside(values) == self._inside
        )


def _equal(one: list[Any], other: list[Any]) -> bool:
    """Whether settings are equal; what is no setting any more may not even compare."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False


_hooks = itemgetter(*HOOKS)
_held = itemgetter("_parameters", "_buffers", "_modules")


def _inside(values: dict[str, Any]) -> list[int]:
    """What tells a module's parameters, buffers and children from others."""
    return [id(item) for group in _held(values) if group for item in group.values()]


class Seen:
    """What the quick walk has seen of a module.

    Attributes:
        tensors, buffers: each once.
        captured: those of the tensors that need a gradient.
        devices: where the tensors are.
        key: see `Block`.
        bindings: what names in it stand for.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        buffers: list[torch.Tensor],
        settings: Hashable,
        visited: list[_Visited],
        bindings: list[Binding],
    ) -> None:
        self.tensors, self.buffers, self._visited, self.bindings = tensors, buffers, visited, bindings
        self.captured = [tensor for tensor in tensors if tensor.requires_grad]
        self._likes = [*map(_like, tensors)]
        self.devices = {like[2] for like in self._likes}
        self.key: Hashable = _one((settings, *self._likes))

    def still(self, module: torch.nn.Module) -> bool:
        """Whether a second walk from that module would see the same."""
        return all(visited.same(module) for visited in self._visited) and self._likes == [*map(_like, self.tensors)]


class Around(torch.nn.Module):
    """A module that only calls another, in a way that a value says all about.

    Attributes:
        block: the other.
        manner: how it is called; None if no value tells.
    """

    block: torch.nn.Module
    manner: Hashable | None


_seen: dict[int, tuple[weakref.ref[torch.nn.Module], Seen]] = {}  # by id of the module


def plain(function: Any) -> Seen | None:
    """What there is of a module that holds nothing but tensors and settings; None if it holds more."""
    if not isinstance(function, torch.nn.Module):
        return None
    if isinstance(function, Around):
        inner = plain(function.block) if function.manner is not None else None
        return inner and Seen(
            inner.tensors, inner.buffers, (type(function), function.manner, inner.key), [], inner.bindings
        )
    number = id(function)
    before = _seen.get(number)
    if before is not None and before[0]() is function and before[1].still(function):
        return before[1]
    found = _walked(function)
    if found is not None:
        _seen[number] = (weakref.ref(function, lambda _: _seen.pop(number, None)), found)
    return found


def _walked(function: torch.nn.Module) -> Seen | None:
    tensors: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    settings: list[Any] = []
    visited: list[_Visited] = []
    bindings: list[Binding] = []
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
        own = _settings(module, values, settings)
        if own is None:
            return None
        visited.append(_Visited(module if visited else None, own, values))
        parameters, its, children = values["_parameters"], values["_buffers"], values["_modules"]
        for group in (parameters, its):
            for tensor in group.values():
                fresh = len(numbers)
                known = -1 if tensor is None else numbers.setdefault(id(tensor), fresh)
                settings.append(known)
                if known == fresh:
                    refuse_lazy(tensor)
                    tensors.append(tensor)
                    if group is its and not tensor.requires_grad:
                        buffers.append(tensor)
        bindings.extend(Binding(values, name, values[name]) for name in ("training", *own.names))
        bindings.extend(binding for group in (parameters, its, children) for binding in bindings_of(group))
        if children:
            queue.extend(child for child in children.values() if child is not None)
    return Seen(tensors, buffers, tuple(settings), visited, bindings)


class _Own(NamedTuple):
    """A type's own attributes, as found on one of its modules: plain ones, taken all at once, and others."""

    kind: type
    size: int
    plain: Callable[[dict[str, Any]], Any]
    others: tuple[str, ...]
    names: frozenset[str]

    def inside(self, values: dict[str, Any]) -> list[Any]:
        """The others, objects of settings as what they hold now."""
        return [vars(value) if type(value := values[name]) in _holders else value for name in self.others]


_own: dict[tuple[type, int, int], _Own] = {}


def _own_of(kind: type, values: dict[str, Any]) -> _Own:
    found = _own.get((kind, len(values), len(moving)))
    if found is None or not found.names <= values.keys():
        names = [name for name in values if name not in _PRIVATE and (kind, name) not in moving]
        plain = [name for name in names if type(values[name]) in _DIRECT]
        others = tuple(name for name in names if name not in plain)
        found = _own[kind, len(values), len(moving)] = _Own(
            kind, len(values), itemgetter("training", "training", *plain), others, frozenset(names)
        )
    return found


def _settings(module: torch.nn.Module, values: dict[str, Any], settings: list[Any]) -> _Own | None:
    """Add the module's type and plain attributes; None if it has others, or hooks."""
    kind: Any = type(module)
    if any(_hooks(values)):
        return None
    library = kind.__module__.startswith("torch.nn.modules")
    if not library and not _plain_class(kind):
        return None
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
        if sort is float:
            settings.append(value != 0)  # it matters at most whether it is 0
            continue
        setting = _setting(value, lists=installed(kind.__module__))
        if setting is None:
            return None
        settings.append(setting)
    return own


_DIRECT: Final = frozenset({int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


_holders: set[type] = set()  # of settings: objects that hold nothing else


def _setting(value: Any, *, lists: bool = True) -> Hashable | None:
    """A value that is equal for equal settings; None if there is more to it, or it is a list and lists are none."""
    sort = type(value)
    if sort in _DIRECT or sort is float:
        return sort, value
    if sort in (tuple, set, frozenset) or (lists and sort is list):
        parts = [_setting(item) for item in value]
        return None if None in parts else (sort, tuple(parts) if sort in (tuple, list) else frozenset(parts))
    if sort is dict and lists:
        parts = [_setting(item) for item in (*value, *value.values())]
        return None if None in parts else (sort, tuple(parts))
    if sort is types.FunctionType:
        return value if installed(value.__module__) and not value.__closure__ and not vars(value) else None
    if not installed(sort.__module__) or not hasattr(value, "__dict__") or not _holds_settings(value):
        return None
    held = _setting(vars(value))
    if held is not None:
        _holders.add(sort)
    return held and (sort, held)


def _holds_settings(value: Any) -> bool:
    """Whether an object is no more than its attributes say: never called, without data of C's."""
    return not isinstance(value, torch.nn.Module | torch.Tensor | type | types.ModuleType) and (
        type(value).__basicsize__ <= object.__basicsize__ + _POINTERS and not callable(value)
    )


_POINTERS: Final = 16  # bytes of a `__dict__` and of weak references
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
