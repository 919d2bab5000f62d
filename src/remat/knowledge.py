"""What is known of a step: what it does, what it costs, and the plans made from that; seen once, remembered."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Final, NamedTuple, TypeVar

import msgspec
import torch

from .ambient import States, recomputing
from .apart import by_itself
from .arrivals import Arrivals, Sparing, arriving_alone, sparing
from .budgets import agreed_budget_bytes
from .calls import Call, Nature
from .chains import Chain
from .collectives import agreed_chain, greatest
from .compiling import remarks_on, traced_step
from .discovery import Discovery, marked
from .ends import ADAPTIVE, Ends, finishing, foreseen, planned
from .errors import InfeasibleBudget, StepError
from .gauges import OnDevice
from .kept import left_alone
from .needs import Needed
from .paces import Paces, joined
from .plans import Plan, plan
from .profiler import Costs
from .recent import Recent
from .recorded import copied, detached, needs_gradient
from .schedules import Advance
from .traced.traced import Traced
from .trees import Leaves
from .trials import measure_last, measure_step

Value = TypeVar("Value")
_KEPT: Final = 256  # steps and plans are remembered
_RANGE: Final = 64  # steps of the longest range whose seconds are taken
_SURVEYED: Final = 1000  # steps at most are run to see what they need


_natures: Recent[Hashable, Nature] = Recent(_KEPT)
_surveys: Recent[Hashable, Needed] = Recent(_KEPT)
_learnt: Recent[Hashable, Needed] = Recent(_KEPT)
_looked: Recent[Hashable, int] = Recent(_KEPT)
_traced: Recent[Hashable, Traced | str] = Recent(_KEPT)
_costs: Recent[Hashable, Costs] = Recent(_KEPT)
_arrived: Recent[Hashable, Arrivals] = Recent(_KEPT)
_lasts: Recent[Hashable, list[int]] = Recent(_KEPT)
_plans: Recent[Hashable, tuple[Plan, bool]] = Recent(_KEPT)
_agreed: Recent[Hashable, Plan] = Recent(_KEPT)
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


def learn_arrivals(key: Hashable, found: Arrivals) -> None:
    """Remember which gradients a backward brought for the results of a call with this key."""
    _arrived[key] = _arrived[key].union(found) if key in _arrived else found


def _survey_of(call: Call) -> Needed:
    job = partial(_surveyed, call, _natures[call.key()])
    return _surveys.recall((call.key(), call.length), lambda: by_itself(job, call.surroundings))


class Planned(NamedTuple):
    """A call's plan.

    Attributes:
        nature: what the step does.
        plan: the plan.
        sparing: how it does without room for some gradients; None: it has room for all.
        ends: what both ends of the loop take if any gradient arrives, where that matters.
        finishing_bytes: what the first step's backward takes where sums of gradients lie turned.
        turned: whether the plan has room for that.
        key: what the call's arriving gradients are remembered by.
        looked: if the backward shall look at every range, what it calls when it has.
        roomy_bytes: the plan's peak with the room that it keeps for gradients that have not arrived so far.
    """

    nature: Nature
    plan: Plan
    sparing: Sparing | None = None
    ends: Ends | None = None
    finishing_bytes: int = 0
    turned: bool = False
    key: Hashable = None
    looked: Callable[[], None] | None = None
    roomy_bytes: int = 0

    def with_room(self, adjoint: Leaves, stacked: Leaves) -> Planned | None:
        """What to run the loop once more by, if these gradients do not fit into this one; None: they do."""
        if self.sparing is None or self.ends is None:
            return None
        limit = self.plan.budget_bytes
        if self.sparing.finds_room(adjoint, stacked, limit - self.roomy_bytes):
            return None
        made = planned(self.sparing.again, self.ends, limit, "auto", plan)
        made, turned = _turned(made, self.sparing.again, self.ends, self.finishing_bytes)
        return self._replace(plan=made, turned=turned)


def plan_of(call: Call, budget: int | str | None, planner: str) -> Planned:
    """The call's plan, made or remembered.

    It depends on shapes, the budget and which gradients have arrived so far, so processes that run the same step at the
    same budget plan the same without a word between them.

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


