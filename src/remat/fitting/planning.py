"""Budgets for the loops of a model, so that the whole training step stays inside one.

Each loop's cost comes from its real blocks on the real carry that enters it, and what lies outside from a step with
the loops taken out (`survey`). Then the step is gone through on paper: at every moment there is what lies outside of
the loops, what the loops before keep, what the one at work needs, and what those that are done have left. All loops get
the same share of the way from the least they need to what they would like to have, as large as the budget allows.

What each plan takes at which moment is counted, so plans are run as they are: another within the same part of the
budget, as a loop might find by its own clock, could keep more while others are at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..ambient import recomputing
from ..chain import plan_chain
from ..chains import Chain
from ..errors import InfeasibleBudget
from ..plans import Plan, plan
from ..recurrent import KernelCalls
from ..schedules import Backward, Schedule
from ..silence import silence
from ..simulator import timeline
from . import seams
from .loops import Loop
from .outside import ARRIVAL, FORWARD, Phase, measured_outside, with_unseen
from .running import Gathered, Gathering
from .trial import Trial, undisturbed

_WHOLE: Final = 1 << 60  # bytes: a budget that everything fits into
_STEPS: Final = 7  # of the search for the share: it is found to 1 %
_RESERVE: Final = 2000  # one part in so many of the budget: what is measured twice is not always the same


@dataclass(frozen=True, slots=True)
class Cost:
    """What a loop costs.

    Attributes:
        least_bytes: the smallest budget that it can be run in.
        whole_bytes: what it takes if it recomputes nothing.
        chain: what to plan; None for a recurrent layer, which plans by itself.
    """

    least_bytes: int
    whole_bytes: int
    chain: Chain | None


class Taken(NamedTuple):
    """What a loop takes at most in each part of its work, as it is to be added to what lies outside then.

    Attributes:
        forward_bytes: in its forward, which makes its results.
        arrival_bytes: in the backward of what it recorded last, for which gradients have arrived.
        backward_bytes: in the rest of its backward: of its results and their gradients there is what others hold.
    """

    forward_bytes: int
    arrival_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """A loop's part of the budget.

    Attributes:
        budget_bytes: what it may take: no more than its plan does, which is what has been counted.
        taken: what it will.
        kept_bytes: what it keeps from its forward to its backward, beside its results.
        left_bytes: what it leaves behind: gradients.
        plan: its plan; None for a recurrent layer.
    """

    budget_bytes: int
    taken: Taken
    kept_bytes: int
    left_bytes: int
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Division:
    """A budget divided among loops.

    Attributes:
        shares: one for each loop.
        peak_bytes: predicted: most bytes at any moment of the step.
        outside_bytes: most bytes outside of the loops.
    """

    shares: tuple[Share, ...]
    peak_bytes: int
    outside_bytes: int


# ---- what loops cost


class _Enough(Exception):
    """All loops have been seen: the rest of the forward says nothing new."""


def survey(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trial: Trial, budget_bytes: int
) -> tuple[tuple[Cost, ...], tuple[Phase, ...]]:
    """What each loop of a call costs, and what lies outside of them, measured; leaves no trace.

    Where what lies outside takes more than the budget by itself, it stays as it was found on paper.
    """
    costs: list[Cost] = []
    finals: list[list[Tensor]] = []

    def answer(number: int, gathered: Gathered) -> Sequence[Tensor]:
        loop = gathered.loop
        with seams.observed(None):
            costs.append(_recurrent_cost(gathered, budget_bytes) if loop.is_recurrent else _chain_cost(gathered))
            with torch.no_grad():
                final = _run(gathered)
        pairs = zip(final, loop.final, strict=True)
        finals.append([made.detach().requires_grad_(like.requires_grad) for made, like in pairs])
        if number + 1 == len(trial.loops):
            raise _Enough
        return [final.clone() for final in finals[-1]]  # which may be changed in place, as leaves may not

    if not trial.loops:
        return (), trial.outside
    with undisturbed(model), recomputing(), silence(), torch.enable_grad():
        try:
            with seams.observed(Gathering(trial.loops, answer)):
                seams.own_call(model)(*args, **kwargs)
        except _Enough:
            pass
        there = max(budget_bytes, *(cost.least_bytes for cost in costs))  # what blocks have been given by now
        if max(phase.peak_bytes for phase in trial.outside) > there:
            return tuple(costs), with_unseen(trial.outside)
        outside = measured_outside(model, args, kwargs, trial.loops, finals, trial.device)
    return tuple(costs), outside


def _run(gathered: Gathered) -> Sequence[Tensor]:
    if gathered.loop.is_recurrent:
        return gathered.finals(gathered.own())
    carry = gathered.carry
    for stage in gathered.stages:
        carry = stage(carry, *gathered.shared)
    return carry


def _chain_cost(gathered: Gathered) -> Cost:
    given = (gathered.stages, gathered.carry, *gathered.shared)
    if not needs_gradient(gathered):
        return Cost(0, 0, Chain(()))
    # Of the blocks as the model calls them; a call may find a finer cut that needs less, but not one that needs more.
    return cost_of(plan_chain(*given, budget=_WHOLE, planner="keep-all").chain)


def cost_of(chain: Chain) -> Cost:
    """What a loop costs of which only its chain is known."""
    if not chain.length:
        return Cost(0, 0, chain)
    try:
        least = plan(chain, 1).peak_bytes
    except InfeasibleBudget as error:
        least = error.smallest_budget_bytes
    return Cost(least, max(least, plan(chain, _WHOLE, "keep-all").peak_bytes), chain)


def _recurrent_cost(gathered: Gathered, budget_bytes: int) -> Cost:
    try:
        with KernelCalls(1, None):
            gathered.own()
    except InfeasibleBudget as error:
        least = error.smallest_budget_bytes
        return Cost(least, max(least, budget_bytes), None)  # it takes what it gets
    return Cost(0, 0, None)


def needs_gradient(gathered: Gathered) -> bool:
    """Whether anything in a loop has a gradient."""
    if any(tensor.requires_grad for tensor in (*gathered.carry, *gathered.shared)):
        return True
    return any(parameter.requires_grad for stage in gathered.stages for parameter in stage.parameters())


# ---- who gets how much


def divided(budget_bytes: int, outside: Sequence[Phase], loops: Sequence[Loop], costs: Sequence[Cost]) -> Division:
    """The budget divided so that the step stays inside it.

    Raises:
        InfeasibleBudget: it cannot; says the smallest budget with which it can.
    """
    beside = max(phase.peak_bytes for phase in outside)

    def at(share: float) -> Division:
        shares = tuple(_share(cost, int(cost.least_bytes + share * _more(cost))) for cost in costs)
        return Division(shares, _peak(outside, shares), beside)

    best, limit = at(0.0), budget_bytes - budget_bytes // _RESERVE
    if best.peak_bytes > limit:
        least = best.peak_bytes * _RESERVE // (_RESERVE - 1) + 1
        parts = {loop.name: cost.least_bytes for loop, cost in zip(loops, costs, strict=True)}
        raise InfeasibleBudget(budget_bytes, least, {"outside of the loops": best.outside_bytes, **parts})
    if (whole := at(1.0)).peak_bytes <= limit:
        return whole
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        tried = at(middle)
        if tried.peak_bytes <= limit:
            low, best = middle, tried
        else:
            high = middle
    return best


def _more(cost: Cost) -> int:
    return cost.whole_bytes - cost.least_bytes


def _share(cost: Cost, budget_bytes: int) -> Share:
    if cost.chain is None:
        return Share(budget_bytes, Taken(*[budget_bytes] * 3), budget_bytes, budget_bytes, None)
    if not cost.chain.length:
        return Share(0, Taken(0, 0, 0), 0, 0, None)
    return _planned(cost.chain, budget_bytes)


def _results_bytes(chain: Chain) -> int:
    """Bytes of a loop's results and of their gradients, as its plan counts them."""
    return chain.final_carry_bytes + chain.output_gradient_bytes


