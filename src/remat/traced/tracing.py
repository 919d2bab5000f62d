"""The step and its derivative as one functional graph over aten operators, or a reason why there is none.

The step runs once on fake tensors, under PyTorch's own tracer, with autograd inside: whatever it does about gradients
(functions of its own, hooks, parts without gradient, derivatives taken inside) is in the graph as it is. Fake tensors
have no values, so a step that looks at one cannot be traced, and is not traced wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..recorded import can_need, hooks_set_aside
from ..trees import Leaves, Structure
from .convolutions import taken_apart
from .graphs import is_random, name_of, remove_dead, simplified, value_of
from .layouts import convolves, lay_out_weights, with_channels_last


class NotTraceable(Exception):
    """There is no graph of a step; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class Problem:
    """What is traced.

    Attributes:
        step: `(carry, x) -> (carry, y)`.
        structure, carry: of the carry: its leaves say shapes and plain values.
        input_structure, inputs: of x.
        needs: which leaves of the carry need a gradient.
        captured: tensors that the step can reach and that need a gradient.
        reached: all tensors that it can reach.
        copies: whether it changes its carry in place.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    structure: Structure
    carry: Leaves
    input_structure: Structure
    inputs: Leaves
    needs: Sequence[bool]
    captured: Sequence[torch.Tensor]
    reached: Sequence[torch.Tensor]
    copies: bool = False


@dataclass
class Joint:
    """A step and its derivative as one graph.

    Attributes:
        graph: functional, over aten operators; every node has its fake value in `meta["val"]`.
        carries, inputs: placeholders by leaf; leaves that are no tensors have none.
        tangents: placeholders of the gradients that arrive, by result: carry leaves first, then outputs.
        externals: placeholders of tensors beside the arguments, by their number among those that the step can reach.
        constants: tensors that the step makes of numbers.
        after, outputs: nodes of the results by leaf, or plain values.
        carry_gradients, input_gradients: nodes by leaf.
        captured_gradients: nodes by number of the captured tensor.
        needing: which results need a gradient, carry leaves first.
        output_structure: of y.
    """

    graph: fx.Graph
    carries: dict[int, fx.Node]
    inputs: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    externals: dict[fx.Node, int]
    constants: dict[fx.Node, torch.Tensor]
    after: list[Any]
    outputs: list[Any]
    carry_gradients: dict[int, fx.Node]
    input_gradients: dict[int, fx.Node]
    captured_gradients: dict[int, fx.Node]
    needing: list[bool]
    output_structure: Structure


@dataclass
class _Seen:
    """What a traced run leaves beside its graph."""

    after: Leaves = field(default_factory=list)
    outputs: Leaves = field(default_factory=list)
    output_structure: Structure | None = None
    needing: list[bool] = field(default_factory=list)
    tangents: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)  # of those asked for, which there are
    draws: int = 0  # from streams of random numbers, in the forward


def trace(problem: Problem) -> Joint:
    """The graph of a step.

    Raises:
        NotTraceable: there is none.
    """
    joint = _traced(problem, channels_last=False)
    if convolves(joint.graph.nodes) and any(map(with_channels_last, problem.carry)):
        return _traced(problem, channels_last=True)
    return joint


def _traced(problem: Problem, *, channels_last: bool) -> Joint:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tracer = _Tracer(problem, FakeTensorMode(allow_non_fake_inputs=True), channels_last=channels_last)
    try:
        with hooks_set_aside(problem.captured):
            module, values, tangents = tracer.traced()
    except NotTraceable:
        raise
    except Exception as error:  # whatever a step and its libraries may raise on tensors without values
        first = (str(error).strip().splitlines() or [""])[0]
        raise NotTraceable(f"it cannot run on tensors without values: {type(error).__name__}: {first}") from None
    return tracer.assembled(module, values, tangents)


class _Tracer:
    def __init__(self, problem: Problem, mode: Any, *, channels_last: bool) -> None:
        self.problem, self.mode, self.channels_last = problem, mode, channels_last
        self.seen = _Seen()
        with mode:
            self.carry = [self._blank(leaf) for leaf in problem.carry]
            self.inputs = [self._fake(leaf) for leaf in problem.inputs]

    def _fake(self, leaf: Any) -> Any:
        return self.mode.from_tensor(leaf.detach(), static_shapes=True) if isinstance(leaf, torch.Tensor) else leaf

    def _blank(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device, memory_format=self._format(leaf))

    def _format(self, leaf: torch.Tensor) -> torch.memory_format:
        """The layout of what goes from step to step."""
        return torch.channels_last if self.channels_last and with_channels_last(leaf) else torch.contiguous_format

    def _laid_out(self, leaf: Any) -> Any:
        return leaf.contiguous(memory_format=self._format(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    def traced(self) -> tuple[fx.GraphModule, list[torch.Tensor], int]:
        """Run twice: once to see which results need a gradient, once to trace them with their gradients.

        Returns:
            The graph, the tensors beside its arguments that it takes last, and how many gradients arrive.
        """
        tensors = [leaf for leaf in (*self.carry, *self.inputs) if isinstance(leaf, torch.Tensor)]
        with self.mode:
            results = self._results(tensors)
            after, outputs = len(self.carry), torch.contiguous_format
            tangents = [
                self._blank(results[k]) if k < after else torch.empty_like(results[k], memory_format=outputs)
                for k in self.seen.tangents
            ]
            module = _make_fx(self._forward_and_backward, (*tensors, *tangents))
        self._check_values()
        lifted, values = _lifted(module)
        with self.mode:
            faked = [self.mode.from_tensor(value.detach(), static_shapes=True) for value in values]
            module = _make_fx(torch.func.functionalize(lifted, remove="mutations"), (*tensors, *tangents, *faked))
        return module, values, len(tangents)

    # ---- what is traced

    def _results(self, tensors: Sequence[torch.Tensor]) -> Leaves:
        stream = iter(tensors)
        problem, needs = self.problem, self.problem.needs
        carry = [next(stream) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.carry]
        inputs = [next(stream) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.inputs]
        self.wanted = []
        for place, leaf in enumerate(carry):
            if isinstance(leaf, torch.Tensor):
                carry[place] = leaf.detach().requires_grad_(needs[place] and can_need(leaf))
                self.wanted += [carry[place]] if carry[place].requires_grad else []
        self.carries = len(self.wanted)
        for place, leaf in enumerate(inputs):
            if isinstance(leaf, torch.Tensor):
                inputs[place] = leaf.detach().requires_grad_(problem.inputs[place].requires_grad)
                self.wanted += [inputs[place]] if inputs[place].requires_grad else []
        self.wanted += problem.captured
        with torch.enable_grad():
            hooked = [*map(_hooks, carry), *map(_hooks, problem.captured)]
            given = [leaf.clone() if isinstance(leaf, torch.Tensor) and problem.copies else leaf for leaf in carry]
            inputs = list(map(self._laid_out, inputs)) if self.channels_last else inputs
            result = problem.step(problem.structure.build(given), problem.input_structure.build(inputs))
            if type(result) is not tuple or len(result) != 2:
                raise NotTraceable("it does not return (carry, y)")
            if hooked != [*map(_hooks, given if problem.copies else carry), *map(_hooks, problem.captured)]:
                raise NotTraceable(
                    "it hangs hooks on its carry or weights, which belong to the whole of their gradients"
                )
            seen = self.seen
            seen.after = list(map(self._laid_out, problem.structure.flatten(result[0])))
            seen.output_structure = Structure(result[1])
            seen.outputs = seen.output_structure.flatten(result[1])
        results = [*seen.after, *seen.outputs]
        seen.needing = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in results]
        seen.tangents = [number for number, need in enumerate(seen.needing) if need]
        return results

    def _forward_and_backward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        count = sum(isinstance(leaf, torch.Tensor) for leaf in (*self.carry, *self.inputs))
        results = self._results(tensors[:count])
        self.seen.draws = _draws()
        found: Sequence[torch.Tensor | None] = [None] * len(self.wanted)
        if self.seen.tangents and self.wanted:
            roots = [results[number] for number in self.seen.tangents]
            found = torch.autograd.grad(roots, self.wanted, tensors[count:], allow_unused=True)
        self.seen.gradients = [number for number, gradient in enumerate(found) if gradient is not None]
        there = [
            self._laid_out(gradient) if number < self.carries else gradient
            for number, gradient in enumerate(found)
            if gradient is not None
        ]
        if _draws() != self.seen.draws:
            raise NotTraceable("it draws random numbers in its backward")
        return [leaf.detach() for leaf in results if isinstance(leaf, torch.Tensor)] + there

    def _check_values(self) -> None:
        pairs = zip(self.problem.carry, self.seen.after, self.problem.structure.paths(), strict=True)
        for before, after, path in pairs:
            tensors = isinstance(before, torch.Tensor), isinstance(after, torch.Tensor)
            if tensors[0] != tensors[1]:
                raise NotTraceable(f"the leaf {path} of the carry becomes another kind of value")
            if not tensors[0] and (type(before) is not type(after) or before != after):
                raise NotTraceable(f"the plain value {path} in the carry changes from step to step; make it a tensor")
            if tensors[0] and (before.shape != after.shape or before.dtype != after.dtype):
                raise NotTraceable(f"the leaf {path} of the carry changes its shape or dtype")

    # ---- the result

    def assembled(self, module: fx.GraphModule, values: list[torch.Tensor], tangents: int) -> Joint:
        """The graph, its inputs and results by what they are."""
        graph = simplified(module)
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        stream = iter(holders)
        carries = {k: next(stream) for k, leaf in enumerate(self.carry) if isinstance(leaf, torch.Tensor)}
        inputs = {k: next(stream) for k, leaf in enumerate(self.inputs) if isinstance(leaf, torch.Tensor)}
        arriving = {number: next(stream) for number, _ in zip(self.seen.tangents, range(tangents), strict=True)}
        externals, constants = self._sorted(dict(zip(stream, values, strict=True)))
        if self.channels_last:
            lay_out_weights(graph, set(externals))
        taken_apart(graph)
        remove_dead(graph)
        found = list(next(node for node in graph.nodes if node.op == "output").args[0])
        results = [found.pop(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._all_results()]
        width = len(self.carry)
        assert self.seen.output_structure is not None
        joint = Joint(
            graph, carries, inputs, arriving, externals, constants, results[:width], results[width:],
            {}, {}, {}, self.seen.needing, self.seen.output_structure,
        )  # fmt: skip
        self._name_gradients(joint, found)
        _check(joint)
        return joint

    def _all_results(self) -> Leaves:
        return [*self.seen.after, *self.seen.outputs]

    def _name_gradients(self, joint: Joint, found: list[fx.Node]) -> None:
        places: list[tuple[dict[int, fx.Node], int]] = []
        for place, leaf in enumerate(self.carry):
            if isinstance(leaf, torch.Tensor) and self.problem.needs[place] and can_need(leaf):
                places.append((joint.carry_gradients, place))
        for place, leaf in enumerate(self.problem.inputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                places.append((joint.input_gradients, place))
        places += [(joint.captured_gradients, number) for number in range(len(self.problem.captured))]
        for number, node in zip(self.seen.gradients, found, strict=True):
            owner, place = places[number]
            owner[place] = node

    def _sorted(self, values: dict[fx.Node, torch.Tensor]) -> tuple[dict[fx.Node, int], dict[fx.Node, torch.Tensor]]:
        """Tensors that the step reaches, and those that it makes of numbers: these are copied first of all."""
        number_of = {id(tensor): number for number, tensor in enumerate(self.problem.reached)}
        externals: dict[fx.Node, int] = {}
        constants: dict[fx.Node, torch.Tensor] = {}
        for node, value in values.items():
            if id(value) in number_of:
                externals[node] = number_of[id(value)]
            elif all(name_of(user) in _COPIES for user in node.users):
                constants[node] = value
            else:
                raise NotTraceable(f"it uses a tensor of shape {list(value.shape)} that cannot be found from it")
        return externals, constants


_COPIES = ("aten.clone.default", "aten.lift_fresh_copy.default")


def _make_fx(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="real", _error_on_data_dependent_ops=True)(*inputs)


def _hooks(leaf: Any) -> int:
    return len(leaf._backward_hooks or ()) if isinstance(leaf, torch.Tensor) else 0


def _draws() -> int:
    """How many draws from random streams the graph being traced has."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return 0 if mode is None else sum(map(is_random, mode.tracer.graph.nodes))


