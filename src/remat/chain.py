"""`remat.chain`: a loop over layers inside a memory budget, bit for bit the plain loop.

Every block is one small node of the outer autograd graph, whose backward drives one interpreter on until the block's
own backward is done. So a block's gradients are where they belong, and its hooks have fired, before the next block's
backward begins. Between nodes go scalars: the carries and adjoints live in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from .accumulators import keep_accumulators
from .ambient import States, is_transformed, opaque, recomputing
from .bindings import Binding, brought_back, moved
from .blocks.block import Block
from .blocks.calls import ChainCall, copied_stages, in_need
from .blocks.granularity import by_plan, keeps_all, settled
from .blocks.survey import Known, storage_bytes, untraced
from .errors import LateChange, StepError
from .interpreter import Interpreter
from .missed import MissedTensors
from .plans import Plan
from .ranges import AutogradRanges, Replays
from .recorded import detached, hooks_set_aside, needs_gradient, places_of
from .silence import silence
from .standins import StandIns
from .sums import Captured
from .trees import Leaves, leaves_of

_NODES: Final = 128  # of every tape kept by the forward are looked at for what the walk from the blocks had missed


@opaque
def chain(
    blocks: Iterable[Callable[..., Any]],
    x: Any,
    *shared: Any,
    budget: int | str | None = None,
    planner: str = "auto",
    check: bool = False,
    **shared_kwargs: Any,
) -> Any:
    """Run `for block in blocks: x = block(x, *shared, **shared_kwargs)`, and train through it inside a memory budget.

    Equal to that loop bit for bit: results, gradients, buffers, random stream. Between forward and backward only some
    of the values between blocks, and some blocks' tapes, are kept; the rest is computed again, at the least extra time
    that the budget allows. A block's gradients arrive before the backward of the block in front of it begins.

    Args:
        blocks: any callables, an `nn.Sequential` or `nn.ModuleList` for instance. They may use parameters and other
            tensors however they like, may be tied, and may return carries of any structure and shapes, each what the
            next one takes.
        x: what the first block takes: a pytree of tensors and other values.
        shared: what every block takes after it: masks, positions, conditioning, with or without gradients.
        budget: how many bytes more than at its start the call may have allocated at any moment of its forward and
            backward together: an int, or text such as "512MiB"; None takes 90 % of what is free on the device.
        planner: the strategy, by name; "auto" takes the best for the chain.
        check: compare every replay with the first run, bit for bit, and raise where one differs; slow.
        shared_kwargs: what every block takes by name.

    Returns:
        What the last block returns.

    Raises:
        InfeasibleBudget: the budget is too small; says the smallest that works and what it is made of.
        StepError: a block breaks the rules above.
        ValueError: the budget is not a size, or there is no such planner.
    """
    return _run(list(blocks), x, shared, shared_kwargs, budget=budget, planner=planner, check=check)


@opaque
def chain_by_plan(
    blocks: Sequence[Callable[..., Any]], x: Any, shared: tuple[Any, ...], budget: int, made: Plan | None
) -> Any:
    """`chain` by a plan that was made for these blocks as they are; within a budget by any, where they cost more now.

    Args:
        blocks, x, shared: as `chain` takes them.
        budget: in bytes.
        made: the plan; None: any within the budget.
    """
    return _run(list(blocks), x, shared, {}, budget=budget, made=made)


def _run(
    functions: list[Callable[..., Any]],
    x: Any,
    shared: tuple[Any, ...],
    shared_kwargs: dict[str, Any],
    *,
    budget: int | str | None,
    planner: str = "auto",
    check: bool = False,
    made: Plan | None = None,
) -> Any:
    reached = [Block(function) for function in functions]
    tensors = [*_tensors_in(x, shared, shared_kwargs), *(tensor for block in reached for tensor in block.tensors)]
    if not torch.is_grad_enabled() or is_transformed(tensors):
        return _plain(functions, x, shared, shared_kwargs)
    _accumulators = keep_accumulators(tensors)  # until nodes of the chain keep them
    del tensors
    front = front_of(functions, x, shared, shared_kwargs)
    x = _plain(functions[:front], x, shared, shared_kwargs)
    if front == len(functions):
        return x
    missed: list[torch.Tensor] = []
    late = frozenset[int]()
    stand_ins = stand_ins_of(reached, shared, shared_kwargs)
    around = stand_ins.within((shared, shared_kwargs))
    del reached

    def start(blocks: Sequence[Any]) -> ChainCall:
        call = ChainCall(blocks, x, *around, check=check, missed=missed)
        call.made_bytes = storage_bytes(call.carry) if front else 0
        return call

    while True:
        try:
            with brought_back(stand_ins.bindings):
                found = None if made is None else by_plan(start(functions[front:]), made)
                call, known, plan = found or settled(functions[front:], start, budget, planner)
                if check or not keeps_all(plan):
                    return _Work(call, known, plan, late, stand_ins).outputs()
            return _plain(functions[front:], x, shared, shared_kwargs)
        except MissedTensors as found_more:
            missed += found_more.tensors
        except LateChange as changed:
            late = late.union(changed.numbers)


def plan_chain(
    blocks: Iterable[Callable[..., Any]],
    x: Any,
    *shared: Any,
    budget: int | str | None = None,
    planner: str = "auto",
    **shared_kwargs: Any,
) -> Plan:
    """The plan that `chain` with the same arguments runs: schedule, predicted peak bytes and seconds.

    Blocks in front that need no gradient are no part of it. Measures blocks if none like them were measured before;
    leaves no trace.

    Raises:
        As `chain`; and StepError if nothing needs a gradient, so that there is nothing to plan.
    """
    functions = list(blocks)
    front = front_of(functions, x, shared, shared_kwargs)
    if front == len(functions):
        raise StepError("no block needs a gradient, so nothing is kept and there is nothing to plan")
    x = untraced(functions[:front], x, shared, shared_kwargs)
    missed: list[torch.Tensor] = []
    stand_ins = stand_ins_of([Block(function) for function in functions], shared, shared_kwargs)
    around = stand_ins.within((shared, shared_kwargs))

    def start(blocks: Sequence[Any]) -> ChainCall:
        call = ChainCall(blocks, x, *around, missed=missed)
        call.made_bytes = storage_bytes(call.carry) if front else 0
        return call

    while True:
        try:
            with brought_back(stand_ins.bindings):
                return settled(functions[front:], start, budget, planner).plan
        except MissedTensors as found:
            missed += found.tensors


def _plain(functions: Sequence[Callable[..., Any]], x: Any, shared: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The loop as people write it."""
    for function in functions:
        x = function(x, *shared, **named)
    return x


