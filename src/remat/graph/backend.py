"""`torch.compile(model, backend="remat", options={"budget": "4GiB"})`: any model inside a budget, as one graph.

Dynamo hands over a graph, AOTAutograd makes the joint graph of it, and where it would split that into forward and
backward we put our own program. Everything around (mutated inputs, aliased outputs, autocast, symbolic shapes) stays
AOTAutograd's.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..sizes import format_bytes, parse_bytes
from .capture import capture, changed_inputs
from .dropout import decompositions
from .emission import emit
from .gates import Run, backward_function, forward_of, run_key, through_gates
from .graphs import Graph, Program
from .inplace_ops import candidates
from .liveness import uses
from .lowering import stepwise, straight
from .op_costs import estimated, measured
from .planning import WAITING_SHARE, GraphPlan, Planner

_KEY: Final = "remat_run_key"
_KNOWN: Final = ("budget", "gradients_exist")

_plans: deque[GraphPlan] = deque(maxlen=16)  # of this process, newest last
_frames: dict[int, tuple[Mapping[str, Any], set[Any]]] = {}  # by the options of one torch.compile: frames captured
_lock = threading.Lock()


def last_plan() -> GraphPlan | None:
    """The newest plan that this backend made in this process."""
    with _lock:
        return _plans[-1] if _plans else None


def remat_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend as Dynamo calls it; `Options` says what `options` may hold."""
    chosen = Options.from_mapping(options or {})
    _warn_of_parts(options, chosen)
    symbolic = any(_is_symbolic(x) for x in example_inputs)
    made = _by_size(module, chosen) if symbolic else _compiled(module, list(example_inputs), chosen)
    call: Callable[..., Any] = torch._dynamo.disable(  # type: ignore[no-untyped-call]
        made, reason="gates are autograd nodes of their own"
    )
    return call


def _compiled(module: fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    compilation = Compilation(options, [is_leaf(x) for x in inputs])
    return compilation.gated(aot_autograd(**compilation.parts)(module, inputs))


def _is_symbolic(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes)


def _by_size(module: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """A graph of symbolic sizes: bytes depend on them, so each set of sizes gets a plan when it is first met."""
    made: dict[Any, Callable[..., Any]] = {}
    read = _read_numbers(module)

    def call(*args: Any) -> Any:
        numbers = {place: args[place].item() for place in read}
        key = (*((*a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args), *numbers.values())
        if key not in made:
            made[key] = _compiled(_with_numbers(module, numbers), list(args), options)
        return made[key](*args)

    return call


def _read_numbers(module: fx.GraphModule) -> list[int]:
    """Arguments that are numbers in the guise of tensors: the graph reads them with `item`."""
    places = module.graph.find_nodes(op="placeholder")
    return [k for k, p in enumerate(places) if any((u.op, u.target) == ("call_method", "item") for u in p.users)]


def _with_numbers(module: fx.GraphModule, numbers: Mapping[int, Any]) -> fx.GraphModule:
    """The graph with these numbers in place of reading them, which cannot be done on paper."""
    graph = copy.deepcopy(module.graph)
    places = graph.find_nodes(op="placeholder")
    for place, number in numbers.items():
        for read in [u for u in places[place].users if (u.op, u.target) == ("call_method", "item")]:
            for user in list(read.users):
                user.args, user.kwargs = pytree.tree_map(
                    partial(_instead_of, read, number), (user.args, user.kwargs), is_leaf=_is_node
                )
            graph.erase_node(read)
    return fx.GraphModule(module, graph)


def _instead_of(read: fx.Node, number: Any, value: Any) -> Any:
    return number if value is read else value


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _warn_of_parts(options: Mapping[str, Any] | None, chosen: Options) -> None:
    """A model that is captured in parts gets the budget for each of them: say so."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    if options is None or chosen.budget_bytes is None or compile_id is None:
        return
    with _lock:
        _, frames = _frames.setdefault(id(options), (options, set()))
        new = compile_id.frame_id not in frames
        frames.add(compile_id.frame_id)
        parts = len(frames)
    if new and parts > 1:
        warnings.warn(
            f"the model is captured as {parts} graphs so far, and the budget of {format_bytes(chosen.budget_bytes)} "
            f"holds for each of them alone, so that together they may take up to {parts} times as much; "
            "TORCH_LOGS=graph_breaks says where they part",
            stacklevel=2,
        )


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
        planner = Planner(graph, gradients_exist=self.options.gradients_exist and plain, candidates=candidates(nodes))
        budget = self.options.budget_bytes
        self.plan = planner.plan(planner.plain_bytes if budget is None else budget)
        with _lock:
            _plans.append(self.plan)
        if plain:
            self.stops = stops_of(graph, self.plan.program, self.plan.budget_bytes // WAITING_SHARE)
        forward, backward = emit(joint, nodes, graph, self.plan.program, num_fwd_outputs, self.plan.in_place)
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
