"""`remat.scan`: a loop over time inside a memory budget, bit for bit the plain loop.

The whole loop is one node of the outer autograd graph. Its forward runs the schedule up to the first backward action,
its backward the rest. What the step can reach beside its arguments takes part as an input of that node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _autograd
from torch.nn.utils.rnn import PackedSequence

from .accumulators import keep_accumulators
from .ambient import States, is_transformed, opaque, recomputing
from .arrivals import Arrivals
from .bindings import brought_back
from .calls import Call
from .errors import KeptTensors, LateChange, LateGradient, StepError
from .inputs import Inputs, checked_lengths, fetched, masked, packed_lengths, packed_like
from .interpreter import Interpreter
from .kept import left_alone, left_if_stopped
from .knowledge import Planned, learn, learn_arrivals, nature_of, plan_of
from .loops import Loop, Outputs, Step
from .missed import MissedTensors
from .plans import Plan
from .recorded import needs_gradient, places_of
from .silence import silence
from .trees import Leaves


@opaque
def scan(
    step: Step,
    carry: Any,
    xs: Any = None,
    *,
    budget: int | str | None = None,
    length: int | None = None,
    lengths: Any = None,
    planner: str = "auto",
    check: bool = False,
    compile: bool | str = False,
) -> tuple[Any, Any]:
    """Run `carry, y = step(carry, x)` for every x, and train through it inside a memory budget.

    Equal to `for x in xs: carry, y = step(carry, x)` with the ys stacked, bit for bit: results, gradients, random
    stream. (As one function of its inputs: where a weight is used outside of the loop too, the loop's share of its
    gradient is added up first.) Between forward and backward only some carries and tapes are kept, and the rest is
    computed again, at the least extra time that the budget allows.

    Args:
        step: any function `(carry, x) -> (carry, y)`. It may use parameters and other tensors however it likes; they
            get their gradients. It must return a carry of the structure, shapes and dtypes that it was given.
        carry: the initial carry, a pytree of tensors and other values.
        xs: the inputs: a pytree whose tensors have shape (steps, ...), other leaves being the same in every step; a
            list with one pytree a step; a `PackedSequence`; a function of the step's number, with `length`; or an
            iterator, which is read to its end first.
        budget: how many bytes more than at its start the call may have allocated at any moment of its forward and
            backward together: an int, or text such as "512MiB"; None takes 90 % of what is free on the device.
        length: the number of steps, needed where xs does not tell.
        lengths: whole numbers, one for each sequence of the batch, which is dimension 0 of carries and outputs: a
            sequence that has ended keeps its state, and its outputs are zero. A `PackedSequence` brings its own.
        planner: the strategy, by name; "auto" takes the best for the chain.
        check: compare every replay with the first run, bit for bit, and raise where one differs; slow.
        compile: trace the step once and run it as a graph, which is faster, above all for gradients of weights: one
            product for many steps. Results and gradients are then those of the plain loop up to rounding. A step that
            cannot be traced (`plan_scan(...).explain()` says why) runs as it is. Inductor compiles the graph where
            there is a C++ compiler; "inductor" and "python" (made at once) choose, and refuse what cannot be.

    Returns:
        The final carry, and the outputs: a pytree whose tensors have shape (steps, ...), or packed sequences if xs is
        one; None stays None, and values that are no tensors come as lists.

    Raises:
        InfeasibleBudget: the budget is too small; says the smallest that works and what it is made of.
        StepError: the step or its inputs break the rules above.
        ValueError: the budget is not a size, or there is no such planner.
    """
    call = _call(step, carry, xs, length, lengths, check=check, compiled=compile)
    after, ys = _run(call, budget, planner)
    return after, packed_like(xs, ys) if isinstance(xs, PackedSequence) else ys


def plan_scan(
    step: Step,
    carry: Any,
    xs: Any = None,
    *,
    budget: int | str | None = None,
    length: int | None = None,
    lengths: Any = None,
    planner: str = "auto",
    compile: bool | str = False,
) -> Plan:
    """The plan that `scan` with the same arguments runs: schedule, predicted peak bytes and seconds.

    Measures the step if none like it was measured before; leaves no trace. Once a backward has shown which gradients
    arrive for what such a loop returns, its plan keeps room for no others, and stays within the budget if they do.

    Raises:
        As `scan`.
    """
    call = _call(step, carry, xs, length, lengths, compiled=compile)
    with torch.enable_grad():
        while True:
            try:
                with brought_back(call.stand_ins.bindings):
                    return plan_of(call, budget, planner).plan
            except MissedTensors as missed:
                call.captured += missed.tensors
            except KeptTensors as kept:
                call = call.keeping(kept.places)


def _call(
    step: Step,
    carry: Any,
    xs: Any,
    length: int | None,
    lengths: Any,
    *,
    check: bool = False,
    compiled: bool | str = False,
) -> Call:
    if compiled not in (False, True, "python", "inductor"):
        raise ValueError(f'compile is False, True, "python" or "inductor", not {compiled!r}')
    owned_bytes = 0
    if isinstance(xs, list | Iterator) or (callable(xs) and not isinstance(xs, torch.Tensor)):
        step, xs, owned_bytes = fetched(step, xs, length)
    inputs = Inputs(xs, length)
    inputs.owned_bytes = owned_bytes
    if isinstance(xs, PackedSequence):
        if lengths is not None:
            raise StepError("a PackedSequence brings its own lengths; leave lengths= out")
        lengths = packed_lengths(xs)
    if lengths is not None:
        step = masked(step, checked_lengths(lengths, inputs.length))
        inputs = inputs.numbered()
    return Call(step, carry, inputs, check=check, compiled=compiled)


def _run(call: Call, budget: int | str | None, planner: str) -> tuple[Any, Any]:
    while True:
        try:
            with left_if_stopped(call.places, _RESTARTS):
                carry, ys = _once(call, budget, planner)
                return call.returned(carry), ys
        except MissedTensors as missed:
            call.captured += missed.tensors
        except KeptTensors as kept:
            call = call.keeping(kept.places)
        except LateChange as late:
            learn(call, nature_of(call).needed._replace(changes=frozenset(late.numbers)))
        except LateGradient as late:
            learn(call, late.needed)


def _once(call: Call, budget: int | str | None, planner: str) -> tuple[Any, Any]:
    """The loop, as far as it is known; what turns out on the way is raised as one of `_RESTARTS`."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise StepError(
            "remat.scan cannot be captured into a CUDA graph: what it does between the steps, such as keeping random "
            "states, would not be replayed; capture the step, and let scan run the captured step"
        )
    if is_transformed(call.tensors()):
        return _transformed(call)
    if not torch.is_grad_enabled():
        return _plain(call)
    with brought_back(call.stand_ins.bindings):
        return _budgeted(call, budget, planner)


