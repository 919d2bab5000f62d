"""`remat.profile`: what a loop over layers or time costs, as a chain to plan with, to save, to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from torch._subclasses.fake_tensor import FakeTensor

from .bindings import brought_back
from .blocks.block import Block
from .blocks.calls import ChainCall, in_need
from .blocks.survey import untraced
from .budgets import free_bytes
from .calls import Call
from .chain import front_of, stand_ins_of
from .chains import Chain
from .errors import StepError
from .estimate import Rates
from .inputs import Inputs
from .knowledge import chain_of
from .missed import MissedTensors
from .paper import chain_on_paper, step_on_paper
from .trees import leaves_of

_ABSENT: Final = object()


def profile(
    work: Iterable[Callable[..., Any]] | Callable[..., Any],
    x: Any = None,
    *shared: Any,
    carry: Any = _ABSENT,
    xs: Any = None,
    length: int | None = None,
    device: torch.device | str | None = None,
    rates: Rates | None = None,
    progress: bool = True,
    **shared_kwargs: Any,
) -> Chain:
    """What every stage costs in bytes and seconds, as a `Chain` for `remat.plan`.

    A loop over layers is profiled as `remat.chain` takes it, `profile(blocks, x, *shared, **shared_kwargs)`, a loop
    over time as `remat.scan` does, `profile(step, carry=carry, xs=xs)`. Every stage is run alone on its real carry,
    bytes counted by the meter and seconds by the clock after a run to warm up; equal blocks on equal carries are
    measured once, and what is known from earlier calls is not measured again. Nothing is left behind. Bytes of a tape
    are those of storages that nothing else keeps, so parameters and what is shared do not count.

    With `device="meta"`, or where tensors are fake or on that device, all is worked out on paper instead: nothing is
    allocated and no kernel runs, and a network can be planned that does not fit. See `remat.Rates` for the seconds;
    bytes are exact but for what kernels allocate inside (see `remat.estimate`). A stage whose results differ in their
    last bits where autograd is off is advanced with it on, which takes more workspace; that needs values to be seen.

    Args:
        work: blocks, or with `carry` the step `(carry, x) -> (carry, y)`.
        x: what the first block takes.
        shared, shared_kwargs: what every block takes beside.
        carry, xs, length: the initial carry, inputs and number of steps, as `remat.scan` takes them.
        device: "meta" for an answer on paper; None for the tensors' own device.
        rates: how fast the device is, for an answer on paper; None measures this machine's CPU for a moment.
        progress: show a bar on a terminal while blocks are looked at.

    Returns:
        The chain; `to_json` and `Chain.from_json` save and load it.

    Raises:
        StepError: stages do what cannot be followed, or on paper ask for values; or nothing needs a gradient.
        ValueError: `device` is neither "meta" nor the tensors' own, or rates are needed and not given.
    """
    if carry is not _ABSENT:
        if x is not None or shared or shared_kwargs:
            raise ValueError("a step is profiled with carry= and xs=; positional arguments belong to blocks")
        return _step(work, carry, xs, length, device, rates)
    if callable(work) and not isinstance(work, Iterable):
        raise ValueError("profile takes a list of blocks and x, or a step with carry= and xs=")
    assert isinstance(work, Iterable)
    return _blocks(list(work), x, shared, shared_kwargs, device, rates, progress=progress)


def _blocks(
    functions: list[Callable[..., Any]],
    x: Any,
    shared: tuple[Any, ...],
    named: dict[str, Any],
    device: torch.device | str | None,
    rates: Rates | None,
    *,
    progress: bool,
) -> Chain:
    front = front_of(functions, x, shared, named)
    if front == len(functions):
        raise StepError("no block needs a gradient, so nothing is kept and there is nothing to plan")
    tensors = [tensor for function in functions for tensor in Block(function).tensors]
    tensors += filter(_is_tensor, leaves_of((x, shared, named)))
    with _bar("profiling blocks", len(functions) - front, shown=progress) as seen:
        if _on_paper(tensors, device):
            speed = rates or _rates_for(tensors)
            return chain_on_paper(functions, x, shared, named, speed, front=front, seen=seen)
        x, functions = untraced(functions[:front], x, shared, named), functions[front:]
        missed: list[torch.Tensor] = []
        stand_ins = stand_ins_of([Block(function) for function in functions], shared, named)
        around = stand_ins.within((shared, named))
        while True:
            try:
                with brought_back(stand_ins.bindings):
                    call = ChainCall(functions, x, *around, missed=missed)
                    return call.chain(call.surveyed(seen))
            except MissedTensors as found:
                missed += found.tensors


def _step(
    step: Any, carry: Any, xs: Any, length: int | None, device: torch.device | str | None, rates: Rates | None
) -> Chain:
    call = Call(step, carry, Inputs(xs, length))
    tensors = [*call.tensors(), *filter(_is_tensor, leaves_of((carry, xs)))]
    if not in_need(tensors):
        raise StepError("nothing needs a gradient, so nothing is kept and there is nothing to plan")
    if _on_paper(tensors, device):
        return step_on_paper(step, carry, xs, length, rates or _rates_for(tensors))
    with torch.enable_grad():
        while True:
            try:
                with brought_back(call.stand_ins.bindings):
                    return chain_of(call, free_bytes(call.device))
            except MissedTensors as missed:
                call.captured += missed.tensors


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _on_paper(tensors: list[torch.Tensor], device: torch.device | str | None) -> bool:
    """Whether nothing may run.

    Raises:
        ValueError: the device is another than the tensors'.
    """
    if device is not None and torch.device(device).type != "meta":
        own = {tensor.device.type for tensor in tensors}
        if own != {torch.device(device).type}:
            raise ValueError(
                f"device={str(device)!r}, but there are tensors on {', '.join(sorted(own))}; move them, or profile on "
                'paper with device="meta"'
            )
        return False
    return device is not None or any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in tensors)


def _rates_for(tensors: list[torch.Tensor]) -> Rates:
    """This machine's, of the device that the tensors are on or would be."""
    kinds = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    kind = min(kinds) if kinds else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device to be timed here; say how fast it is with rates=remat.Rates(...)")
    return Rates.measured(kind)


@contextmanager
def _bar(title: str, count: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """A progress bar on a terminal, gone when done; gives what to call after each of `count` parts."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=count)
        yield lambda: bar.advance(task)
