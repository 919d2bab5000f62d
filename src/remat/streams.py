"""Streams of random numbers that a stage may draw from: those of devices, PyTorch's, Python's, NumPy's, its own."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch

from .ambient import Source

Value = TypeVar("Value")

# PyTorch makes the tensor of a generator's state with the generator's mutex in hand. That may start Python's garbage
# collector, and whatever runs then may let another thread go on: should that want the same mutex, it waits for it with
# the GIL in hand, and neither goes on. A lock of Python's is waited for without the GIL.
_generators = threading.RLock()


def one_at_a_time(function: Callable[..., Value]) -> Callable[..., Value]:
    """The same function of PyTorch's generators, in one thread at a time."""

    @wraps(function)
    def run(*args: Any) -> Value:
        with _generators:
            return function(*args)

    return run


def random_sources(devices: Iterable[torch.device], owned: Iterable[object] = ()) -> tuple[Source, ...]:
    """The streams that a stage may draw from: PyTorch's on the CPU and on `devices`, Python's, NumPy's, its own."""
    others = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    sources = [_torch_source("torch", torch.default_generator), *map(_device_source, others)]
    sources.append(_python_source("random", random))
    if "numpy" in sys.modules:
        sources.append(_numpy_source("numpy.random", sys.modules["numpy"].random))
    for generator in owned:
        if isinstance(generator, torch.Generator):
            sources.append(_torch_source("a torch.Generator of the step", generator))
        elif isinstance(generator, random.Random):
            sources.append(_python_source("a random.Random of the step", generator))
        elif type(generator).__module__.startswith("numpy.random"):
            sources.append(_numpy_source("a NumPy generator of the step", generator))
    return tuple(sources)


def is_random_source(value: object) -> bool:
    """Whether a value is a generator of random numbers that `random_sources` knows."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, torch.Generator | random.Random) or (
        numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)
    )


def _device_source(device: torch.device) -> Source:
    module = torch.get_device_module(device)
    return Source(
        str(device),
        one_at_a_time(lambda: module.get_rng_state(device)),
        one_at_a_time(lambda state: module.set_rng_state(state, device)),
        torch.equal,
    )


def _torch_source(name: str, generator: torch.Generator) -> Source:
    return Source(name, one_at_a_time(generator.get_state), one_at_a_time(generator.set_state), torch.equal)


def _python_source(name: str, stream: Any) -> Source:
    return Source(name, stream.getstate, stream.setstate, lambda a, b: bool(a == b))


def _numpy_source(name: str, stream: Any) -> Source:
    bits: Any = getattr(stream, "bit_generator", None)
    if hasattr(bits, "state"):  # a Generator, not NumPy's global stream
        return Source(name, lambda: bits.state, lambda state: setattr(bits, "state", state), _same_numpy_state)
    return Source(name, lambda: stream.get_state(legacy=True), stream.set_state, _same_numpy_state)


def _same_numpy_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_numpy_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_same_numpy_state, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)