def _budgeted(call: Call, budget: int | str | None, planner: str) -> tuple[Any, Any]:
    """The loop by its plan, if anything needs a gradient."""
    accumulators = keep_accumulators(call.tensors())
    planned = plan_of(call, budget, planner)
    call.leave_unread(planned.nature.unread)
    if not any(map(needs_gradient, call.tensors())):
        return _plain(call)
    packing = _Packing()
    flat = _Scan.apply(call, planned, packing, *call.tensors())
    del accumulators  # the node keeps them now
    call.release()
    return packing.unpack(flat)


def _plain(call: Call) -> tuple[Any, Any]:
    """The loop with nothing to differentiate: it keeps nothing."""
    outputs = Outputs(call.length)
    loop = call.loop(outputs, call.carry, call.inputs.leaves)
    carry = list(call.carry)
    with torch.no_grad():
        for index in range(call.length):
            carry, results = loop.run(index, carry, loop.inputs(index, recording=False), first=True)
            loop.emit(index, results)
            del results
    outputs.flush()
    return _returned(loop, carry, outputs.buffers)


def _returned(loop: Loop, carry: Leaves, outputs: Leaves) -> tuple[Any, Any]:
    """What the plain loop returns, the very tensors that the last step handed on."""
    assert loop.output_structure is not None, "at least one step has run"
    return loop.structure.build(carry), loop.output_structure.build(outputs)


def _transformed(call: Call) -> tuple[Any, Any]:
    """The loop as people write it, for transforms that want to see every operation."""
    loop = call.loop(None, call.carry, call.inputs.leaves)
    carry = list(call.carry)
    steps: list[Leaves] = []
    for index in range(call.length):
        carry, results = loop.run(index, carry, call.inputs.at(index), first=True)
        steps.append(results)
    stacked = [
        torch.stack(leaves) if isinstance(leaves[0], torch.Tensor) else None if leaves[0] is None else list(leaves)
        for leaves in zip(*steps, strict=True)
    ]
    return _returned(loop, carry, stacked)


_RESTARTS = (MissedTensors, KeptTensors, LateChange, LateGradient)


