"""Pytrees: nested tuples, lists, dicts, named tuples, dataclasses and whatever is registered with PyTorch.

A `Structure` is read off one value and then takes others of the same structure apart and puts leaves together again.
Tensors, None and every other object are leaves. It stands in the inner loop of every step, hence the fast paths.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

Leaves = list[Any]


class Structure:
    """The shape of a pytree: `flatten` takes a value apart, `build` puts leaves together."""

    __slots__ = ("_bare", "_flat_tuple", "_node", "count")

    def __init__(self, example: Any) -> None:
        self._node = _read(example)
        self.count = self._node.count
        self._bare = isinstance(self._node, _Leaf)
        node = self._node
        self._flat_tuple = (
            isinstance(node, _Sequence) and node.kind is tuple and all(isinstance(c, _Leaf) for c in node.children)
        )

    def flatten(self, value: Any) -> Leaves:
        """The leaves of `value`, left to right.

        Raises:
            Mismatch: `value` has another structure; the message says where.
        """
        if self._bare and (type(value) is torch.Tensor or value is None):
            return [value]
        if self._flat_tuple and type(value) is tuple and len(value) == self.count:
            for leaf in value:
                if type(leaf) is not torch.Tensor:
                    break
            else:
                return list(value)
        leaves: Leaves = []
        self._node.flatten(value, leaves, "")
        return leaves

    def build(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves."""
        if self._bare:
            return leaves[0]
        if self._flat_tuple:
            return tuple(leaves)
        return self._node.build(iter(leaves))

    def paths(self) -> list[str]:
        """A name for every leaf, as Python would reach it: "", "[0]", "['h'].c"."""
        return list(self._node.paths(""))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._node == other._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return f"Structure({self._node.build(iter(['*'] * self.count))!r})"


def leaves_of(value: Any) -> Leaves:
    """The leaves of a value, left to right."""
    return Structure(value).flatten(value)


class Mismatch(ValueError):
    """A value does not have the structure it should have."""


def _mismatch(path: str, wanted: str, value: Any) -> Mismatch:
    return Mismatch(f"{_where(path)} it should be {wanted}, not a {type(value).__name__}")


def _where(path: str) -> str:
    return f"at {path}" if path else "at its top"


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    count: int = 1

    def flatten(self, value: Any, leaves: Leaves, path: str) -> None:
        if type(value) is not torch.Tensor and not isinstance(_read(value), _Leaf):
            raise _mismatch(path, "a tensor or a plain value", value)
        leaves.append(value)

    def build(self, leaves: Iterator[Any]) -> Any:
        return next(leaves)

    def paths(self, path: str) -> Iterator[str]:
        yield path


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    """Tuples, lists and named tuples."""

    kind: Any  # the type
    children: tuple[_Node, ...]
    count: int

    def flatten(self, value: Any, leaves: Leaves, path: str) -> None:
        if type(value) is not self.kind or len(value) != len(self.children):
            size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
            wanted = f"a {self.kind.__name__} of {len(self.children)}"
            raise Mismatch(f"{_where(path)} it should be {wanted}, not a {type(value).__name__}{size}")
        for index, (child, part) in enumerate(zip(self.children, value, strict=True)):
            child.flatten(part, leaves, f"{path}[{index}]")

    def build(self, leaves: Iterator[Any]) -> Any:
        parts = [child.build(leaves) for child in self.children]
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)

    def paths(self, path: str) -> Iterator[str]:
        for index, child in enumerate(self.children):
            yield from child.paths(f"{path}[{index}]")


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    """Dicts and their kin, and dataclasses: named parts."""

    kind: Any  # the type
    keys: tuple[Any, ...]
    children: tuple[_Node, ...]
    count: int
    fields: bool  # of a dataclass

    def _part(self, value: Any, key: Any) -> Any:
        return getattr(value, key) if self.fields else value[key]

    def _path(self, path: str, key: Any) -> str:
        return f"{path}.{key}" if self.fields else f"{path}[{key!r}]"

    def flatten(self, value: Any, leaves: Leaves, path: str) -> None:
        if type(value) is not self.kind:
            raise _mismatch(path, f"a {self.kind.__name__}", value)
        if not self.fields and value.keys() != set(self.keys):
            keys = sorted(map(repr, self.keys))
            raise Mismatch(
                f"{_where(path)} it should have the keys {', '.join(keys)}, not {', '.join(sorted(map(repr, value)))}"
            )
        for key, child in zip(self.keys, self.children, strict=True):
            child.flatten(self._part(value, key), leaves, self._path(path, key))

    def build(self, leaves: Iterator[Any]) -> Any:
        parts = {key: child.build(leaves) for key, child in zip(self.keys, self.children, strict=True)}
        if not self.fields:
            return parts if self.kind is dict else self.kind(parts)
        value: Any = object.__new__(self.kind)  # as it was, whatever __init__ and __post_init__ would make of it
        for key, part in parts.items():
            object.__setattr__(value, key, part)
        return value

    def paths(self, path: str) -> Iterator[str]:
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(self._path(path, key))


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    """A type that PyTorch's own registry knows."""

    kind: Any  # the type
    context: Any
    children: tuple[_Node, ...]
    count: int

    def flatten(self, value: Any, leaves: Leaves, path: str) -> None:
        if type(value) is not self.kind:
            raise _mismatch(path, f"a {self.kind.__name__}", value)
        parts, context = _pytree.SUPPORTED_NODES[self.kind].flatten_fn(value)
        if context != self.context or len(parts) != len(self.children):
            raise _mismatch(path, f"a {self.kind.__name__} of the same structure", value)
        for index, (child, part) in enumerate(zip(self.children, parts, strict=True)):
            child.flatten(part, leaves, f"{path}.<{index}>")

    def build(self, leaves: Iterator[Any]) -> Any:
        parts = [child.build(leaves) for child in self.children]
        return _pytree.SUPPORTED_NODES[self.kind].unflatten_fn(parts, self.context)

    def paths(self, path: str) -> Iterator[str]:
        for index, child in enumerate(self.children):
            yield from child.paths(f"{path}.<{index}>")


_Node = _Leaf | _Sequence | _Mapping | _Registered
_LEAF = _Leaf()


def _read(value: Any) -> _Node:
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        return _LEAF
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return _with_count(lambda n, c: _Sequence(kind, c, n), map(_read, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _named(kind, tuple(field.name for field in dataclasses.fields(value)), vars_of=value, fields=True)
    if kind in (dict, OrderedDict):
        return _named(kind, tuple(value), vars_of=value, fields=False)
    if kind in _pytree.SUPPORTED_NODES:
        parts, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return _with_count(lambda n, c: _Registered(kind, context, c, n), map(_read, parts))
    return _LEAF


def _named(kind: Any, keys: tuple[Any, ...], *, vars_of: Any, fields: bool) -> _Node:
    parts = (getattr(vars_of, key) if fields else vars_of[key] for key in keys)
    return _with_count(lambda n, c: _Mapping(kind, keys, c, n, fields), map(_read, parts))


def _with_count(make: Callable[[int, tuple[_Node, ...]], _Node], children: Iterator[_Node]) -> _Node:
    parts = tuple(children)
    return make(sum(part.count for part in parts), parts)