def _planned(call: Call, nature: Nature, limit: int, planner: str) -> Planned:
    key, remarks = _trace(call, nature)
    if groups := _groups.get(call.codes, ()):
        agreed = call.key(), call.length, limit, planner
        chain = _chain(call, nature, limit, key)
        more = _ends(call, nature, None, key).most_bytes  # added up, as sizes may differ
        chain = msgspec.structs.replace(chain, output_bytes=chain.output_bytes + more)
        made = _agreed.recall(agreed, lambda: plan(agreed_chain(groups, chain), limit, planner))
        return Planned(nature, made, looked=_look_once(call))
    chain = _chain(call, nature, limit, key)
    spared = _sparing(call, nature, limit, key) if planner in ADAPTIVE else None
    if spared is not None:
        chain = spared.chain
    if call.traced is not None:
        remarks = remarks_on(call.traced)
    ends = _ends(call, nature, spared and spared.arriving, key)
    fixed = chain.output_bytes, chain.output_gradient_bytes, chain.input_gradient_bytes, ends
    like = *key, remarks, call.length, *fixed, limit, planner
    finishing_bytes = 0 if call.traced is None else _costs[key].finishing_bytes

    def make() -> tuple[Plan, bool]:
        made = replace(_paced(_costs[key].paces, chain, ends, limit, planner), remarks=remarks)
        return _turned(made, made.chain, ends, finishing_bytes)

    every = _ends(call, nature, None, key) if spared else None
    made, turned = _plans.recall(like, make)
    there = replace(ends, finishing_bytes=finishing_bytes if turned else 0)
    return Planned(
        nature,
        _as_things_are(made, call, nature, key, like, there),
        spared,
        every,
        finishing_bytes,
        turned,
        call.key(),
        _look_once(call),
        made.peak_bytes,
    )


def _as_things_are(
    made: Plan, call: Call, nature: Nature, key: Hashable, like: tuple[Hashable, ...], ends: Ends
) -> Plan:
    """The plan with the peak that it has if no other gradients arrive than before; it may have room for more."""
    arriving = _arrived.get(call.key())
    if arriving is None or (call.traced is not None and call.compiled != "python"):
        return made  # fused, steps in the middle take less than the last, at which fewer gradients arrive
    alone = arriving_alone(_owning(_costs[key], call.inputs.owned_bytes), nature, made.chain, arriving)
    if alone == made.chain:
        return made
    # Another program runs at the end, for which so much may be there all the same.
    flags = zip(nature.needed.carry, arriving.carry, strict=True)
    more = sum(compress(nature.carry_bytes, (need and not there for need, there in flags)))
    ends = replace(
        ends, held_bytes=tuple(held + more for held in ends.held_bytes), handed_bytes=ends.handed_bytes + more
    )
    which = *like, ends, alone.output_bytes, alone.output_gradient_bytes
    return _plans.recall(which, lambda: (foreseen(made, alone, ends), False))[0]


def _paced(paces: Paces | None, chain: Chain, ends: Ends, limit: int, planner: str) -> Plan:
    """A plan, its seconds those of steps in ranges as long as its own."""
    made = planned(chain, ends, limit, planner, plan)
    if paces is None:
        return made
    return planned(paces.on(chain, made.schedule), ends, limit, planner, plan)


def _look_once(call: Call) -> Callable[[], None] | None:
    """For steps of which no backward has looked at so many yet: what it calls when it has."""
    if call.traced is not None:  # the graph is that of every step
        return None
    key, length = call.key(), call.length
    return partial(_looked.put, key, length) if _looked.get(key, 0) < length else None


def _turned(made: Plan, chain: Chain, ends: Ends, finishing_bytes: int) -> tuple[Plan, bool]:
    """The plan, with its peak as it will be; and whether it has room for sums of gradients that lie turned."""
    found = finishing(made, chain, ends, finishing_bytes) if finishing_bytes else None
    return (made, False) if found is None else (found, True)


def _sparing(call: Call, nature: Nature, limit: int, key: Hashable) -> Sparing | None:
    """How to plan without room for gradients that have not arrived in backwards so far."""
    arriving = _arrived.get(call.key())
    if arriving is None:
        return None
    costs = _owning(_costs[key], call.inputs.owned_bytes)
    most = _ends(call, nature, None, key).most_bytes
    return sparing(costs, nature, call.length, _input_gradient_bytes(call), arriving, limit, most)


def chain_of(call: Call, limit: int) -> Chain:
    """The call's steps as a chain, measured within so many bytes or remembered.

    Raises:
        StepError, MissedTensors: as `nature_of`.
    """
    nature = nature_of(call)
    return _chain(call, nature, limit, _trace(call, nature)[0])