@lru_cache(maxsize=256)
def _planned(chain: Chain, budget_bytes: int) -> Share:
    made = plan(chain, budget_bytes)
    # What arrived is gone by then, and what comes out belongs to what is outside.
    left = chain.parameter_gradient_bytes + sum(count * stage.gradient_bytes for stage, count in chain.runs)
    taken, kept = taken_by(chain, made.schedule)
    return Share(made.peak_bytes, taken, kept, left, made)


def taken_by(chain: Chain, schedule: Schedule) -> tuple[Taken, int]:
    """What a schedule takes, and what it keeps from forward to backward beside its results."""
    forward = arrival = backward = kept = 0
    for moment in timeline(chain, schedule):
        if not isinstance(moment.action, Backward) and not arrival:
            forward, kept = max(forward, moment.peak_bytes), moment.bytes
        elif not arrival:
            arrival = moment.peak_bytes
        else:
            backward = max(backward, moment.peak_bytes)
    return Taken(forward, arrival, max(backward - _results_bytes(chain), 0)), kept - chain.final_carry_bytes


def _peak(outside: Sequence[Phase], shares: Sequence[Share]) -> int:
    """Most bytes at any moment of the step."""
    held = [0] * len(shares)
    peak = 0
    for phase in outside:
        peak = max(peak, phase.peak_bytes + sum(held))
        if phase.loop is None:
            continue
        share = shares[phase.loop]
        its = share.taken
        others, before = sum(held) - held[phase.loop], phase.level_bytes
        if phase.moment == FORWARD:
            peak, held[phase.loop] = max(peak, before + others + its.forward_bytes), share.kept_bytes
        elif phase.moment == ARRIVAL:  # what arrives is part of the loop's plan
            peak = max(peak, before - phase.arriving_bytes + others + its.arrival_bytes)
        else:
            peak, held[phase.loop] = max(peak, before + others + its.backward_bytes), share.left_bytes
    return peak
