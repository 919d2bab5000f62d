"""Gradients reach autograd as early as it would make them itself, though one compiled backward makes them all.

AOTAutograd's node returns every gradient at its end, so that all of them are alive at once. Instead, inputs that need a
gradient pass through *gates* first: small autograd nodes in a row, one per moment at which the backward hands gradients
out. AOTAutograd's own node then only takes over what was saved and hands back nothing; autograd goes on to the gates,
in order, each runs the backward as far as its own gradients, and autograd adds these into `.grad` before the next. So
hooks, `torch.autograd.grad`, `inputs=` and whatever else looks at autograd's graph see what they always see.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .lowering import Stepwise
from .weighing import Weighing

_numbers = itertools.count(1)
_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
_current = threading.local()  # .run: the call whose forward is under way in this thread


class Run:
    """One call: from its forward to the end of its backward.

    Attributes:
        number: by which the backward finds it again.
        closed: whether a backward of it is over.
        weighing: what counts its bytes, if they are to be counted.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.closed = False
        self.weighing: Weighing | None = None
        self._steps: Generator[None, list[tuple[int, Any]], None] | None = None
        self._ready: dict[int, Any] = {}
        _runs[self.number] = self

    def start(self, steps: Generator[None, list[tuple[int, Any]], None]) -> None:
        """The backward begins: everything saved is its own now, nothing has run yet."""
        next(steps)
        self._steps = steps
        self._ready.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self.close)

    def gradients(self, numbers: Sequence[int]) -> list[Any]:
        """Run the backward until these exist; gradients that nobody asked for are dropped on the way."""
        if self._steps is None:
            raise RuntimeError("the backward of this graph has not begun in this pass")
        found: list[tuple[int, Any]] = []
        wanted = set(numbers)
        ready: dict[int, Any] = {}
        while wanted - ready.keys() and self._steps is not None:
            # As traced, wherever the backward was called.
            with torch.no_grad(), torch._C._DisableAutocast(), self._weighed(found):
                self._advance(found)
            ready.update((number, value) for number, value in found if number in wanted)
            found.clear()
        return [ready.pop(number, None) for number in numbers]

    def _advance(self, found: list[tuple[int, Any]]) -> None:
        assert self._steps is not None
        try:
            self._steps.send(found)
        except StopIteration:
            self._steps = None

    def _weighed(self, found: list[tuple[int, Any]]) -> AbstractContextManager[None]:
        return nullcontext() if self.weighing is None else self.weighing.piece(found)

    def close(self) -> None:
        """The pass is over: what the backward still holds goes."""
        self.closed = True
        weighing, self.weighing = self.weighing, None
        if weighing is not None:
            weighing.finish()
        if self._steps is not None:
            self._steps.close()
            self._steps = None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, numbers: tuple[int, ...], _after: Any, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.numbers = run, numbers
        return (tensors[0].new_empty(0, dtype=torch.float32), *(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, _token: Any, *_grads: Any) -> Any:
        return (None, None, None, *ctx.run.gradients(ctx.numbers))


def through_gates(run: Run, stops: Sequence[Sequence[int]], args: Sequence[Any]) -> list[Any]:
    """The arguments, those with a number in `stops` behind the gate of their stop."""
    found, token = list(args), None
    for numbers in reversed(stops):
        mine = [args[number] for number in numbers]
        token, *aliases = _Gate.apply(run, tuple(numbers), token, *mine)  # type: ignore[no-untyped-call]
        for number, alias in zip(numbers, aliases, strict=True):
            found[number] = alias
    return found


@contextmanager
def forward_of(run: Run) -> Iterator[None]:
    """What `run_key` answers in the body is this run's."""
    before = getattr(_current, "run", None)
    _current.run = run
    try:
        yield
    finally:
        _current.run = before


def run_key() -> torch.Tensor:
    """The number of the run whose forward is under way, 0 if there is none, as something that can be saved."""
    run = getattr(_current, "run", None)
    return torch.tensor(0 if run is None else run.number)


def backward_function(steps: Stepwise, key_place: int, results: int) -> Callable[[list[Any]], list[Any]]:
    """What AOTAutograd calls as its backward.

    Args:
        steps: the backward.
        key_place: the argument that is the run's key.
        results: how many gradients there are.
    """

    def backward(args: list[Any]) -> list[Any]:
        run = _runs.get(int(args[key_place]))
        made = steps(args)
        if run is not None:
            run.start(made)
            return [None] * results
        found: list[tuple[int, Any]] = []
        next(made)
        for _ in iter(lambda: _ended(made, found), True):
            pass
        ready = dict(found)
        return [ready.get(number) for number in range(results)]

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def _ended(steps: Generator[None, list[tuple[int, Any]], None], found: list[tuple[int, Any]]) -> bool:
    try:
        steps.send(found)
    except StopIteration:
        return True
    return False
