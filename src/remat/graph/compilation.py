"""One graph as AOTAutograd compiles it: where it would split the joint graph, our own program is put."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..sizes import parse_bytes
from . import dropout, fusing
from .capture import capture, changed_inputs
from .emission import emit
from .gates import Run, backward_function, forward_of, run_key, through_gates
from .graphs import Graph, Program
from .inplace_ops import candidates
from .liveness import uses
from .lowering import stepwise, straight
from .op_costs import estimated, measured
from .planning import WAITING_SHARE, GraphPlan, Planner

_KEY: Final = "remat_run_key"
_KNOWN: Final = ("budget", "gradients_exist", "lowering")
_LOWERINGS: Final = ("eager", "inductor")

_plans: deque[GraphPlan] = deque(maxlen=16)  # of this process, newest last
_lock = threading.Lock()


def last_plan() -> GraphPlan | None:
    """The newest plan that this backend made in this process."""
    with _lock:
        return _plans[-1] if _plans else None


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options=...)` may say.

    Attributes:
        budget_bytes: most bytes over those at the start, forward and backward together; None: no recomputation.
        gradients_exist: whether parameters have a `.grad` into which gradients are added, so that they cost nothing.
        lowering: "eager" runs PyTorch's own operators, to eager's bits and the byte; "inductor" compiles pieces of the
            plan, faster, equal up to rounding.
    """

    budget_bytes: int | None = None
    gradients_exist: bool = False
    lowering: str = "eager"

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Options:
        """From text or numbers; raises ValueError for an unknown option or what is no size."""
        unknown = sorted(set(options) - set(_KNOWN))
        if unknown:
            raise ValueError(f"backend 'remat' knows the options {', '.join(_KNOWN)}, not {', '.join(unknown)}")
        budget, lowering = options.get("budget"), options.get("lowering", "eager")
        if lowering not in _LOWERINGS:
            raise ValueError(f"lowering is one of {', '.join(_LOWERINGS)}, not {lowering!r}")
        exist = bool(options.get("gradients_exist", False))
        return cls(None if budget is None else parse_bytes(budget), exist, lowering)


def is_leaf(value: Any) -> bool:
    """Whether a gradient of this argument goes to its `.grad`."""
    return isinstance(value, nn.Parameter) or (
        isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    )


