"""Whether a captured forward is the plain one: some choose other operators where they see that they are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient import recomputing
from ..errors import FitError
from ..loops import fingerprint
from ..silence import silence
from ..trees import leaves_of
from . import seams
from .trial import undisturbed

# What capture brings by itself: copies, constants, room, in-place changes of views, and the scale of a dropout.
_COPIES: Final = ("clone", "copy", "lift_fresh_copy", "unsafe_view", "reshape", "select_scatter", "slice_scatter")
_CONSTANTS: Final = ("empty", "new_empty", "empty_like", "fill", "full", "full_like", "zeros", "zeros_like", "ones")
_BY_CAPTURE: Final = frozenset((*_COPIES, *_CONSTANTS, "ones_like", "scalar_tensor", "mul", "div"))


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run, without what tells an in-place or functional one from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            name = func._schema.name.split("::")[1].strip("_")
            self.names.add(name.replace("_legit", "").removesuffix("_functional"))
        return func(*args, **(kwargs or {}))


def refuse_unlike(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captured: Callable[[Operators], Any],
) -> None:
    """Run both forwards, one after the other, and compare bits and operators; leaves no trace.

    Equal outputs do not yet mean equal gradients: one operator may stand for several that add up in another order.

    Args:
        model, args, kwargs: the call.
        captured: makes the captured call, and notes its operators.

    Raises:
        FitError: they differ; says in what.
    """
    plain, graph = Operators(), Operators()
    with _trial(model), torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: _), plain:
        wanted = [fingerprint(leaf) for leaf in leaves_of(seams.own_call(model)(*args, **kwargs))]
    with _trial(model):
        found = [fingerprint(leaf) for leaf in leaves_of(captured(graph))]
    if found != wanted:
        raise FitError("its forward computes otherwise when it is captured, to other last bits")
    if others := sorted(graph.names - plain.names - _BY_CAPTURE):
        raise FitError(
            f"its forward computes otherwise when it is captured ({', '.join(others)}), so that gradients may have "
            "other last bits"
        )


@contextmanager
def _trial(model: nn.Module) -> Iterator[None]:
    with undisturbed(model), recomputing(), silence(), torch.enable_grad():
        yield
