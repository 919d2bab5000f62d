"""A model as one graph, where PyTorch can capture its whole forward: the compiler backend of this package plans it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..errors import FitError, InfeasibleBudget
from ..sizes import format_bytes
from . import seams
from .likeness import Operators, refuse_unlike
from .loops import blocks_of


class _Enough(Exception):
    """The graph has been planned and compiled: nothing is to be run yet."""


@dataclass(frozen=True, slots=True)
class AsGraph:
    """The captured forward and its backward, in an order that stays inside the budget.

    Attributes:
        peak_bytes: predicted: most bytes at any moment of the step.
        plain_peak_bytes: the same without recomputation.
        time_ratio: predicted time over that without recomputation.
        reason: why it is this way.
        compiled: the model's call, which takes the model, args and kwargs.
    """

    peak_bytes: int
    plain_peak_bytes: int
    time_ratio: float
    reason: str
    compiled: Callable[..., Any]
    name: str = "graph"

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `ways.Way`."""
        seams.remove(blocks_of(model))
        with _seeing_hooks():
            return self.compiled(model, args, kwargs)

    def explain(self) -> str:
        """See `ways.Way`."""
        most, plain = format_bytes(self.peak_bytes), format_bytes(self.plain_peak_bytes)
        return (
            f"way           graph: the whole forward can be captured; {self.reason}\n"
            f"predicted     {most} at most; plain takes {plain}\n"
            f"time          {self.time_ratio:.3f} × that without recomputation, by measured operators"
        )


def _seeing_hooks() -> AbstractContextManager[Any]:
    """A capture in here is made again when a hook has come or gone, which PyTorch does not look for otherwise."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
    return patched


def as_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], budget_bytes: int, reason: str
) -> AsGraph:
    """Capture and plan a call: what is compiled stops where the graph would begin. Then its forward is compared.

    Raises:
        InfeasibleBudget: the budget is too small for any order of the graph.
        FitError: the forward cannot be captured as one graph, or does other things then; says why.
    """
    from ..graph.compilation import Options
    from ..graph.parts import Model
    from ..graph.planning import GraphPlan

    parts = Model(Options(budget_bytes))
    plans: list[GraphPlan | None] = []
    planning = True
    noting: AbstractContextManager[Any] = nullcontext()

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        part = parts.part(module, list(inputs), frame=None, followed=False)
        plans.append(part.plan)

        def run(*args: Any) -> Any:
            if planning:
                raise _Enough
            with noting:
                return part(*args)

        call: Callable[..., Any] = torch._dynamo.disable(run, reason="gates are autograd nodes of their own")
        return call

    compiled = torch.compile(_call_of_its_own(), backend=backend, fullgraph=True, dynamic=False)
    seams.remove(blocks_of(model))
    try:
        with _seeing_hooks():
            compiled(model, args, kwargs)
    except Exception as error:
        if refused := _cause(error, InfeasibleBudget):
            raise refused from None
        if _cause(error, _Enough) is None:
            raise FitError(f"its forward cannot be captured as one graph: {_first_line(error)}") from error
    planning = False
    if not plans or plans[0] is None:
        raise FitError("nothing in its captured forward needs a gradient")
    made = plans[0]

    def captured(operators: Operators) -> Any:
        nonlocal noting
        noting = operators
        try:
            return compiled(model, args, kwargs)
        finally:
            noting = nullcontext()

    refuse_unlike(model, args, kwargs, captured)
    return AsGraph(made.peak_bytes, made.plain_peak_bytes, made.time_ratio, reason, compiled)


def _call_of_its_own() -> Callable[..., Any]:
    """Calls a model. What has been compiled is counted by code object: so no other model's or budget's count here."""

    def call_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model._call_impl(*args, **kwargs)

    call_of.__code__ = call_of.__code__.replace()
    return call_of


def _cause(error: BaseException | None, kind: type[BaseException]) -> Any:
    """An error of some kind among those that led to this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