class Compilation:
    """What AOTAutograd asks for while it compiles one graph.

    Args:
        options: budget and the like.
        leaves: for each argument, whether its gradient goes to `.grad`.
        choose: which plan to take; by default the fastest within the budget.
        watch: told of each call that may run backward, before its forward; what it returns surrounds the forward.
        known: a planner that may know this graph already.

    Attributes:
        planner: what the plan is from.
        plan: what runs; None until the joint graph is there, and where nothing needs a gradient.
        stops: arguments whose gradients are handed out together, in order; empty where all come at the end.
    """

    def __init__(
        self,
        options: Options,
        leaves: Sequence[bool],
        *,
        choose: Callable[[Planner], GraphPlan] | None = None,
        watch: Callable[[Run], AbstractContextManager[object]] | None = None,
        known: Planner | None = None,
    ) -> None:
        self.options = options
        self.leaves = leaves
        self.choose = choose or self._within_budget
        self.watch = watch or nullcontext
        self.planner = known
        self.plan: GraphPlan | None = None
        self.stops: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> dict[str, Any]:
        """Arguments for AOTAutograd."""
        return {
            "fw_compiler": self._forward_compiler,
            "bw_compiler": self._backward_compiler,
            "inference_compiler": self._forward_compiler,
            "partition_fn": self._partition,
            "decompositions": {**(fusing.decompositions() if self.fuses else {}), **dropout.decompositions()},
        }

    @property
    def fuses(self) -> bool:
        """Whether pieces are compiled by Inductor."""
        return self.options.lowering == "inductor"

    def gated(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What AOTAutograd made, behind the gates through which gradients come out early."""

        def call(*args: Any) -> Any:
            if not self.stops or not torch.is_grad_enabled():
                return compiled(*args)
            run = Run()
            passed = through_gates(run, self.stops, args)
            with forward_of(run), self.watch(run):
                return compiled(*passed)

        return call

    def _partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        primals = sum(node.op == "placeholder" and "tangents" not in str(node.target) for node in joint.graph.nodes)
        plain = primals == len(self.leaves)  # else arguments were merged or taken apart: gradients come at the end
        parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        graph, nodes = capture(
            joint,
            num_fwd_outputs,
            changed=changed_inputs(joint),
            parameters=[k for k, leaf in enumerate(self.leaves) if leaf] if plain else (),
            costs=estimated if parallel else measured,
        )
        exist, planner = self.options.gradients_exist and plain, self.planner
        if planner is None or planner.graph != graph or planner.gradients_exist != exist:
            overwritten = {} if self.fuses else candidates(nodes)  # Inductor decides that itself
            planner = self.planner = Planner(graph, gradients_exist=exist, candidates=overwritten)
        self.plan = self.choose(planner)
        with _lock:
            _plans.append(self.plan)
        if plain:
            self.stops = stops_of(graph, self.plan.program, self.plan.budget_bytes // WAITING_SHARE)
        forward, backward = emit(
            joint, nodes, graph, self.plan.program, num_fwd_outputs, self.plan.in_place, planner.segments.segment_of
        )
        _add_key(forward, backward, num_fwd_outputs)
        return forward, backward

    def _within_budget(self, planner: Planner) -> GraphPlan:
        budget = self.options.budget_bytes
        return planner.plan(planner.plain_bytes if budget is None else budget)

    def _backward_compiler(self, made: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        results: Any = made.graph.output_node().args[0]
        covered = {number for stop in self.stops for number in stop}
        rest = tuple(n for n, result in enumerate(results) if isinstance(result, fx.Node) and n not in covered)
        stops = [*self.stops, *([rest] if rest else [])]
        places = [node.name for node in made.graph.find_nodes(op="placeholder")]
        return backward_function(stepwise(self._lowered(made), stops), places.index(_KEY), len(results))

    def _forward_compiler(self, made: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # Our backward overwrites none of what was saved, so a graph that was retained can run backward again.
            context.fw_metadata.bw_donated_idxs = []
        run = straight(self._lowered(made))
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _lowered(self, made: fx.GraphModule) -> fx.GraphModule:
        return fusing.fused(made) if self.fuses else made


def stops_of(graph: Graph, program: Program, small_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Inputs whose gradients are handed out together: in order of existence, small ones with the next large one."""
    order = [gradient for step in uses(graph, program).finished for gradient in step]
    order += [g for g in graph.final_gradients if g not in set(order)]
    stops: list[tuple[int, ...]] = []
    waiting: list[int] = []
    waiting_bytes = 0
    for gradient in order:
        waiting += [number for number, g in enumerate(graph.gradients) if g == gradient]
        waiting_bytes += sum(graph.storages[s].bytes for s in graph.nodes[gradient].storages)
        if waiting_bytes >= small_bytes:
            stops.append(tuple(waiting))
            waiting, waiting_bytes = [], 0
    return tuple([*stops, tuple(waiting)] if waiting else stops)


def _add_key(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """The run's key, made by the forward, saved as its first tensor for the backward."""
    some = next(
        leaf
        for node in (*forward.graph.nodes, *backward.graph.nodes)
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    )
    value = some.new_empty((), dtype=torch.int64, device="cpu")
    output = forward.graph.output_node()
    with forward.graph.inserting_before(next(node for node in forward.graph.nodes if node.op != "placeholder")):
        key = forward.graph.call_function(run_key)
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    results.insert(forward_outputs, key)
    output.args = (tuple(results),)
    places = backward.graph.find_nodes(op="placeholder")
    with backward.graph.inserting_before(next(p for p in places if isinstance(p.meta.get("val"), torch.Tensor))):
        place = backward.graph.placeholder(_KEY)
    key.meta["val"] = place.meta["val"] = value
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
