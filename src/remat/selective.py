"""Selective tapes: a stage recorded so that only the results of expensive operators stay, the rest is computed again.

Chen et al. 2016, section 3 ("drop the results of low cost operations"), for eager stages and bit for bit. While a stage
is recorded, autograd's saved tensors are packed: parameters and other tensors that are alive anyway stay as they are,
so do results of expensive operators (matrix products, convolutions, attention); everything else is dropped and leaves a
handle. The first handle that backward asks for runs the stage again, with the expensive operators replaced by what they
returned, gives every handle its tensor by the order of packing, and stops at the last one: what comes after it, such as
a block's last convolution, is neither kept nor run again. Each tensor goes when autograd lets go of its handle, as it
would in the plain run.

Rules that keep this exact:

1. A kept result is what the operator returned, so whatever is computed from it is bit for bit the same.
2. Operators that draw random numbers are never skipped: the streams stand where they stood.
3. An operator that changes a kept result in place before anything else has read it (a convolution, then `relu_`) counts
   as part of what made it: what is kept is the changed result, and the replay skips both. Where something has read it
   before, the result is given up and the replay runs its operator.
4. A kept result that changes after it was saved for backward is refused, as autograd does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .ambient import opaque
from .errors import StepError

_PRODUCTS: Final = (
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear mkldnn_linear _int_mm _scaled_mm _grouped_mm "
    "_scaled_grouped_mm _trilinear _cdist_forward mkldnn_rnn_layer _fft_c2c _fft_c2r _fft_r2c"
)
_CONVOLUTIONS: Final = "_slow_conv2d_forward slow_conv3d_forward _conv_depthwise2d"  # and all that say so in full
_ATTENTION: Final = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward"
)
_EXPENSIVE: Final = frozenset(f"{_PRODUCTS} {_CONVOLUTIONS} {_ATTENTION}".split())
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class _Traits(NamedTuple):
    """What an operator does, read off its schema.

    Attributes:
        expensive: its result is worth keeping.
        chance: the name and place of the argument with which it draws random numbers; ("", -1): it always does.
        written: the place of the one argument that it changes in place; −1: none; −2: several, or by keyword.
        view: its result shares memory with an argument.
    """

    expensive: bool
    chance: tuple[str, int] | None
    written: int
    view: bool


_traits: dict[Any, _Traits] = {}


def _traits_of(func: Any) -> _Traits:
    found = _traits.get(func)
    if found is None:
        found = _traits[func] = _read_traits(func)
    return found


def _read_traits(func: Any) -> _Traits:
    schema = func._schema
    name = schema.name.partition("::")[2]
    changed = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    aliases = any(result.alias_info is not None for result in schema.returns)
    expensive = name in _EXPENSIVE or name.startswith("linalg_") or ("convolution" in name and "backward" not in name)
    chance = None
    if torch.Tag.nondeterministic_seeded in func.tags:
        places = [(a.name, n) for n, a in enumerate(schema.arguments) if a.name == "dropout_p"]
        chance = places[0] if places else ("", -1)
    written = (
        -1 if not changed else changed[0] if len(changed) == 1 and not schema.arguments[changed[0]].kwarg_only else -2
    )
    return _Traits(expensive and not changed and not aliases, chance, written, aliases and not changed)


def _draws(traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call takes random numbers."""
    if traits.chance is None:
        return False
    name, place = traits.chance
    given = args[place] if 0 <= place < len(args) else kwargs.get(name, 0.0)
    return place < 0 or bool(given)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The memory of tensors that are alive anyway, as `recording` takes it; of plain strided tensors."""
    return frozenset(_storage(t) for t in tensors if type(t) in _PLAIN and t.layout is torch.strided)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors among arguments, those in lists included."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


class _Kept:
    """What an expensive operator returned: aliases without history that share its version counters."""

    __slots__ = ("func", "read", "result", "tensors")

    def __init__(self, func: Any, result: Any) -> None:
        self.func, self.read = func, False
        # Below autograd an alias has a version counter of its own, unless the key that ties them is let in again.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.result = _aliases(result)
        self.tensors = list(_tensors([self.result]))

    def versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.tensors)


def _aliases(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.detach()
    return tuple(part.detach() if isinstance(part, torch.Tensor) else part for part in result)


class _Saved(NamedTuple):
    """A kept result, or a view of one, that autograd saved; with the versions it had then."""

    tensor: torch.Tensor
    kept: _Kept
    versions: tuple[int, ...]


class _Handle:
    """In the place of a dropped tensor: gets it back when the stage has run again."""

    __slots__ = ("__weakref__", "kind", "tape", "tensor")

    def __init__(self, tape: _Tape, tensor: torch.Tensor) -> None:
        self.tape: _Tape | None = tape
        self.kind = (tensor.shape, tensor.dtype)
        self.tensor: torch.Tensor | None = None


class _Complete(BaseException):
    """Every dropped tensor is there again; the rest of the stage need not run."""


class _Tape:
    """One recorded stage: kept results and handles, until it has run again."""

    def __init__(self, rerun: Callable[[], object], alive: tuple[frozenset[int], ...]) -> None:
        self.rerun: Callable[[], object] | None = rerun
        self.results: list[_Kept | None] = []  # by number of the expensive call; None: given up
        self._alive = alive
        self._holders: dict[int, _Kept] = {}  # kept results by their memory
        self._handles: dict[int, weakref.ref[_Handle]] = {}  # by number of the saved tensor
        self._saved = 0
        self._last = -1  # the number of the last that was dropped
        self._needed = 0  # so many expensive calls come before it
        self._versions: list[tuple[int, ...]] = []
        self._open = True  # the stage is running
        self._lock = threading.Lock()  # stages over several devices have their backward in several threads

    # ---- while it is recorded

    def pack(self, tensor: torch.Tensor) -> Any:
        number = self._saved
        self._saved += 1
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return tensor
        memory = _storage(tensor)
        kept = self._holders.get(memory)
        if kept is not None:
            return _Saved(tensor, kept, kept.versions())
        if any(memory in those for those in self._alive):
            return tensor
        handle = _Handle(self, tensor)
        self._handles[number] = weakref.ref(handle)
        self._last, self._needed = number, len(self.results)
        return handle

    def keep(self, func: Any, result: Any) -> None:
        kept = _Kept(func, result)
        self.results.append(kept)
        for tensor in kept.tensors:
            self._holders[_storage(tensor)] = kept

    def reading(self, args: Iterable[Any]) -> None:
        """An operator other than a view takes these arguments."""
        if self._holders:
            for tensor in _tensors(args):
                if type(tensor) in _PLAIN and (kept := self._holders.get(_storage(tensor))) is not None:
                    kept.read = True

    def changing(self, target: Any, *, whole: bool) -> None:
        """An operator changes this argument in place; `whole`: it may be skipped together with what made it."""
        for tensor in _tensors([target]):
            kept = self._holders.get(_storage(tensor)) if type(tensor) in _PLAIN else None
            if kept is not None and (kept.read or not whole):
                self.results[self.results.index(kept)] = None
                for part in kept.tensors:
                    del self._holders[_storage(part)]

    def close(self) -> None:
        """The stage has run: nothing is kept for what comes after the last dropped tensor."""
        del self.results[self._needed :]
        self._holders.clear()
        self._open = False
        self._versions = [kept.versions() if kept else () for kept in self.results]
        if self._last < 0:
            self.rerun = None

    # ---- when backward asks

    def rebuild(self) -> None:
        """Run the stage again and fill the handles."""
        with self._lock:
            rerun, self.rerun = self.rerun, None
            if rerun is None:
                return
            if self._open:
                raise StepError("a stage that runs a backward of its own cannot have a selective tape")
            if any(kept and kept.versions() != then for kept, then in zip(self.results, self._versions, strict=True)):
                raise StepError(
                    "the result of a matrix product or convolution was changed in place after its stage had run; "
                    "change a clone of it"
                )
            self._saved = 0
            try:
                with torch.enable_grad(), saved_tensors_hooks(self._collect, _not_asked), _Returning(self.results):
                    rerun()
            except _Complete:
                return
            finally:
                self.results, self._handles = [], {}
        raise _other_than_before(f"it saves {self._saved} tensors for its backward, {self._last + 1} or more before")

    def _collect(self, tensor: torch.Tensor) -> None:
        number = self._saved
        self._saved += 1
        reference = self._handles.get(number)
        handle = reference() if reference is not None else None
        if handle is not None:
            if handle.kind != (tensor.shape, tensor.dtype):
                found = f"{list(tensor.shape)} of {tensor.dtype}, {list(handle.kind[0])} of {handle.kind[1]} before"
                raise _other_than_before(f"a tensor that it saves for its backward is {found}")
            handle.tensor = tensor.detach()
        if number == self._last:
            raise _Complete


def _other_than_before(what: str) -> StepError:
    return StepError(
        f"a stage that runs again does something else than in its first run: {what}; the stage is not deterministic, "
        "or reads something that has changed meanwhile"
    )


def _not_asked(_: Any) -> Any:
    raise AssertionError("the graph of a replay never runs backward")


def _unpack(packed: Any) -> torch.Tensor:
    if type(packed) is _Saved:
        if packed.kept.versions() != packed.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"result of {packed.kept.func}, of shape {list(packed.tensor.shape)}"
            )
        return packed.tensor
    if type(packed) is not _Handle:
        assert isinstance(packed, torch.Tensor)
        return packed
    if packed.tape is not None:
        packed.tape.rebuild()
        packed.tape = None
    assert packed.tensor is not None, "the replay gives every handle that is alive its tensor"
    return packed.tensor


class _Mode(TorchDispatchMode):
    """A mode whose methods keep compilers out by themselves: torch's way imports one, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Keeping(_Mode):
    """Notes what expensive operators return, while a stage is recorded."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    @opaque
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _traits_of(func)
        if not traits.view:
            if traits.written != -1:
                targets = [args[traits.written]] if traits.written >= 0 else [*args, *kwargs.values()]
                whole = traits.written >= 0 and traits.chance is None
                for target in targets:
                    self._tape.changing(target, whole=whole)
            others = args if traits.written < 0 else (*args[: traits.written], *args[traits.written + 1 :])
            self._tape.reading((*others, *kwargs.values()))
        result = func(*args, **kwargs)
        if traits.expensive and all(kind in _PLAIN for kind in types) and not _draws(traits, args, kwargs):
            self._tape.keep(func, result)
        return result


class _Returning(_Mode):
    """Gives back what expensive operators returned, instead of running them."""

    def __init__(self, results: list[_Kept | None]) -> None:
        super().__init__()
        self._results = iter(results)
        self._memories: set[int] = set()

    @opaque
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _traits_of(func)
        if traits.expensive and all(kind in _PLAIN for kind in types) and not _draws(traits, args, kwargs):
            kept = next(self._results, None)
            if kept is not None:
                if kept.func is not func:
                    raise _other_than_before(f"it calls {func}, {kept.func} before")
                self._memories.update(map(_storage, kept.tensors))
                return _aliases(kept.result)  # whose counters the replay's own changes leave as they are
        if traits.written >= 0 and self._memories:
            target = args[traits.written]
            if isinstance(target, torch.Tensor) and _storage(target) in self._memories:
                return target  # what is kept has this change in it
        return func(*args, **kwargs)


@contextmanager
def recording(rerun: Callable[[], object], *alive: frozenset[int]) -> Iterator[None]:
    """Record what runs in the body selectively.

    Args:
        rerun: runs the same again, from an alias of the same carry and the same states, marked as a replay. It is
            called in the thread that runs the backward, and released after.
        alive: the memory of tensors that stay alive without the tape (see `storages_of`).
    """
    tape = _Tape(rerun, alive)
    with saved_tensors_hooks(tape.pack, _unpack), _Keeping(tape):
        yield
    tape.close()