def front_of(functions: Sequence[Callable[..., Any]], x: Any, shared: tuple[Any, ...], named: dict[str, Any]) -> int:
    """How many blocks in front need no gradient: nothing of them has to be kept, so they are just run."""
    if in_need(leaves_of((x, shared, named))):
        return 0
    return next((k for k, function in enumerate(functions) if Block(function).captured), len(functions))


def _tensors_in(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]


def stand_ins_of(blocks: Sequence[Block], shared: tuple[Any, ...], named: dict[str, Any]) -> StandIns:
    """What stands in for tensors that were made of others which blocks use too.

    Raises:
        StepError: there are some to which no name leads.
    """
    given = [tensor for tensor in _tensors_in(shared, named) if tensor.requires_grad]
    used = list({id(tensor): tensor for tensor in (*given, *(t for b in blocks for t in b.captured))}.values())
    if all(tensor.is_leaf for tensor in used):
        return StandIns((), ())
    found = StandIns(used, (binding for block in blocks for binding in block.bindings), given)
    if len(found.tensors) < len(used):
        raise StepError(
            "blocks use a tensor, and something that was made of it before the chain, which no attribute, variable or "
            "dictionary holds, but a list or tuple does, so that their gradients cannot be told apart; let one hold it"
        )
    return found


class _Work:
    """A chain between the forward and the end of its backward: what its nodes have in common.

    Attributes:
        call, known, plan: what is run.
        run: the interpreter with its slots and tapes, until the backward has used it up. A second backward over a
            retained graph runs the forward half of the schedule again.
    """

    def __init__(
        self, call: ChainCall, known: Sequence[Known], made: Plan, late: frozenset[int], stand_ins: StandIns
    ) -> None:
        self.call, self.plan, self._stand_ins = call, made, stand_ins
        self._needs = [list(map(needs_gradient, call.carry)), *(list(of.leaving.needs) for of in known)]
        self._copies, self._grad_mode = copied_stages(known), [of.grad_mode for of in known]
        self._carry: Leaves | None = detached(call.carry)
        self.blocks = call.stages(known)
        drawn = late.union(*(of.draws for of in known))
        self.states = States(call.streams, drawn)
        self.run: Interpreter | None = None
        self._moved: list[Binding] = []  # what names in blocks stood for, and do not at the time of the backward
        self._gone = torch.zeros(())

    # ---- forward

    def outputs(self) -> Any:
        """Run the forward and build the nodes; returns what the last block returned."""
        call = self.call
        try:
            with torch.no_grad():
                final = self._start()
                self._check()
                assert self.run is not None
                self.run.settle()
        except (MissedTensors, LateChange, StepError):
            self.undo()
            raise
        self.final_places, self._width = places_of(final), len(final)
        self.final = [final[place].detach() for place in self.final_places]
        self.final_needs = [needs_gradient(final[place]) for place in self.final_places]
        index_of = {id(final[place]): number for number, place in enumerate(self.final_places)}
        structure = self.blocks.structures[-1]
        assert structure is not None
        numbers = [index_of[id(leaf)] if isinstance(leaf, torch.Tensor) else None for leaf in final]
        found: Any = torch.zeros(())
        for index in range(call.length):
            captured = self._stand_ins.originals(call.captured[number] for number in call.used[index])
            entering = (call.carry[place] for place in call.carry_places) if index == 0 else ()
            found = _Block.apply(self, index, found, *entering, *captured)
        outputs, self.final, call.carry = found, [], []  # autograd has in its keeping what carry 0 leads to
        leaves = [leaf if number is None else outputs[number] for leaf, number in zip(final, numbers, strict=True)]
        return structure.build(leaves)

    def _start(self) -> Leaves:
        """The schedule up to its first backward action, on a new interpreter."""
        call, carry = self.call, self._carry
        assert carry is not None, "autograd lets nobody go through a graph that it has let go"
        captured = Captured(call.captured, call.used)
        recorder = AutogradRanges(
            self.blocks,
            call.length,
            needs=self._needs.__getitem__,
            captured=captured,
            copies=self._copies.__getitem__,
            replays=Replays(self.states, call.surroundings),
        )
        self.run = Interpreter(
            recorder,
            iter(self.plan.schedule),
            call.length,
            carry,
            states=self.states,
            surroundings=call.surroundings,
            copies=self._copies.__getitem__,
            grad_mode=self._grad_mode.__getitem__,
            singly=True,
        )
        return self.run.forward()

    def _check(self) -> None:
        """Look for what the walk from the blocks may have missed in the tapes at hand; each kind was looked at once."""
        run = self.run
        assert run is not None
        assert isinstance(run.recorder, AutogradRanges)
        for stop, tape in run.tapes.items():
            block = self.call.blocks[stop - 1]
            if not block.plain:
                captured = [run.captured.tensors[number] for number in tape.captured]
                block.lookout(captured).look(*run.recorder.newest(tape), _NODES)

    def _look_at(self, run: Interpreter, index: int) -> None:
        """Let the backward of a block of any kind check its range first."""
        block = self.call.blocks[index]
        assert isinstance(run.recorder, AutogradRanges)
        run.recorder.look = None if block.plain else block.lookout(run.captured.tensors).look_late

    def undo(self) -> None:
        """Put everything back for a forward that starts again."""
        self.run = None
        self.states.restart()
        self.blocks.restart()

    # ---- backward

    def backward(self, index: int, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run on until the backward of a block is done; returns the gradients of what its node took."""
        call = self.call
        if index == call.length - 1:
            self._arrive(gradients)
        run = self.run
        assert run is not None
        captured, used = run.captured, call.used[index]
        self._look_at(run, index)
        with hooks_set_aside([captured.tensors[number] for number in used]):
            run.backward_of(index, self._replaying)
        # What earlier blocks use too is theirs to hand out: the sum goes on.
        ready = [number for number in used if captured.first[number] == index]
        of_number = dict(zip(ready, captured.take(ready), strict=True))
        if index:
            found: list[torch.Tensor | None] = [self._gone]
        else:
            found = [None, *(run.adjoint[place] for place in call.carry_places)]
            self.run = None
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self._carry, self._moved, call.blocks = None, [], []  # blocks know what their names stood for
        return [*found, *(of_number.pop(number, None) for number in used)]

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """The forward's settings, no word said twice, and random streams left as they were."""
        with self.call.surroundings.entered(), self.states.undisturbed(), brought_back(self._moved), silence():
            yield

    def _arrive(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the final carry; run the forward again if a backward has used it up."""
        self._moved = moved(binding for block in self.call.blocks for binding in block.bindings)
        if self.run is None or self.run.done < self.call.length:
            with self._replaying(), recomputing(), torch.no_grad():
                self.states.restore(self.states.start)
                self._start()
        assert self.run is not None
        adjoint: list[torch.Tensor | None] = [None] * self._width
        for place, gradient in zip(self.final_places, gradients, strict=True):
            adjoint[place] = gradient
        self.run.start_backward(adjoint, ())


class _Block(torch.autograd.Function):
    """A block of the outer graph. What goes from one to the next is a scalar that stands for the carry."""

    @staticmethod
    def forward(ctx: Any, work: _Work, index: int, _before: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.work, ctx.index = work, index
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if index < work.call.length - 1:
            return torch.zeros(())
        ctx.mark_non_differentiable(
            *(leaf for leaf, need in zip(work.final, work.final_needs, strict=True) if not need)
        )
        return tuple(work.final)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise StepError(
                "gradients of remat.chain cannot be differentiated again (create_graph=True); run the plain loop where "
                "second derivatives are needed"
            )
        _ = ctx.saved_tensors  # raises if they were changed in place, or are gone with the graph
        return None, None, *ctx.work.backward(ctx.index, gradients)
