"""What a replay of a stage must see again, beside its carry: random streams, autocast, default dtype, modes.

A replay may run long after the first run, in another thread and outside the user's `with` blocks. `Surroundings` are
taken once per call and entered again around stages that are run again; random states belong to carries and are taken
with them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import torch
from torch import overrides
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch

from .errors import KeptTensors, LateChange, StepError

P = ParamSpec("P")
T = TypeVar("T")
_replaying = threading.local()


def is_recomputing() -> bool:
    """Whether the code that asks runs a second time, or to be measured, for the sake of memory.

    For hooks and loggers that should see every stage once.
    """
    return getattr(_replaying, "depth", 0) > 0


class recomputing:  # noqa: N801  # a context, and there is one around every action
    """Mark the body of a `with` as a replay."""

    __slots__ = ()

    def __enter__(self) -> None:
        _replaying.depth = getattr(_replaying, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _replaying.depth -= 1


def opaque(function: Callable[P, T]) -> Callable[P, T]:
    """Keep `torch.compile` out of a function and of all that it calls: a graph break, and no tracing inside.

    What `torch.compiler.disable` does, without its import, which takes longer than all of ours.
    """

    @functools.wraps(function)
    def untraced(*args: P.args, **kwargs: P.kwargs) -> T:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    untraced._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip_frame(untraced)
    return untraced


def _skip_frame(function: Any) -> None:
    if hasattr(eval_frame, "skip_code"):  # until torch 2.9
        eval_frame.skip_code(function.__code__)
    else:
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, default))


def is_transformed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a transform is at work that autograd nodes of our kind have no rule for.

    `torch.func` (grad, vmap, jvp, ...), forward-mode derivatives, and tracers that run Python on fake tensors.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in tensors):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None or (
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def _has_tangent(tensor: torch.Tensor) -> bool:
    unpacked: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return unpacked.tangent is not None


# ---- states that belong to carries


class Source(NamedTuple):
    """Something whose state belongs to a carry: a stream of random numbers, a buffer, a list.

    Attributes:
        name: what to call it.
        get, set, same: read its state, set it, compare two states.
        version: a number that changes whenever it changes, for what is large to read.
        owner: what names its parts have in common: a type, a function's code.
        kept: from two states, the places in which tensors with gradients have appeared in between.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    same: Callable[[Any, Any], bool]
    version: Callable[[], int] | None = None
    owner: Any = None
    kept: Callable[[Any, Any], list[Any]] | None = None