class _Packing:
    """Final carry and outputs as a flat tuple of tensors, which is all that an autograd node passes, and back."""

    def pack(self, carry: Leaves, outputs: Leaves, loop: Loop) -> tuple[torch.Tensor, ...]:
        """The tensors, those of the carry first and each once."""
        self.places = places_of(carry)
        self.numbers = [number for number, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)]
        assert loop.output_structure is not None, "at least one step has run"
        self._structure, self._output_structure = loop.structure, loop.output_structure
        index_of = {id(carry[place]): index for index, place in enumerate(self.places)}
        self._carry = [_Index(index_of[id(leaf)]) if isinstance(leaf, torch.Tensor) else leaf for leaf in carry]
        index_of = {number: len(self.places) + index for index, number in enumerate(self.numbers)}
        self._outputs = [_Index(index_of[n]) if n in index_of else leaf for n, leaf in enumerate(outputs)]
        return (*(carry[place].detach() for place in self.places), *(outputs[number] for number in self.numbers))

    def sorted(self, gradients: Sequence[torch.Tensor | None], width: int, outputs: int) -> tuple[Leaves, Leaves]:
        """Gradients of the flat tuple by leaf of the carry, and by output."""
        arrived = iter(gradients)
        adjoint: Leaves = [None] * width
        stacked: Leaves = [None] * outputs
        for place in self.places:
            adjoint[place] = next(arrived)
        for number in self.numbers:
            stacked[number] = next(arrived)
        return adjoint, stacked

    def unpack(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """What the plain loop would have returned."""
        carry, outputs = (
            structure.build([tensors[leaf.value] if isinstance(leaf, _Index) else leaf for leaf in leaves])
            for structure, leaves in ((self._structure, self._carry), (self._output_structure, self._outputs))
        )
        return carry, outputs


class _Index(NamedTuple):
    """The place of a tensor in the flat tuple."""

    value: int


class _Scan(torch.autograd.Function):
    """The loop as one autograd node.

    Between forward and backward its context keeps the interpreter with its slots and tapes. A second backward over a
    retained graph finds it used up, and runs the forward half of the schedule again from the initial carry.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, planned: Planned, packing: _Packing, *tensors: torch.Tensor) -> Any:
        nature = planned.nature
        states = States(call.sources, call.streams | nature.needed.changes, nature.needed.changes)
        outputs = Outputs(call.length)
        try:
            run, loop, carry = _forward(call, planned, states, outputs, tensors)
            call.check_needs(loop, nature)
            run.settle()
        except _RESTARTS:
            states.rewind()
            raise
        packed = packing.pack(carry, outputs.buffers, loop)
        needs = [needs_gradient(carry[place]) for place in packing.places]
        output_needs = nature.needed.outputs if loop.seen is None else loop.seen.outputs
        needs += [output_needs[number] for number in packing.numbers]
        ctx.mark_non_differentiable(*(t for t, need in zip(packed, needs, strict=True) if not need))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.loop = run, loop
        ctx.call, ctx.planned, ctx.states, ctx.packing = call, planned, states, packing
        return packed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise StepError(
                "gradients of remat.scan cannot be differentiated again (create_graph=True); run the plain loop where "
                "second derivatives are needed"
            )
        call, states, planned = ctx.call, ctx.states, ctx.planned
        tensors = ctx.saved_tensors  # raises if they were changed in place, or are gone with the graph
        run, loop, ctx.run, ctx.loop = ctx.run, ctx.loop, None, None
        adjoint, stacked = ctx.packing.sorted(gradients, len(call.carry), len(planned.nature.needed.outputs))
        learn_arrivals(planned.key, Arrivals.of(adjoint, stacked))
        names = brought_back(call.bindings)  # before states, which go their own way
        with states.undisturbed(), left_alone(call.places), names, silence():
            again = planned.with_room(adjoint, stacked)
            if again is not None:
                run = loop = None  # with all that they keep
            if run is None:
                with call.surroundings.entered(), recomputing():
                    states.restore(states.start)
                    run, loop, _ = _forward(call, again or planned, states, None, tensors)
            if planned.looked is not None:
                call.look_at_all(run)
            found = run.backward(adjoint, stacked)
            if planned.looked is not None:
                planned.looked()
        if not _autograd._get_current_graph_task_keep_graph():
            ctx.call = ctx.states = None  # a step may lead to what leads here
        inputs = iter(loop.input_gradients())
        given = [next(inputs) if need else None for need in call.input_needs]
        return *(None,) * 3, *(found.carry[place] for place in call.carry_places), *call.merged(given, found.captured)


def _forward(
    call: Call, planned: Planned, states: States, outputs: Outputs | None, tensors: Sequence[torch.Tensor]
) -> tuple[Interpreter, Loop, Leaves]:
    """The schedule up to its first backward action, on the tensors that autograd has in its keeping."""
    carry, inputs = call.bound(tensors)
    loop = call.loop(outputs, carry, inputs)
    schedule = iter(planned.plan.schedule)
    run = call.interpreter(loop, planned.nature, schedule, carry, states, call.length, turned=planned.turned)
    final = run.forward()
    if outputs is not None:
        outputs.flush()
    loop.outputs = None
    call.check_end(run)
    return run, loop, final
