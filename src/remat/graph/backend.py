"""`torch.compile(model, backend="remat", options={"budget": "4GiB"})`: any model inside a budget, as one graph.

Dynamo hands over a graph, AOTAutograd makes the joint graph of it, and where it would split that into forward and
backward we put our own program. Everything around (mutated inputs, aliased outputs, autocast, symbolic shapes) stays
AOTAutograd's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn

from ..sizes import parse_bytes
from .capture import capture, changed_inputs
from .dropout import decompositions
from .emission import emit
from .gates import Run, backward_function, forward_of, run_key, through_gates
from .graphs import Graph, Program
from .liveness import uses
from .lowering import stepwise, straight
from .op_costs import estimated, measured
from .planning import WAITING_SHARE, GraphPlan, Planner

_KEY: Final = "remat_run_key"
_KNOWN: Final = ("budget", "gradients_exist")

_plans: list[GraphPlan] = []  # of this process, newest last
_lock = threading.Lock()


def last_plan() -> GraphPlan | None:
    """The newest plan that this backend made in this process."""
    with _lock:
        return _plans[-1] if _plans else None


def remat_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend as Dynamo calls it; `Options` says what `options` may hold."""
    from torch._dynamo.backends.common import aot_autograd

    compilation = Compilation(Options.from_mapping(options or {}), [is_leaf(x) for x in example_inputs])
    compiled = aot_autograd(**compilation.parts)(module, list(example_inputs))
    call: Callable[..., Any] = torch._dynamo.disable(  # type: ignore[no-untyped-call]
        compilation.gated(compiled), reason="gates are autograd nodes of their own"
    )
    return call


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options=...)` may say.

    Attributes:
        budget_bytes: most bytes over those at the start, forward and backward together; None: no recomputation.
        gradients_exist: whether parameters have a `.grad` into which gradients are added, so that they cost nothing.
    """

    budget_bytes: int | None = None
    gradients_exist: bool = False

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Options:
        """From text or numbers; raises ValueError for an unknown option or what is no size."""
        unknown = sorted(set(options) - set(_KNOWN))
        if unknown:
            raise ValueError(f"backend 'remat' knows the options {', '.join(_KNOWN)}, not {', '.join(unknown)}")
        budget = options.get("budget")
        return cls(None if budget is None else parse_bytes(budget), bool(options.get("gradients_exist", False)))


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

    Attributes:
        plan: what runs; None until the joint graph is there, and where nothing needs a gradient.
        stops: arguments whose gradients are handed out together, in order; empty where all come at the end.
    """

    def __init__(self, options: Options, leaves: Sequence[bool]) -> None:
        self.options = options
        self.leaves = leaves
        self.plan: GraphPlan | None = None
        self.stops: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> dict[str, Any]:
        """Arguments for AOTAutograd."""
        return {
            "fw_compiler": _forward_compiler,
            "bw_compiler": self._backward_compiler,
            "inference_compiler": _forward_compiler,
            "partition_fn": self._partition,
            "decompositions": decompositions(),
        }

    def gated(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What AOTAutograd made, behind the gates through which gradients come out early."""

        def call(*args: Any) -> Any:
            if not self.stops or not torch.is_grad_enabled():
                return compiled(*args)
            run = Run()
            passed = through_gates(run, self.stops, args)
            with forward_of(run):
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
        planner = Planner(graph, gradients_exist=self.options.gradients_exist and plain)
        budget = self.options.budget_bytes
        self.plan = planner.plan(planner.plain_bytes if budget is None else budget)
        with _lock:
            _plans.append(self.plan)
        if plain:
            self.stops = stops_of(graph, self.plan.program, self.plan.budget_bytes // WAITING_SHARE)
        forward, backward = emit(joint, nodes, graph, self.plan.program, num_fwd_outputs)
        _add_key(forward, backward, num_fwd_outputs)
        return forward, backward

    def _backward_compiler(self, made: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        results: Any = made.graph.output_node().args[0]
        covered = {number for stop in self.stops for number in stop}
        rest = tuple(n for n, result in enumerate(results) if isinstance(result, fx.Node) and n not in covered)
        stops = [*self.stops, *([rest] if rest else [])]
        places = [node.name for node in made.graph.find_nodes(op="placeholder")]
        return backward_function(stepwise(made, stops), places.index(_KEY), len(results))


def _forward_compiler(made: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        # Our backward overwrites none of what was saved, so a graph that was retained can run backward again.
        context.fw_metadata.bw_donated_idxs = []
    run = straight(made)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


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
        for leaf in torch.utils._pytree.tree_leaves(node.meta.get("val"))
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
