"""What a step can reach besides its arguments: tensors, generators of random numbers, and the modules that hold them.

Found by walking from the step: closures, globals that its code names, defaults, bound objects, partials, attributes,
containers, modules with their parameters and buffers. A superset of what the step uses does no harm; what the walk
misses is found in the recorded graph (`missed`).
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from .bindings import LOOKED_AT, Binding, bindings_of, cached_weights, content_of
from .errors import StepError
from .streams import is_random_source

ATOMS = (int, float, complex, bool, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_LIBRARIES = frozenset({"torch", "numpy", "remat", *sys.stdlib_module_names}) - {"__main__", "__mp_main__"}
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})
moving: set[tuple[Any, Any]] = set()  # (owner, name) of plain values that steps were seen to change: no settings
_CHANGEABLE = (list, dict, set, deque, types.GeneratorType, torch.nn.Module)
_WITH_NAMES = (dict, types.FunctionType, torch.nn.Module)
_LAZY = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module
_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass
class Reached:
    """What the walk found, in the order in which it was found.

    Attributes:
        tensors: every tensor.
        generators: every generator of random numbers that is not a module's global one.
        modules: every `torch.nn.Module`.
        settings: small values beside them that may change what a step costs (flags, counts, names).
        changeable: everything that a step could change: buffers, containers, objects, functions with variables around
            them.
        fixed: tensors without gradient that are no buffers, which a step must leave as they are.
        codes: the code of functions, and the types of other objects: what the step does.
        bindings: what names stand for: variables, attributes, parameters, globals that are read.
        exact: every plain value and every name under which a tensor can be found; only if asked for.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    generators: list[object] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    settings: list[Hashable] = field(default_factory=list)
    changeable: list[Any] = field(default_factory=list)
    fixed: list[torch.Tensor] = field(default_factory=list)
    codes: list[types.CodeType | type] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)
    exact: list[Hashable] = field(default_factory=list)

    def differentiable(self) -> list[torch.Tensor]:
        """The tensors that gradients can flow into."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


def reach(step: object, *, exact: bool = False) -> Reached:
    """Walk from `step` to all that it can reach; `exact`ly, for what is made of one step and used for its like.

    Raises:
        StepError: there is a parameter that has no shape yet.
    """
    found = Reached()
    seen: set[int] = set()
    buffers: set[int] = set()
    watchers: set[int] = set()  # hooks, and all that is reached through them first: they look on, and keep tallies
    queue: list[Any] = [step]
    keep: list[Any] = []  # temporaries must outlive the walk, or their ids would be given out again
    while queue:
        value = queue.pop()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, torch.Tensor):
            refuse_lazy(value)
            found.tensors.append(value)
            if not value.requires_grad:
                (found.changeable if id(value) in buffers else found.fixed).append(value)
        elif is_random_source(value):
            found.generators.append(value)
        else:
            if isinstance(value, torch.nn.Module):
                found.modules.append(value)
                buffers.update(id(buffer) for buffer in value._buffers.values())
                watchers.update(map(id, (value._forward_hooks, value._forward_pre_hooks)))
            found.codes.append(value.__code__ if isinstance(value, types.FunctionType) else type(value))
            if _can_change(value) and (
                isinstance(value, _CHANGEABLE) or hasattr(value, "__next__") or not _is_library(_owner(value))
            ):
                found.changeable.append(value)
            if exact:
                found.exact.extend(_exact_values(value))
            if id(value) not in watchers:
                found.settings.extend(_settings_of(value))
                if isinstance(value, _WITH_NAMES) or not _is_library(type(value)):
                    found.bindings.extend(bindings_of(value, _global_names(value)))
            inside = list(_inside(value))
            if isinstance(value, torch.nn.Module):
                weights = cached_weights(value)
                found.bindings.extend(weights)
                inside.extend(weight.value for weight in weights)
            if id(value) in watchers:
                watchers.update(map(id, inside))
            queue.extend(reversed(inside))
    return found


def refuse_lazy(tensor: torch.Tensor) -> None:
    """Refuse a parameter or buffer of a lazy module that has not been called yet."""
    if isinstance(tensor, _LAZY):
        raise StepError(
            "a module has parameters without a shape, as nn.LazyLinear has before its first call; call it once outside "
            "of the loop, so that there is something to measure"
        )


def _settings_of(value: Any) -> Iterator[Hashable]:
    """Plain values beside an object that may change what a step does or costs, but for those that steps change."""
    for owner, name, setting in _plain_values(value):
        if isinstance(setting, ATOMS) and (owner, name) not in moving:
            # Of a number with a fraction it matters at most whether it is 0, as of a dropout's probability.
            yield bool(setting) if isinstance(setting, float | complex) else _hashable(setting)


def _exact_values(value: Any) -> Iterator[Hashable]:
    """All plain values in a value with their names, and the names of everything else."""
    if isinstance(value, torch.nn.Module):
        yield from (tuple(value._parameters), tuple(value._buffers), tuple(value._modules))
    if isinstance(value, dict):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, _CONTAINERS):
        pairs = enumerate(value)
    else:
        pairs = [(name, item) for _, name, item in _plain_values(value)]
        if isinstance(value, types.FunctionType) and not installed(value.__module__):
            pairs += _values_in_modules(value)
        elif not installed(type(value).__module__):
            pairs += [pair for base in type(value).__mro__ for pair in vars(base).items()]
    for name, item in pairs:
        if isinstance(item, ATOMS):
            yield str(name), type(item), _hashable(item)
        else:
            yield str(name)


def _values_in_modules(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Plain values that code may name in user modules: `settings.rate`."""
    names = _names(function.__code__)
    found = (
        function.__globals__[name] for name in sorted(named_globals(function.__code__) & function.__globals__.keys())
    )
    modules = [value for value in found if isinstance(value, types.ModuleType) and not installed(value.__name__)]
    return [(name, vars(module)[name]) for module in modules for name in sorted(names & vars(module).keys())]