class States:
    """What belongs to carries beside their leaves, shared between them while nothing changes.

    During a first pass random streams are watched, and whatever else the step was seen to change; `settle` then keeps
    those that did change, and from then on the others cost nothing.

    Args:
        sources: all that could change.
        watched: which of them a first pass watches, by number; all, if None.
        expected: which of them may change without more being said; all, if None.
    """

    def __init__(
        self, sources: tuple[Source, ...], watched: Iterable[int] | None = None, expected: Iterable[int] | None = None
    ) -> None:
        self.sources = sources
        self._expected = set(range(len(sources)) if expected is None else expected)
        numbers = range(len(sources))
        self.watched = tuple(numbers if watched is None else sorted(watched))
        in_full = {number for number in numbers if sources[number].version is None} | set(self.watched)
        self.start = self._last = tuple(s.get() if n in in_full else None for n, s in enumerate(sources))
        self._versions = {n: _version(sources[n]) for n in numbers if n not in in_full}
        self._settled = False

    @property
    def nbytes(self) -> int:
        """Bytes of the states of what is watched, as far as tensors hold them."""
        return sum(map(_nbytes, (self.start[n] for n in self.watched)))

    @property
    def unmoved_bytes(self) -> int:
        """Bytes of the states that only a first pass holds, to see whether anything has changed that is not watched."""
        return sum(map(_nbytes, self.start)) - self.nbytes

    @property
    def passing_bytes(self) -> int:
        """Bytes that a first pass holds for a moment to see whether anything has changed."""
        return 2 * max(map(_nbytes, self.start), default=0)

    def kept(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of states taken before `settle` what is still needed."""
        return tuple(state if n in self.watched else None for n, state in enumerate(states)) if self.watched else ()

    def take(self) -> tuple[Any, ...]:
        """The states of now, as one value to keep with a carry.

        Raises:
            KeptTensors, StepError: in a first pass, a tensor with a gradient has come to be in them.
        """
        if not self.watched:
            return ()
        states = list(self._last)
        for number in self.watched:
            source = self.sources[number]
            state = source.get()
            if not source.same(states[number], state):
                self._refuse_kept(source, states[number], state)
                states[number] = state
        self._last = tuple(states)
        return self._last

    def _refuse_kept(self, source: Source, before: Any, after: Any) -> None:
        try:
            refuse_kept([(source, before, after)])
        except KeptTensors as kept:
            if not self._settled:
                raise
            raise StepError(
                f"a later step keeps a tensor with a gradient in {kept.places[0].name}, which others like it did not; "
                "make it part of the carry"
            ) from None

    def settle(self) -> None:
        """A first pass is over: watch only what it changed.

        Raises:
            LateChange: it changed something that was not watched, or a tensor that was not expected to change; all is
                as it was at the start.
            KeptTensors: it left a tensor with a gradient there.
            StepError: it changed a tensor that was not watched.
        """
        changed = [number for number in range(len(self.sources)) if number not in self.watched and self._moved(number)]
        for number in changed:
            if self.sources[number].version is not None:
                raise StepError(
                    f"a later step changes {self.sources[number].name} in place, which the first step did not; make it "
                    "part of the carry"
                )
        refuse_kept([(self.sources[n], self.start[n], self.sources[n].get()) for n in changed])
        self.take()
        changed += [
            n
            for n in self.watched
            if n not in self._expected
            and _nbytes(self.start[n])
            and not self.sources[n].same(self.start[n], self._last[n])
        ]
        if changed:
            self.rewind()
            raise LateChange(changed)
        self._settled = True
        self.watched = tuple(n for n in self.watched if not self.sources[n].same(self.start[n], self._last[n]))
        self.start = tuple(state if n in self.watched else None for n, state in enumerate(self.start))
        self._last = tuple(state if n in self.watched else None for n, state in enumerate(self._last))

    def _moved(self, number: int) -> bool:
        source = self.sources[number]
        if source.version is not None:
            return bool(_version(source) != self._versions[number])
        return not source.same(self.start[number], source.get())

    def restart(self) -> None:
        """Set what is watched back to what it was at the start."""
        for number in self.watched:
            self.sources[number].set(self.start[number])
        self._last = self.start

    def rewind(self) -> None:
        """Set everything back to what it was at the start, watched or not, for a first pass that starts again."""
        for number, source in enumerate(self.sources):
            if number not in self._versions and not source.same(self.start[number], source.get()):
                source.set(self.start[number])
        self._last = self.start

    def restore(self, states: tuple[Any, ...]) -> None:
        """Set what matters back to the states kept with a carry."""
        for number in self.watched:
            self.sources[number].set(states[number])
        if self.watched:
            self._last = states

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave all that is watched as it was at entry."""
        numbers = self.watched
        states = [self.sources[number].get() for number in numbers]
        try:
            yield
        finally:
            for number, state in zip(numbers, states, strict=True):
                self.sources[number].set(state)


def refuse_kept(changes: Iterable[tuple[Source, Any, Any]]) -> None:
    """Find the places in which tensors with gradients have appeared, in (source, state before, state after).

    Raises:
        KeptTensors: there are such places.
        StepError: there are tensors that cannot be followed.
    """
    places = [place for source, before, after in changes if source.kept for place in source.kept(before, after)]
    if places:
        raise KeptTensors(places)


def _nbytes(state: Any) -> int:
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def _version(source: Source) -> int:
    return source.version() if source.version is not None else 0


# ---- autocast, default dtype, modes


class _Autocast(NamedTuple):
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


def _autocast_states(device_types: Iterable[str]) -> tuple[_Autocast, ...]:
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in device_types
    )


