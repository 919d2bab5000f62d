"""What names stand for in a step or block: its variables, attributes and parameters, as they were in the first run.

A replay may come after `model.eval()`, after a loop around has moved its variable on, or after `functional_call` has
put a module's own parameters back. What it reads then is what the first run read, and all is as it was afterwards.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch.nn.utils import parametrize

UNBOUND = object()
LOOKED_AT = 256  # items of a container that are no tensors or modules


class Binding(NamedTuple):
    """A name and what it stands for.

    Attributes:
        holder: a variable of an enclosing function, or a dictionary: attributes, globals, parameters of a module.
        key: where in the dictionary.
        value: what is there.
    """

    holder: Any
    key: Any
    value: Any

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for bindings of the same name: functions share variables."""
        return id(self.holder), self.key

    def now(self) -> Any:
        """What the name stands for now."""
        return (
            content_of(self.holder) if isinstance(self.holder, types.CellType) else self.holder.get(self.key, UNBOUND)
        )

    def bind(self, value: Any) -> None:
        """Let it stand for something."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif value is UNBOUND:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


def content_of(cell: types.CellType) -> Any:
    """What a variable around a function holds."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not bound yet
        return UNBOUND


def bindings_of(value: Any, global_names: Iterable[str] = ()) -> Iterator[Binding]:
    """The names directly in a function, a dictionary or an object."""
    if isinstance(value, types.FunctionType):
        yield from (Binding(cell, None, content_of(cell)) for cell in value.__closure__ or ())
        yield from (Binding(value.__globals__, name, value.__globals__[name]) for name in global_names)
    elif isinstance(value, dict):
        yield from (
            Binding(value, key, item)
            for number, (key, item) in enumerate(value.items())
            if number < LOOKED_AT or isinstance(item, torch.Tensor | torch.nn.Module)
        )
    elif isinstance(value, torch.nn.Module):
        own = vars(value)
        yield from (Binding(own, name, item) for name, item in own.items() if name not in _OF_MODULES)
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.ModuleType | type):
        own = vars(value)
        yield from (Binding(own, name, item) for name, item in own.items())


_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}  # what is in them is found as what dictionaries hold


class _CachedWeights:
    """The dictionary, whichever it is, in which modules find their weights within `parametrize.cached()`."""

    get = staticmethod(lambda key, default: parametrize._cache.get(key, default))
    pop = staticmethod(lambda key, default: parametrize._cache.pop(key, default))

    def __setitem__(self, key: Any, weight: Any) -> None:
        parametrize._cache[key] = weight


_WEIGHTS = _CachedWeights()


def cached_weights(module: torch.nn.Module) -> list[Binding]:
    """The weights that a module has computed for all uses within `parametrize.cached()`.

    Its first use would compute them, which may be one without autograd that only looks; so they are computed here.
    """
    if not parametrize._cache_enabled or not parametrize.is_parametrized(module):
        return []
    names = cast("torch.nn.ModuleDict", module.parametrizations)
    return [Binding(_WEIGHTS, (id(module), name), getattr(module, name)) for name in names]


def moved(bindings: Iterable[Binding]) -> list[Binding]:
    """Those of names that stand for something else by now."""
    return [each for each in bindings if each.now() is not each.value and each.value is not UNBOUND]


@contextmanager
def brought_back(bindings: Iterable[Binding]) -> Iterator[None]:
    """Let names stand for what they stood for, and afterwards for what they stand for now."""
    pairs = [(binding, binding.now()) for binding in moved(bindings)]
    try:
        for binding, _ in pairs:
            binding.bind(binding.value)
        yield
    finally:
        for binding, now in pairs:
            if binding.now() is binding.value:
                binding.bind(now)