def _chain(call: Call, nature: Nature, limit: int, key: Hashable) -> Chain:
    gradients = _input_gradient_bytes(call)
    together = call.codes in _groups  # then all measure as often

    def will_do(known: Costs) -> bool:
        if together or not 0 < known.pairs_from_bytes <= limit:
            return True
        return known.pairs_from_bytes + _ends(call, nature, None, key).most_bytes > limit

    costs = _costs.recall(key, lambda: _menu_costs(call, nature, limit, gradients), will_do)
    return _owning(costs, call.inputs.owned_bytes).chain(call.length, gradients)


def _owning(costs: Costs, owned_bytes: int) -> Costs:
    """Costs of a loop that holds inputs of its own as well."""
    return replace(costs, state_bytes=costs.state_bytes + owned_bytes)


def _input_gradient_bytes(call: Call) -> int:
    return sum(leaf.nbytes for leaf in call.inputs.tensors() if leaf.requires_grad)


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
    measured = partial(measure_step, call, nature, limit, input_gradient_bytes, OnDevice(call.device))
    groups = _groups.get(call.codes, ())
    measured = partial(measured, groups=groups, longest=0 if groups else _RANGE)
    if call.traced is None:
        return measured()
    found = [measured(entry=entry) for entry in range(len(call.traced.menu))]
    names = [menu.entry.name for menu in call.traced.menu]
    tapes = [
        msgspec.structs.replace(tape, name=name)
        for name, tape in zip(names, (costs.stage.menu[0] for costs in found), strict=True)
    ]
    stage = msgspec.structs.replace(found[0].stage, menu=tuple(tapes))
    state_bytes = found[0].state_bytes + call.traced.shared_bytes
    finishing_bytes = max(costs.finishing_bytes for costs in found)
    paces = joined([costs.paces for costs in found])
    return replace(
        found[0],
        stage=stage,
        state_bytes=state_bytes,
        finishing_bytes=finishing_bytes,
        paces=paces,
        pairs_from_bytes=min((c.pairs_from_bytes for c in found if c.pairs_from_bytes), default=0),
    )


def _ends(call: Call, nature: Nature, arriving: Arrivals | None, key: Hashable) -> Ends:
    """What the first and the last step take beyond the others, if such gradients arrive; None: all that can."""
    traced, tapes, width = call.traced, _costs[key].stage.menu, len(nature.needed.carry)
    flags = nature.needed.carry if arriving is None else arriving.carry
    held = min(sum(compress(nature.carry_bytes, flags)), _costs[key].stage.carry_bytes)
    passing = _costs[key].first_pass_bytes
    if traced is None:
        # A tape that only may keep its leaving carry has that counted in place of workspace, but not the last of all.
        maybe = [tape.leaving_bytes if _costs[key].pairs_from_bytes else 0 for tape in tapes]
        return Ends(first_pass_bytes=passing, held_bytes=tuple(held + more for more in maybe))
    # Where others arrive, another program runs at the end, which takes what it takes. A leaf that is copied comes from
    # then on in place of the adjoint between steps: it stays till the end, or its copy is there, but not both.
    coming = Arrivals(nature.needed.carry, nature.needed.outputs) if arriving is None else arriving
    lasts = _lasts.recall((key, coming), lambda: _last_backwards(call, nature, coming))
    free = _costs[key].parameter_gradient_bytes
    holds = [max(held, last - free - t.backward_workspace_bytes) for last, t in zip(lasts, tapes, strict=True)]
    kept = tuple(traced.copied_bytes(menu.entry.leaving) for menu in traced.menu)
    handed = min(sum(compress(nature.carry_bytes, nature.needed.carry)), _costs[key].stage.carry_bytes)
    return Ends(
        entering_bytes=traced.entering_bytes(call.carry),
        kept_bytes=kept,
        returned_bytes=traced.copied_bytes(range(width)),
        first_pass_bytes=passing,
        held_bytes=tuple(holds),
        handed_bytes=handed,
    )


def _last_backwards(call: Call, nature: Nature, arriving: Arrivals) -> list[int]:
    """Most bytes that the backward of the last step takes, by entry of the step's menu, where such gradients arrive."""
    assert call.traced is not None
    gauge, entries = OnDevice(call.device), range(len(call.traced.menu))
    return [measure_last(call, nature, arriving, gauge, entry) for entry in entries]


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