def _autocast_nesting() -> int:
    """How many autocast regions there are around: casts stay in the cache until the outermost ends, on or off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


_NOTHING: Final = nullcontext()
_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack


class Surroundings:
    """The thread's settings at the time of the first run; `entered` brings them back around a replay."""

    def __init__(self, device_types: Iterable[str]) -> None:
        self._device_types = tuple(sorted({"cpu", *device_types} - {"meta"}))
        self._autocast = _autocast_states(self._device_types)
        self.casts = any(state.enabled for state in self._autocast) or _autocast_nesting() > 0
        self._dtype = torch.get_default_dtype()
        self._weights_cached = bool(parametrize._cache_enabled)
        self._function_modes = tuple(_function_modes())
        self._dispatch_modes = tuple(_dispatch_modes())

    def key(self) -> Hashable:
        """Equal for surroundings in which a step costs the same."""
        return self._autocast, self._dtype, tuple(map(type, (*self._function_modes, *self._dispatch_modes)))

    @property
    def modes(self) -> tuple[Any, ...]:
        """The modes that see operators."""
        return (*self._function_modes, *self._dispatch_modes)

    def entered(self) -> AbstractContextManager[None]:
        """Bring the settings back for the body of a `with`."""
        return _NOTHING if not self.casts and self._are_here() else self._brought_back()

    def _are_here(self) -> bool:
        """Whether there is nothing to bring back, which is seen sooner than done."""
        return (
            self._dtype == torch.get_default_dtype()
            and self._autocast == _autocast_states(self._device_types)
            and self._weights_cached == bool(parametrize._cache_enabled)
            and not (self._function_modes and any(_missing(self._function_modes, _function_modes())))
            and not (self._dispatch_modes and any(_missing(self._dispatch_modes, _dispatch_modes())))
        )

    @contextmanager
    def _brought_back(self) -> Iterator[None]:
        with ExitStack() as stack:
            for then, now in zip(self._autocast, _autocast_states(self._device_types), strict=True):
                if then != now:
                    stack.enter_context(
                        torch.autocast(then.device_type, then.dtype, enabled=then.enabled, cache_enabled=then.cache)
                    )
            if self._dtype != torch.get_default_dtype():
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            stack.callback(setattr, parametrize, "_cache_enabled", parametrize._cache_enabled)
            parametrize._cache_enabled = int(self._weights_cached)  # what is in the cache is a matter of `bindings`
            for mode in _missing(self._function_modes, _function_modes()):
                stack.enter_context(mode)
            for mode in _missing(self._dispatch_modes, _dispatch_modes()):
                stack.enter_context(mode)
            with self.own_cast_cache():
                yield

    def without_autograd(self, job: Callable[[], T]) -> T | None:
        """What the job returns when autograd is off; None if it cannot do without: it takes gradients, sets hooks."""
        try:
            with torch.no_grad(), self.own_cast_cache():
                return job()
        except StepError:
            raise
        except Exception as error:  # whatever else is wrong with it, it is with autograd too
            if "grad" not in str(error):
                raise
            return None

    def own_cast_cache(self) -> AbstractContextManager[None]:
        """Autocast keeps casts of weights; none may cross into or out of the body.

        A cast made without autograd would cut gradients off, one made with it would tie graphs together.
        """
        return _no_casts_kept() if self.casts else _NOTHING


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _missing(then: tuple[Any, ...], now: Iterable[Any]) -> Iterator[Any]:
    present = {id(mode) for mode in now}
    return (mode for mode in then if id(mode) not in present)
