"""Streams of random numbers that a stage may draw from: those of devices, PyTorch's, Python's, NumPy's, its own."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch

from .ambient import Source

# PyTorch makes the tensor of a generator's state with the generator's mutex in hand. That may start Python's garbage
# collector, and whatever runs then may let another thread go on: should that want the same mutex, it waits for it with
# the GIL in hand, and neither goes on. A lock of Python's is waited for without the GIL.
_generators = threading.RLock()
_ON_CPU: Final = ("cpu", "meta")  # what draws from the CPU's stream, or from none


def random_state(generator: torch.Generator | torch.device) -> torch.Tensor:
    """The state of a generator, or of a device's default one: bytes on the CPU."""
    with _generators:
        if isinstance(generator, torch.Generator):
            return generator.get_state()
        if generator.type in _ON_CPU:
            return torch.default_generator.get_state()
        found: torch.Tensor = torch.get_device_module(generator).get_rng_state(generator)
        return found


def set_random_state(generator: torch.Generator | torch.device, state: torch.Tensor) -> None:
    """Put such a state back."""
    with _generators:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif generator.type in _ON_CPU:
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(generator).set_rng_state(state, generator)


def random_sources(devices: Iterable[torch.device], owned: Iterable[object] = ()) -> tuple[Source, ...]:
    """The streams that a stage may draw from: PyTorch's on the CPU and on `devices`, Python's, NumPy's, its own."""
    others = sorted({device for device in devices if device.type not in _ON_CPU}, key=str)
    sources = [_torch_source("torch", torch.default_generator), *(_torch_source(str(each), each) for each in others)]
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


def _torch_source(name: str, generator: torch.Generator | torch.device) -> Source:
    return Source(name, partial(random_state, generator), partial(set_random_state, generator), torch.equal)


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
