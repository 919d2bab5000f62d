"""The ways in which a model can be trained inside a budget, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor, nn

from ..chain import chain_by_plan
from ..errors import FitError, InfeasibleBudget, StepError
from ..recurrent import KernelCalls
from ..sizes import format_bytes
from . import seams
from .graphs import as_graph
from .loops import Loop, blocks_of
from .pending import PendingUse
from .planning import Division, divided, needs_gradient, survey
from .running import Gathered, Gathering
from .trial import Trial, tried

_PERCENT_UNSEEN: Final = 12  # kernels take in passing what is not seen on paper: convolutions up to so much
ASKED: Final = ("auto", "graph")


class Way(Protocol):
    """A way to make a training call."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Predicted: most bytes at any moment of the training step."""
        ...

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call."""
        ...

    def explain(self) -> str:
        """Why it was chosen, and what it plans."""
        ...


def choose(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], budget_bytes: int, asked: str = "auto"
) -> Way:
    """The way for a kind of call; `asked` is one of `ASKED`.

    Raises:
        InfeasibleBudget: there are ways, but the budget is too small for them; the smallest that works for one.
        FitError: there is no way.
    """
    seams.install(blocks_of(model))
    if asked == "graph":
        return as_graph(model, args, kwargs, budget_bytes, "as was asked for")
    try:
        return _by_loops(model, args, kwargs, budget_bytes)
    except (FitError, InfeasibleBudget, StepError) as error:
        first = error
    try:  # after the handler, where nothing that is raised has the first error for its context
        return as_graph(model, args, kwargs, budget_bytes, _why(first))
    except InfeasibleBudget as second:
        refusals = [each for each in (first, second) if isinstance(each, InfeasibleBudget)]
        raise min(refusals, key=lambda refusal: refusal.smallest_budget_bytes) from None
    except FitError as second:
        if isinstance(first, InfeasibleBudget):
            raise first from None
        raise FitError(f"{type(model).__name__}: as loops, {first}; as a graph, {second}") from first


def _why(error: Exception) -> str:
    if isinstance(error, InfeasibleBudget):
        return f"its loops of blocks would need {format_bytes(error.smallest_budget_bytes)}"
    return f"as loops of blocks it cannot be trained: {error}"


def _by_loops(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], budget_bytes: int) -> Way:
    trial = tried(model, args, kwargs)
    unseen = any(loop.is_recurrent for loop in trial.loops)  # what their kernels keep does not show on paper
    if not unseen and with_unseen(trial.plain_peak_bytes) <= budget_bytes:
        return Plain(trial.plain_peak_bytes)
    if not trial.loops:
        raise FitError(
            "its forward calls no list of blocks one after the other, and has no recurrent layer (plain, a step takes "
            f"about {format_bytes(trial.plain_peak_bytes)})"
        )
    costs, outside = survey(model, args, kwargs, trial, budget_bytes)
    return Loops(kind_of(model, trial.loops), trial, divided(budget_bytes, outside, trial.loops, costs))


def with_unseen(plain_bytes: int) -> int:
    """A budget that is sure to hold a plain step that takes so much on paper."""
    return plain_bytes * (100 + _PERCENT_UNSEEN) // 100


def kind_of(model: nn.Module, loops: Sequence[Loop]) -> str:
    """The name of the way of these loops."""
    if type(model).forward is nn.Sequential.forward:
        return "chain"
    return "recurrent" if all(loop.is_recurrent for loop in loops) else "blocks"


@dataclass(frozen=True, slots=True)
class Plain:
    """The plain call: everything fits."""

    peak_bytes: int
    name: str = "plain"

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Way`."""
        return seams.own_call(model)(*args, **kwargs)

    def explain(self) -> str:
        """See `Way`."""
        return f"way           plain: everything fits, about {format_bytes(self.peak_bytes)}; nothing is computed twice"


_REASONS: Final = {
    "chain": "the model is a sequence of blocks",
    "blocks": "its forward calls blocks one after the other, and uses what is between them nowhere else",
    "recurrent": "its recurrent layers are run in chunks of time",
}


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops of blocks, each within its share of the budget."""

    name: str
    trial: Trial
    division: Division

    @property
    def peak_bytes(self) -> int:
        """See `Way`."""
        return self.division.peak_bytes

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Way`."""
        seams.install(blocks_of(model))  # copies have lost theirs
        gathering = Gathering(self.trial.loops, self._answer)
        try:
            with seams.observed(gathering):
                result = seams.own_call(model)(*args, **kwargs)
        except PendingUse as use:
            raise StepError(f"{use}, which it did not do in the trial; fit does not take such models") from None
        if not gathering.finished:
            raise StepError("the model calls fewer blocks than in the trial; fit does not take models that skip blocks")
        return result

    def _answer(self, number: int, gathered: Gathered) -> Sequence[Tensor]:
        share = self.division.shares[number]
        with seams.observed(None):
            if gathered.loop.is_recurrent:
                with KernelCalls(share.budget_bytes, None):
                    return gathered.finals(gathered.own())
            budget = share.budget_bytes if needs_gradient(gathered) else 1
            given = gathered.stages, gathered.carry, tuple(gathered.shared)
            final: Sequence[Tensor] = chain_by_plan(*given, budget, share.plan)
            return final

    def _plain(self) -> str:
        if self.name == "recurrent":
            return ""
        return f"; plain takes about {format_bytes(self.trial.plain_peak_bytes)}"

    def explain(self) -> str:
        """See `Way`."""
        division = self.division
        lines = [
            f"way           {self.name}: {_REASONS[self.name]}",
            f"predicted     {format_bytes(division.peak_bytes)} at most{self._plain()}",
            f"outside       {format_bytes(division.outside_bytes)} at most beside the blocks: they are not recomputed",
        ]
        for loop, share in zip(self.trial.loops, division.shares, strict=True):
            lines.append(
                f"loop          {loop.name}: {len(loop.calls)} calls, within {format_bytes(share.budget_bytes)}"
            )
            facts = () if share.plan is None else share.plan.facts()
            lines += [f"{subject:<14}{sentence}" for subject, sentence in facts if subject != "budget"]
        return "\n".join(lines)
