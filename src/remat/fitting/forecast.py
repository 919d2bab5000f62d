"""A training call worked out on paper: what it takes plainly, and what each budget would bring.

Nothing is allocated and nothing runs: the model is copied with fake tensors in the place of its own, which may be on
the device "meta". What `fit` measures on real blocks comes from the books of a `Ledger` here; divisions and ways are
then found as `fit` finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ambient import recomputing
from ..chain import front_of
from ..chains import Chain
from ..errors import FitError, InfeasibleBudget, RematError
from ..estimate import Rates
from ..fakes import Fakes
from ..graph.op_costs import estimated
from ..graph.planning import Planner
from ..graph.tracing import trace
from ..paper import chain_on_paper
from . import outside, seams
from .loops import Loop, blocks_of
from .pending import PendingUse
from .planning import Cost, Division, cost_of, divided, needs_gradient
from .running import Gathered
from .trial import Trials
from .ways import kind_of, with_unseen


class Outcome(NamedTuple):
    """What a budget would bring.

    Attributes:
        way: the name of the way that `fit` would choose.
        peak_bytes: most bytes at any moment of the step, over those at its start.
        time_ratio: the step's time over that of the plain step.
    """

    way: str
    peak_bytes: int
    time_ratio: float


class _Enough(Exception):
    """All loops have been seen."""


class Forecast:
    """A training call of a model on paper.

    Args:
        model: whose call it is; its tensors may be real or on the device "meta", and are left alone.
        args, kwargs: what it is called with; likewise.
        rates: how fast the device is, and of what type.

    Attributes:
        items: what the fullest moment of the plain step is made of.
        loops, costs, outside: the loops, what each costs, and what lies outside of them.
        recurrent: whether there are recurrent layers, which are taken as kept whole here.

    Raises:
        FitError: the model cannot be run on fake tensors; says why.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rates: Rates) -> None:
        self._rates = rates
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with self._mode:
                fakes = Fakes(self._mode, rates.device_type)
                fakes.take([model], (args, kwargs))
                self._model, self._args, self._kwargs = fakes.copy(model), fakes.copy(args), fakes.copy(kwargs)
            self._model.train()
            seams.install(blocks_of(self._model))
            self._trials = Trials(self._model, self._args, self._kwargs, mode=self._mode, rates=rates)
            ledger = self._trials.itemised()
        except Exception as error:
            raise FitError(f"{type(model).__name__} cannot be worked out on paper: {_line(error)}") from error
        self.items, self._plain_s = ledger.items(), ledger.seconds
        self._refusal: str | None = None
        self.recurrent = False
        self.loops: tuple[Loop, ...] = ()
        try:
            self._by_loops()
        except (PendingUse, RematError) as error:
            self.loops, self._refusal = (), _line(error)

    def _by_loops(self) -> None:
        found = self._trials.loops()
        self.recurrent = any(loop.is_recurrent for loop in found)
        self.loops = tuple(loop for loop in found if not loop.is_recurrent)
        books = self._trials.books(self.loops)
        self.outside, self._outside_s = outside.with_unseen(outside.phases(books.readings)), books.seconds
        self.costs = self._surveyed()

    def _surveyed(self) -> tuple[Cost, ...]:
        costs: list[Cost] = []

        def answer(number: int, gathered: Gathered) -> Sequence[Tensor]:
            with seams.observed(None):
                costs.append(cost_of(self._chain(gathered)))
            if number + 1 == len(self.loops):
                raise _Enough
            return [like.detach().requires_grad_(like.requires_grad) for like in gathered.loop.final]

        if self.loops:
            with suppress(_Enough):
                self._trials.gathered(self.loops, answer)
        return tuple(costs)

    def _chain(self, gathered: Gathered) -> Chain:
        if not needs_gradient(gathered):
            return Chain(())
        given = gathered.stages, gathered.carry, tuple(gathered.shared), dict[str, Any]()
        return chain_on_paper(*given, self._rates, front=front_of(*given))

    # ---- what a budget would bring

    @property
    def plain_bytes(self) -> int:
        """A budget that is sure to hold the plain step."""
        return with_unseen(self.items.peak_bytes)

    def within(self, budget_bytes: int) -> Outcome:
        """What `fit` would do within a budget.

        Raises:
            InfeasibleBudget: it is too small; says the smallest that works.
            FitError: there is no way at all.
        """
        if self.plain_bytes <= budget_bytes:
            return Outcome("plain", self.items.peak_bytes, 1.0)
        refused: InfeasibleBudget | None = None
        if self.loops:
            try:
                return self._divided(budget_bytes)
            except InfeasibleBudget as error:
                refused = error
        try:
            made = self._planner.plan(budget_bytes)
        except (FitError, InfeasibleBudget) as error:
            if refused is None or _smaller(error, refused):
                raise
            raise refused from None
        return Outcome("graph", made.peak_bytes, made.time_ratio)

    def smallest_bytes(self) -> int:
        """The smallest budget that works; of loops of blocks where there are any, else of the graph.

        Raises:
            FitError: there is no way at all.
        """
        if not self.loops:
            return min(self._planner.smallest_bytes, self.plain_bytes)
        try:
            return self._divided(1).peak_bytes
        except InfeasibleBudget as error:
            return error.smallest_budget_bytes

    def _divided(self, budget_bytes: int) -> Outcome:
        made = divided(budget_bytes, self.outside, self.loops, self.costs)
        whole = divided(1 << 61, self.outside, self.loops, self.costs)
        ratio = self._seconds(made) / self._seconds(whole)
        return Outcome(kind_of(self._model, self.loops), made.peak_bytes, ratio)

    def _seconds(self, division: Division) -> float:
        return self._outside_s + sum(share.plan.seconds for share in division.shares if share.plan is not None)

    @cached_property
    def _planner(self) -> Planner:
        if self.recurrent:
            raise FitError("recurrent layers run in chunks of time, which are measured and not known on paper")
        seams.remove(blocks_of(self._model))
        try:
            with recomputing(), torch.enable_grad(), self._mode:
                graph, _ = trace(self._model, self._args, self._kwargs, costs=estimated)
        except Exception as error:
            loops = self._refusal or "it calls no list of blocks one after the other"
            raise FitError(
                f"{type(self._model).__name__}: as loops, {loops}; as a graph, it cannot be traced: {_line(error)}"
            ) from error
        return Planner(graph)


def _smaller(error: Exception, refused: InfeasibleBudget) -> bool:
    return isinstance(error, InfeasibleBudget) and error.smallest_budget_bytes < refused.smallest_budget_bytes


def _line(error: BaseException) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, RematError | PendingUse) else f"{type(error).__name__}: {first}"
