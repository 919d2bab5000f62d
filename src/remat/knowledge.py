"""What is known of a step: what it does, what it costs, and the plans made from that; seen once, remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import torch

from .ambient import States, recomputing
from .apart import by_itself
from .budgets import agreed_budget_bytes
from .calls import Call, Nature
from .chains import Chain
from .collectives import agreed_chain, greatest
from .compiling import remarks_on, traced_step
from .discovery import Discovery, firsts, marked
from .errors import InfeasibleBudget, StepError
from .gauges import Gauge, OnDevice
from .kept import left_alone
from .loops import Loop, Outputs
from .needs import Needed, could_need
from .planners.room import smallest
from .plans import Plan, plan
from .profiler import ROUNDS, STEPS, Costs, Trial, profile
from .recorded import copied, detached, needs_gradient
from .schedules import Advance
from .traced.traced import Traced
from .trees import Leaves

Value = TypeVar("Value")
_KEPT: Final = 256  # steps and plans are remembered
_SURVEYED: Final = 1000  # steps at most are run to see what they need


class _Memory(OrderedDict[Hashable, Any]):
    """The latest results, by key."""

    def recall(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key in self:
            self.move_to_end(key)
            found: Value = self[key]
            return found
        made = make()
        self.put(key, made)
        return made

    def put(self, key: Hashable, value: Any) -> None:
        self[key] = value
        while len(self) > _KEPT:
            self.popitem(last=False)


_natures, _surveys, _learnt, _costs, _plans, _traced, _agreed, _looked = (_Memory() for _ in range(8))
_groups: dict[Hashable, tuple[str, ...]] = {}  # in which a step communicates, by its code


def nature_of(call: Call) -> Nature:
    """What the call's step does, seen in a first run or remembered.

    Raises:
        StepError: it does not do what a step must.
        MissedTensors, KeptTensors: it uses tensors that the call does not know of.
    """
    key = call.key()
    nature = _natures.recall(key, lambda: by_itself(Discovery(call).nature, call.surroundings))
    if nature.groups:
        _groups[call.codes] = nature.groups
    if nature.spoils_outputs and call.length > 1:
        raise StepError(
            "the step returns as an output what it changes in place as its carry, so that a later step would change "
            "the output too; return a clone of it"
        )
    if key in _learnt:
        nature = nature.wider(_learnt[key])
    if any(map(needs_gradient, call.tensors())) and not (nature.settled and call.keeps_nothing(nature)):
        nature = nature.wider(_survey_of(call))
    return nature.of_length(call.length)


def learn(call: Call, more: Needed) -> None:
    """Remember what steps did in whole loops, and the first few had not shown: it has room in plans from now on."""
    key = call.key()
    _learnt[key] = _learnt[key].union(more) if key in _learnt else more


def _survey_of(call: Call) -> Needed:
    job = partial(_surveyed, call, _natures[call.key()])
    return _surveys.recall((call.key(), call.length), lambda: by_itself(job, call.surroundings))


def look_once(call: Call) -> Callable[[], None] | None:
    """For steps of which no backward has looked at so many yet: what it calls when it has."""
    if call.traced is not None:  # the graph is that of every step
        return None
    key, length = call.key(), call.length
    return partial(_looked.put, key, length) if _looked.get(key, 0) < length else None


def plan_of(call: Call, budget: int | str | None, planner: str) -> tuple[Nature, Plan]:
    """The call's plan, made or remembered.

    It depends on shapes and budget only, not on measured seconds, so processes that run the same step at the same
    budget plan the same without a word between them.

    Raises:
        InfeasibleBudget: the budget is too small.
        StepError, MissedTensors: as `nature_of`.
    """
    limit = agreed_budget_bytes(budget, call.device)
    if groups := _groups.get(call.codes, ()):
        limit = _agreed_limit(call, groups, limit, planner)
    try:
        return _planned(call, nature_of(call), limit, planner)
    except InfeasibleBudget:
        if call.traced is not None:  # the graph is that of every step
            raise
        before = nature_of(call)
        learn(call, _survey_of(call))  # the number that a refusal says must hold for all steps
        if nature_of(call) == before:
            raise
    return _planned(call, nature_of(call), limit, planner)


def _agreed_limit(call: Call, groups: tuple[str, ...], limit: int, planner: str) -> int:
    """The least budget among processes that communicate in the step; they look at it anew if any of them must."""
    key = call.key()
    limit = -greatest(groups, [-limit])[0]
    agreed = key, call.length, limit, planner
    seen = any(isinstance(of, tuple) and of[0] == key for of in _costs)
    look, make = greatest(groups, [not seen, agreed not in _agreed])
    if make:
        _agreed.pop(agreed, None)
    if look:
        for memory in (_natures, _surveys, _costs):
            for of in [of for of in memory if of == key or (isinstance(of, tuple) and of[0] == key)]:
                del memory[of]
    return limit


def _planned(call: Call, nature: Nature, limit: int, planner: str) -> tuple[Nature, Plan]:
    key, remarks = _trace(call, nature)
    if groups := _groups.get(call.codes, ()):
        agreed = call.key(), call.length, limit, planner
        make = lambda: plan(agreed_chain(groups, _chain(call, nature, limit, key)), limit, planner)  # noqa: E731
        return nature, _agreed.recall(agreed, make)
    chain = _chain(call, nature, limit, key)
    if call.traced is not None:
        remarks = remarks_on(call.traced)
    like = *key, remarks, call.length, chain.input_gradient_bytes, call.inputs.owned_bytes, limit, planner
    return nature, _plans.recall(like, lambda: replace(plan(chain, limit, planner), remarks=remarks))


def chain_of(call: Call, limit: int) -> Chain:
    """The call's steps as a chain, measured within so many bytes or remembered.

    Raises:
        StepError, MissedTensors: as `nature_of`.
    """
    nature = nature_of(call)
    return _chain(call, nature, limit, _trace(call, nature)[0])


def _chain(call: Call, nature: Nature, limit: int, key: Hashable) -> Chain:
    gradients = sum(leaf.nbytes for leaf in call.inputs.tensors() if leaf.requires_grad)
    costs = _costs.recall(key, lambda: _menu_costs(call, nature, limit, gradients))
    chain = costs.chain(call.length, gradients)
    if call.inputs.owned_bytes:
        chain = msgspec.structs.replace(chain, output_bytes=chain.output_bytes + call.inputs.owned_bytes)
    return chain


def _trace(call: Call, nature: Nature) -> tuple[tuple[Hashable, ...], tuple[tuple[str, str], ...]]:
    """Whether the call's step runs as a graph: what to remember its costs by, and what to say of it.

    Raises:
        StepError: it cannot, and has to.
    """
    if not call.compiled:
        return (call.key(), nature), ()
    key = call.exact_key(), nature, call.compiled
    found = _traced.recall(key, lambda: traced_step(call, nature))
    if isinstance(found, Traced):
        call.traced = found
        return key, ()
    if isinstance(call.compiled, str):
        raise StepError(f"the step cannot run as a graph (compile={call.compiled!r}): {found}")
    return (call.key(), nature), (("step", f"runs as it is, not as a graph: {found}"),)


def _menu_costs(call: Call, nature: Nature, limit: int, input_gradient_bytes: int) -> Costs:
    """The costs of one step, with every entry of its menu if it has one."""
    if call.traced is None:
        return measure_step(call, nature, limit, input_gradient_bytes, OnDevice(call.device))
    found = []
    for entry in range(len(call.traced.menu)):
        call.entry = entry
        found.append(measure_step(call, nature, limit, input_gradient_bytes, OnDevice(call.device)))
    call.entry = 0
    names = [menu.entry.name for menu in call.traced.menu]
    # A final carry laid out otherwise is copied for the caller, and then its gradient for the graph.
    returned = call.traced.returned_bytes
    tapes = [
        msgspec.structs.replace(tape, name=name, workspace_bytes=max(tape.workspace_bytes, returned))
        for name, tape in zip(names, (costs.stage.menu[0] for costs in found), strict=True)
    ]
    stage = msgspec.structs.replace(found[0].stage, menu=tuple(tapes))
    return replace(
        found[0],
        stage=stage,
        state_bytes=found[0].state_bytes + call.traced.shared_bytes,
        final_gradient_bytes=found[0].final_gradient_bytes + returned,
    )


def measure_step(
    call: Call, nature: Nature, limit: int, input_gradient_bytes: int, gauge: Gauge, *, rounds: int = ROUNDS
) -> Costs:
    """The costs of one step, measured in small runs on copies of the carry."""
    loop = call.loop(Outputs(STEPS), call.carry, call.inputs.leaves)
    states = States(call.sources, nature.needed.changes)
    carry = marked(_representative(call, nature, loop), nature.needed.carry)
    most = nature.needed.carry if nature.settled else tuple(map(could_need, carry))
    nature = replace(nature, settled=True, orbit=((most, nature.needed.outputs),))  # the most there can be

    def start() -> Trial:
        if loop.outputs is not None:
            loop.outputs.flush()  # what waits from the trial before must not be released in the next
        states.restart()
        return Trial(call.interpreter(loop, nature, iter(()), carry, states, STEPS), arriving)

    def arriving() -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        assert loop.outputs is not None
        outputs = zip(loop.outputs.buffers, nature.needed.outputs, strict=True)
        adjoint = [torch.zeros_like(leaf) if needs_gradient(leaf) else None for leaf in firsts(carry)]
        return adjoint, [torch.zeros_like(buffer) if need else None for buffer, need in outputs]

    def room_bytes(costs: Costs) -> int:
        room = limit - smallest(costs.chain(call.length, input_gradient_bytes)).peak_bytes
        groups = _groups.get(call.codes, ())
        return -greatest(groups, [-room])[0] if groups else room

    def measured() -> Costs:
        watching = States(call.sources, call.streams | nature.needed.changes)
        with torch.enable_grad(), watching.undisturbed(), left_alone(call.places):
            try:
                return profile(start, nature.sizes, gauge, room_bytes, rounds=rounds)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise StepError(
                    "a step changes its carry in place where the step before needs it for its backward; change a "
                    "clone of it"
                ) from error

    return by_itself(measured, call.surroundings)


def _representative(call: Call, nature: Nature, loop: Loop) -> Leaves:
    """A carry like those between steps: the first may share tensors, and what is in places may be anything."""
    carry = copied(detached(call.carry))
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in carry)
    if not call.places and tensors == len(call.carry_places):
        return carry
    watching = States(call.sources, call.streams | nature.needed.changes)
    with recomputing(), torch.enable_grad(), watching.undisturbed(), left_alone(call.places):
        entering = copied(marked(carry, call.needs))
        after = copied(detached(loop.run(0, entering, loop.inputs(0, recording=False), first=True)[0]))
    # Counters and such begin anew, or steps would be run that never come.
    return [new if could_need(new) else old for old, new in zip(carry, after, strict=True)]


def _surveyed(call: Call, nature: Nature) -> Needed:
    """What the steps of a loop need and change, where the first few do not tell: many are run once."""
    nature = replace(nature, settled=False)
    loop, length = call.loop(None, call.carry, call.inputs.leaves), min(call.length, _SURVEYED)
    states = States(call.sources)
    carry = marked(copied(detached(call.carry)), call.needs)
    with recomputing(), torch.enable_grad(), states.undisturbed(), left_alone(call.places):
        run = call.interpreter(loop, nature, iter(()), carry, states, length)
        for index in range(length):
            run.do(Advance(index, index + 1))
            states.take()  # where a step keeps tensors shows only with autograd on
        changed = [n for n, source in enumerate(call.sources) if not source.same(states.start[n], source.get())]
    assert loop.seen is not None
    return Needed(loop.seen.carries, loop.seen.outputs, frozenset(changed))
