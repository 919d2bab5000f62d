"""Calls of some modules, answered by somebody else for as long as a model's forward runs.

`nn.Module` has one place for that: `_compiled_call_impl`, which `__call__` prefers to its own, and which copies and
pickles leave out. A seam stands there from the first time on; where nobody observes on the thread, it is the module's
own call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from torch import nn

_PLACE: Final = "_compiled_call_impl"
_thread = threading.local()


class Observer(Protocol):
    """Who answers the calls."""

    def call(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of `module`, whose own answer would be `own(*args, **kwargs)`."""
        ...


class _Seam:
    """A module's call; what stood there before, as from `module.compile()`, goes on being its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module holds the seam
        self.before: Callable[..., Any] | None = module.__dict__.get(_PLACE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "it is being called"
        own = self.before or own_call(module)
        observer: Observer | None = getattr(_thread, "observer", None)
        return own(*args, **kwargs) if observer is None else observer.call(module, own, args, kwargs)


def own_call(module: nn.Module) -> Callable[..., Any]:
    """A module's own answer to a call: hooks and forward."""
    call: Callable[..., Any] = module._call_impl
    return call


def install(modules: Iterable[nn.Module]) -> None:
    """Put seams where there are none."""
    for module in modules:
        if not isinstance(module.__dict__.get(_PLACE), _Seam):
            module.__dict__[_PLACE] = _Seam(module)


def remove(modules: Iterable[nn.Module]) -> None:
    """Take seams away again, as a compiler cannot look through them."""
    for module in modules:
        seam = module.__dict__.get(_PLACE)
        if isinstance(seam, _Seam):
            del module.__dict__[_PLACE]
            if seam.before is not None:
                module.__dict__[_PLACE] = seam.before


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """Let `observer` answer on this thread for the body of a `with`; None: nobody."""
    before = getattr(_thread, "observer", None)
    _thread.observer = observer
    try:
        yield
    finally:
        _thread.observer = before
