"""Budgets for the loops of a model, so that the whole training step stays inside one.

Each loop's cost comes from its real blocks on the real carry that enters it (`survey`). Then the step is gone through
on paper: at every moment there is what lies outside of the loops, what the loops before keep, what the one at work
needs, and what those that are done have left. All loops get the same share of the way from the least they need to what
they would like to have, and that share is as large as the budget allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..ambient import recomputing
from ..chain import plan_chain
from ..chains import Chain
from ..errors import InfeasibleBudget
from ..plans import Plan, plan
from ..recurrent import KernelCalls
from ..schedules import Backward
from ..silence import silence
from ..simulator import timeline
from . import seams
from .loops import Loop
from .running import Gathered, Gathering
from .trial import Phase, Trial, undisturbed

_WHOLE: Final = 1 << 60  # bytes: a budget that everything fits into
_STEPS: Final = 7  # of the search for the share: it is found to 1 %
_PERCENT_USED: Final = 98  # of the budget: blocks measured alone are that true to what they take in their place
_PERCENT_UNSEEN: Final = 4  # of what lies outside: what kernels there take in passing is not all seen on paper


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


@dataclass(frozen=True, slots=True)
class Share:
    """A loop's part of the budget.

    Attributes:
        budget_bytes: what it may take.
        peak_bytes: what it will.
        kept_bytes: what it keeps from its forward to its backward.
        left_bytes: what it leaves behind: gradients.
        plan: its plan; None for a recurrent layer.
    """

    budget_bytes: int
    peak_bytes: int
    kept_bytes: int
    left_bytes: int
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Division:
    """A budget divided among loops.

    Attributes:
        shares: one for each loop.
        peak_bytes: predicted: most bytes at any moment of the step.
        most_bytes: the same if loops took all they may, as plans from other measurements of time might.
        outside_bytes: most bytes outside of the loops.
    """

    shares: tuple[Share, ...]
    peak_bytes: int
    most_bytes: int
    outside_bytes: int


# ---- what loops cost


class _Enough(Exception):
    """All loops have been seen: the rest of the forward says nothing new."""


def survey(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trial: Trial, budget_bytes: int
) -> tuple[Cost, ...]:
    """What each loop of a call costs, measured on its real blocks; leaves no trace."""
    costs: list[Cost] = []

    def answer(number: int, gathered: Gathered) -> Sequence[Tensor]:
        loop = gathered.loop
        with seams.observed(None):
            costs.append(_recurrent_cost(gathered, budget_bytes) if loop.is_recurrent else _chain_cost(gathered))
            if number + 1 == len(trial.loops):
                raise _Enough
            with torch.no_grad():
                final = _run(gathered)
        pairs = zip(final, loop.final, strict=True)
        return [made.detach().requires_grad_(like.requires_grad) for made, like in pairs]

    if not trial.loops:
        return ()
    with undisturbed(model), recomputing(), silence(), torch.enable_grad():
        try:
            with seams.observed(Gathering(trial.loops, answer)):
                seams.own_call(model)(*args, **kwargs)
        except _Enough:
            pass
    return tuple(costs)


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
    outside = [_with_unseen(phase) for phase in outside]

    def at(share: float) -> Division:
        shares = tuple(_share(cost, int(cost.least_bytes + share * _more(cost))) for cost in costs)
        peaks, most = [each.peak_bytes for each in shares], [each.budget_bytes for each in shares]
        beside = max(phase.peak_bytes for phase in outside)
        return Division(shares, _peak(outside, shares, peaks), _peak(outside, shares, most), beside)

    best, limit = at(0.0), budget_bytes * _PERCENT_USED // 100
    if best.most_bytes > limit:
        least = best.most_bytes * 100 // _PERCENT_USED + 1
        parts = {loop.name: cost.least_bytes for loop, cost in zip(loops, costs, strict=True)}
        raise InfeasibleBudget(budget_bytes, least, {"outside of the loops": best.outside_bytes, **parts})
    if (whole := at(1.0)).most_bytes <= limit:
        return whole
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        tried = at(middle)
        if tried.most_bytes <= limit:
            low, best = middle, tried
        else:
            high = middle
    return best


def _more(cost: Cost) -> int:
    return cost.whole_bytes - cost.least_bytes


def _with_unseen(phase: Phase) -> Phase:
    return phase._replace(
        peak_bytes=phase.peak_bytes + phase.peak_bytes * _PERCENT_UNSEEN // 100,
        level_bytes=phase.level_bytes + phase.level_bytes * _PERCENT_UNSEEN // 100,
    )


def _share(cost: Cost, budget_bytes: int) -> Share:
    if cost.chain is None:
        return Share(budget_bytes, budget_bytes, budget_bytes, budget_bytes, None)
    if not cost.chain.length:
        return Share(0, 0, 0, 0, None)
    return _planned(cost.chain, budget_bytes)


@lru_cache(maxsize=256)
def _planned(chain: Chain, budget_bytes: int) -> Share:
    made = plan(chain, budget_bytes)
    kept = 0
    for moment in timeline(chain, made.schedule):
        if isinstance(moment.action, Backward):
            break
        kept = moment.bytes
    # What arrived is gone by then, and what comes out belongs to what is outside.
    left = chain.parameter_gradient_bytes + sum(count * stage.gradient_bytes for stage, count in chain.runs)
    return Share(budget_bytes, made.peak_bytes, kept, left, made)


def _peak(outside: Sequence[Phase], shares: Sequence[Share], taken: Sequence[int]) -> int:
    """Most bytes at any moment of the step, each loop taking so many while it is at work."""
    held = [0] * len(shares)
    peak = 0
    for phase in outside:
        peak = max(peak, phase.peak_bytes + sum(held))
        if phase.loop is not None:
            share = shares[phase.loop]
            held[phase.loop] = 0
            level = phase.level_bytes - phase.arriving_bytes  # which are part of the loop's plan
            peak = max(peak, level + sum(held) + taken[phase.loop])
            held[phase.loop] = share.left_bytes if phase.backward else share.kept_bytes
    return peak