def _lifted(module: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Tensors that became constants of the graph, as inputs of it behind the others."""
    graph = module.graph
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    holders: dict[str, fx.Node] = {}
    values: list[torch.Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in holders:
            values.append(getattr(module, node.target))
            with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
                last = holders[node.target] = graph.placeholder(node.target)
        node.replace_all_uses_with(holders[node.target])
        graph.erase_node(node)
    module.recompile()
    return module, values


_FUSED = ("aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default", "aten.miopen_rnn.default")


def _check(joint: Joint) -> None:
    """Refuse what a replay would not reproduce."""
    for node in joint.graph.nodes:
        if name_of(node) in _FUSED:
            raise NotTraceable("it calls a fused recurrent layer, for which remat.recurrent is made")
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                raise NotTraceable(f"it changes a tensor in place that it has not made, by {node.target}")
        elif node.op not in ("placeholder", "output"):
            raise NotTraceable(f"it contains {node.op} {node.target}")
        if node.op == "call_function" and not _is_tensors(value_of(node)):
            raise NotTraceable(f"{node.target} returns no tensor")
    for node in (*joint.carry_gradients.values(), *joint.input_gradients.values(), *joint.captured_gradients.values()):
        if value_of(node).layout is not torch.strided:
            raise NotTraceable("it has sparse gradients")


def _is_tensors(value: Any) -> bool:
    """Whether an operator's result is a tensor, or several of which some may not have been asked for."""
    if isinstance(value, tuple | list):
        return all(each is None or isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, torch.Tensor)