def _plain_values(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(owner, name, value) of what is directly in a value; the owner is what other values of its kind share."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        yield from (
            (code, name, content_of(cell)) for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True)
        )
        yield from ((code, index, default) for index, default in enumerate(value.__defaults__ or ()))
        yield from ((code, name, default) for name, default in (value.__kwdefaults__ or {}).items())
        if not installed(value.__module__):
            named = named_globals(code) & value.__globals__.keys()
            yield from ((code, name, value.__globals__[name]) for name in sorted(named))
    elif isinstance(value, dict):
        yield from ((dict, name, item) for name, item in islice(value.items(), LOOKED_AT))
    elif isinstance(value, _CONTAINERS):
        yield from ((type(value), None, item) for item in islice(value, LOOKED_AT))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.ModuleType | type):
        yield from ((type(value), name, item) for name, item in vars(value).items())


def _hashable(value: Any) -> Hashable:
    return (value.start, value.stop, value.step) if isinstance(value, slice) else value


def _inside(value: Any) -> Iterator[Any]:
    """What one value leads to."""
    if isinstance(value, types.FunctionType):
        yield from _inside_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from _not_atoms(value.values())
    elif isinstance(value, _CONTAINERS):
        yield from _not_atoms(value)
    elif isinstance(value, torch.nn.Module):
        yield from _inside_module(value)
    elif not isinstance(value, types.ModuleType | type) and not _is_library(type(value)):
        yield from _attributes(value)
        yield from methods_of(type(value))


def _not_atoms(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if not isinstance(value, ATOMS))


def _is_library(owner: Any) -> bool:
    return (getattr(owner, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def installed(module: str | None) -> bool:
    """Whether a module was installed rather than written beside the step: its own globals are of no concern to it."""
    root = (module or "builtins").partition(".")[0]
    if root in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return file.startswith(_INSTALLED)


def _inside_function(function: types.FunctionType) -> Iterator[Any]:
    yield from (content_of(cell) for cell in function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    if not installed(function.__module__):
        yield from _named_globals(function)


def _named_globals(function: types.FunctionType) -> Iterator[Any]:
    """Globals that the code names, and tensors and modules that it names in user modules: `weights.W`."""
    names = _names(function.__code__)
    for name in named_globals(function.__code__) & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            if not isinstance(value, ATOMS):
                yield value
        elif not installed(value.__name__):
            parts = (vars(value).get(attribute) for attribute in sorted(names))
            yield from (p for p in parts if isinstance(p, torch.Tensor | torch.nn.Module | types.FunctionType))


def _global_names(value: Any) -> Iterable[str]:
    """The globals that a function reads, if it was written beside the step."""
    if not isinstance(value, types.FunctionType) or installed(value.__module__):
        return ()
    return named_globals(value.__code__) & value.__globals__.keys()


def _owner(value: Any) -> Any:
    return value if isinstance(value, types.FunctionType) else type(value)


def _can_change(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__) or bool(named_globals(value.__code__, assigned=True))
    if isinstance(value, list | dict | set | deque | types.GeneratorType):
        return True
    if hasattr(value, "__next__"):
        return hasattr(value, "__length_hint__")  # such as list_iterator
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(
        value, types.ModuleType | type | functools.partial
    )


_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME"})


@functools.lru_cache(maxsize=1024)
def named_globals(code: types.CodeType, *, assigned: bool = False) -> frozenset[str]:
    """The globals that code reads, that of inner functions included; or those it assigns to.

    Attributes are not among them: a script may well have a `h` beside a step that takes a carry with an attribute `h`.
    """
    inner = (named_globals(const, assigned=assigned) for const in code.co_consts if isinstance(const, types.CodeType))
    wanted = {"STORE_GLOBAL"} if assigned else _OF_GLOBALS
    own = (instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in wanted)
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that code names, that of inner functions included."""
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _inside_module(module: torch.nn.Module) -> Iterator[Any]:
    yield from (module._parameters, module._buffers, module._modules)
    yield from (module._forward_hooks, module._forward_pre_hooks)
    private = inspect.get_annotations(torch.nn.Module).keys() | {"training"}
    yield from _not_atoms(value for name, value in vars(module).items() if name not in private)
    yield from methods_of(type(module))


def _attributes(value: object) -> Iterator[Any]:
    yield from _not_atoms(getattr(value, "__dict__", {}).values())
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield from _not_atoms([getattr(value, name, None)])


def methods_of(owner: type) -> Iterator[Any]:
    """Functions and tensors among the attributes of a class and its bases, as far as they are not installed."""
    for base in owner.__mro__:
        if not installed(base.__module__):
            for member in vars(base).values():
                function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                if isinstance(function, types.FunctionType | torch.Tensor):
                    yield function
