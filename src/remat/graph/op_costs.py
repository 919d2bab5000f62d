"""What one operator call takes: seconds and workspace, measured once per signature, or estimated.

A signature is the operator with the shapes, strides and types of its tensors and its other arguments; equal layers
share one measurement. Where nothing can be run (a device that is not there, data that no stand-in is fit for) or where
several processes must come to the same plan, seconds are estimated from floating-point operations and bytes moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..ambient import States
from ..meter import metering
from ..streams import random_sources, random_state

_FLOPS_PER_S: Final = 5e10
_BYTES_PER_S: Final = 1e10
_CALL_S: Final = 2e-6
_ENOUGH_S: Final = 30e-3  # of timing one call, and at least so many rounds: others use the machine as well
_ROUNDS: Final = (3, 20)


class Cost(NamedTuple):
    """Seconds, workspace in bytes beyond what is returned, and whether a generator's state was changed."""

    seconds: float
    workspace_bytes: int
    draws: bool


_measured: dict[Any, Cost] = {}  # for the life of the process: the same call costs the same


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors in a pytree."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def signature(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What decides the cost of a call; `args` and `kwargs` hold tensors, real or fake."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return op, str(structure), torch.get_num_threads(), tuple(map(_leaf_signature, leaves))


def _leaf_signature(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(map(hint, leaf.shape)), tuple(map(hint, leaf.stride())), leaf.dtype, leaf.device
    return repr(hint(leaf))


def hint(value: Any) -> Any:
    """The number behind a symbolic one: that of the inputs at hand."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint if value.node.hint is not None else value.node.require_hint(1)
    return value


def measured(op: Callable[..., Any], args: Any, kwargs: Any) -> Cost:
    """Run the call on stand-ins for its tensors, once per signature; estimated if it cannot be run."""
    key = signature(op, args, kwargs)
    if key not in _measured:
        try:
            _measured[key] = _measure(op, args, kwargs)
        except Exception:  # whatever an operator says about random data
            _measured[key] = estimated(op, args, kwargs)
    return _measured[key]


def _stand_in(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return hint(leaf)
    sizes, strides = [hint(n) for n in leaf.shape], [hint(n) for n in leaf.stride()]
    made = torch.empty_strided(sizes, strides, dtype=leaf.dtype, device=leaf.device)
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return made.fill_(0.5)
    return made.zero_()  # an index must be a valid one


def _measure(op: Callable[..., Any], args: Any, kwargs: Any) -> Cost:
    device = next((t.device for t in tensors_of((args, kwargs))), torch.device("cpu"))
    streams = States(random_sources([device]))
    with _disable_current_modes(), streams.undisturbed(), torch.no_grad():  # tracing goes on around us
        args, kwargs = pytree.tree_map(_stand_in, (args, kwargs))
        before = random_state(device)
        op(*args, **kwargs)
        draws = not torch.equal(before, random_state(device))
        with metering(device) as session:
            result = op(*args, **kwargs)
        owned = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(result)}
        for tensor in tensors_of((args, kwargs)):
            owned.pop(tensor.untyped_storage()._cdata, None)
        workspace = max(0, session.peak_bytes - max(sum(owned.values()), session.net_bytes))
        del result
        return Cost(_seconds(lambda: op(*args, **kwargs), device), workspace, draws)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    # On the CPU the time of the calling thread, which does its share of every operator: while others have the
    # processor it stands still, unlike the clock on the wall.
    on_device = device.type == "cuda"
    clock = time.perf_counter if on_device else time.thread_time
    best, total_s = float("inf"), 0.0
    for number in range(_ROUNDS[1]):
        if on_device:
            torch.cuda.synchronize(device)
        begin = clock()
        call()
        if on_device:
            torch.cuda.synchronize(device)
        took_s = clock() - begin
        best, total_s = min(best, took_s), total_s + took_s
        if number + 1 >= _ROUNDS[0] and total_s > _ENOUGH_S:
            break
    return best


def estimated(op: Callable[..., Any], args: Any, kwargs: Any, result: Any = None) -> Cost:
    """Seconds from floating-point operations and bytes, the same in every process; no workspace."""
    from torch.utils.flop_counter import flop_registry

    sizes = [hint(t.numel()) * t.element_size() for t in tensors_of((args, kwargs, result))]
    flops = 0
    counter = flop_registry.get(getattr(op, "overloadpacket", op))
    if counter is not None and result is not None:
        flops = int(hint(counter(*args, **kwargs, out_val=result)))
    return Cost(_CALL_S + flops / _FLOPS_PER_S + sum(sizes) / _BYTES_PER_S, 0, draws=False)
