"""`remat.check`: will a training step fit, and what would it cost? Answered on paper, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any, Final

import torch
from torch import Tensor, nn

from .ambient import Surroundings
from .apart import by_itself
from .budgets import budget_bytes
from .errors import FitError, InfeasibleBudget
from .estimate import Rates
from .fit import device_of, refuse_unfit
from .fitting.forecast import Forecast
from .fitting.optimizers import Needs, gradient_bytes, needs_of
from .sizes import format_bytes

_SHARES: Final = (0.75, 0.5, 0.35, 0.25, 0.15)  # of the plain step, for the table of prices
Optimizers = str | torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Price:
    """What a budget would bring.

    Attributes:
        budget_bytes: the budget.
        peak_bytes: what the step, and the optimizer's state, would take of it at most.
        time_ratio: the step's time over that of the plain step, by estimate.
        way: what `fit` would do.
    """

    budget_bytes: int
    peak_bytes: int
    time_ratio: float
    way: str


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a training step fits, on paper. All bytes but the first three are over those at the start of the step.

    Attributes:
        model: the name of its class.
        parameter_bytes, buffer_bytes, input_bytes: there before the step, and no part of a budget.
        gradient_bytes: gradients of all parameters.
        optimizer_bytes: state that the optimizer has still to make.
        optimizer_step_bytes: what its step takes in passing, beside that state.
        plain_gradient_bytes, plain_activation_bytes, plain_workspace_bytes: what the fullest moment of the plain step
            is made of: gradients there by then, what the forward left for the backward, and the rest.
        plain_budget_bytes: a budget within which nothing is recomputed.
        smallest_budget_bytes: the smallest budget that works; None if there is no way to recompute.
        reason: why there is no way; empty if there is one.
        budget_bytes: the budget that was asked for.
        answer: what it would bring; None if it is too small.
        prices: what other budgets would, the largest first.
        recurrent: whether there are recurrent layers: they count as kept whole, though `fit` runs them in chunks.
    """

    model: str
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    optimizer_step_bytes: int
    plain_gradient_bytes: int
    plain_activation_bytes: int
    plain_workspace_bytes: int
    plain_budget_bytes: int
    smallest_budget_bytes: int | None
    reason: str
    budget_bytes: int
    answer: Price | None
    prices: tuple[Price, ...]
    recurrent: bool

    @property
    def fits(self) -> bool:
        """Whether the budget is enough."""
        return self.answer is not None

    @property
    def plain_peak_bytes(self) -> int:
        """What the plain step takes at most, state of the optimizer included."""
        items = self.plain_gradient_bytes + self.plain_activation_bytes + self.plain_workspace_bytes
        return self.optimizer_bytes + items

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON, `fits` included."""
        return {**asdict(self), "fits": self.fits, "plain_peak_bytes": self.plain_peak_bytes}

    def explain(self) -> str:
        """The answer, the breakdown, and the prices, as text."""
        lines = []
        for subject, sentence in self._facts():
            for number, line in enumerate(wrap(sentence, 66)):
                lines.append(f"{'' if number else subject:<14}{line}")
        lines += ["", f"{'budget':>10} {'of plain':>9} {'peak':>10} {'time':>7}  way"]
        for price in self.prices:
            share = 100 * price.budget_bytes / self.plain_peak_bytes
            size, peak = format_bytes(price.budget_bytes), format_bytes(price.peak_bytes)
            lines.append(f"{size:>10} {share:>7.0f} % {peak:>10} {price.time_ratio:>5.2f} ×  {price.way}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def _facts(self) -> Sequence[tuple[str, str]]:
        size = format_bytes
        there = self.parameter_bytes + self.buffer_bytes + self.input_bytes
        facts = [
            (self._verdict(), self._sentence()),
            (
                "parameters",
                f"{size(self.parameter_bytes)}, and {size(self.buffer_bytes)} of buffers and "
                f"{size(self.input_bytes)} of inputs: there before the step, and no part of the budget",
            ),
            (
                "gradients",
                f"{size(self.gradient_bytes)} in the end, {size(self.plain_gradient_bytes)} at the plain "
                "step's fullest moment",
            ),
            (
                "optimizer",
                f"{size(self.optimizer_bytes)} of state to be made, {size(self.optimizer_step_bytes)} more in its step",
            ),
            ("activations", f"{size(self.plain_activation_bytes)}: what the forward keeps for the backward"),
            ("workspace", f"{size(self.plain_workspace_bytes)}: gradients on their way, operators' own"),
            (
                "plain step",
                f"{size(self.plain_peak_bytes)} at its fullest, {size(there + self.plain_peak_bytes)} with "
                "what is there before; nothing is recomputed within a budget of "
                f"{size(self.plain_budget_bytes)}",
            ),
        ]
        if self.smallest_budget_bytes is None:
            facts.append(("smallest", f"there is no way to recompute: {self.reason}"))
        else:
            facts.append(("smallest", f"{size(self.smallest_budget_bytes)} ({self.smallest_budget_bytes} bytes)"))
        if self.recurrent:
            facts.append(("recurrent", "layers count as kept whole here; fit runs them in chunks of time, in less"))
        return facts

    def _verdict(self) -> str:
        return "fits" if self.fits else "does not fit"

    def _sentence(self) -> str:
        budget = format_bytes(self.budget_bytes)
        if self.answer is None:
            return f"{self.model} within {budget}"
        peak, ratio = format_bytes(self.answer.peak_bytes), self.answer.time_ratio
        how = "nothing is recomputed" if self.answer.way == "plain" else f"{ratio:.2f} × the time of the plain step"
        return f"{self.model} within {budget}: {peak} at most, {how} (way: {self.answer.way})"


def check(
    model: nn.Module,
    *inputs: Any,
    budget: int | str | None = None,
    optimizer: Optimizers | None = None,
    rates: Rates | None = None,
    **kwargs: Any,
) -> Check:
    """Whether a training step of a model fits into a budget under `fit`, with what it is made of and other prices.

    Nothing is allocated and the model does not run: it is copied with fake tensors in the place of its own, which may
    be on the device "meta", so that a model can be asked about that no machine here could hold. Its loss need not be
    part of it; the gradients of its outputs are then counted as large as the outputs. Bytes are those of `fit`'s own
    plans, but for what kernels allocate inside themselves (see `remat.estimate`).

    Args:
        model: what is to be trained; taken in training mode.
        inputs, kwargs: what it is called with: real tensors, or on the device "meta".
        budget: as `fit` takes it: bytes for the step and the optimizer's state, beside parameters; None takes 90 % of
            what is free on the device, less what the model's parameters on "meta" will take.
        optimizer: one that has been made, what makes one from parameters, or its name in `torch.optim`, as "adamw".
        rates: how fast the device is; None times this machine for a moment.

    Raises:
        FitError: the model cannot be worked out on paper; says why.
        ValueError: no optimizer has that name.
    """
    refuse_unfit(model)
    device = device_of(model)
    needs = needs_of(_optimizer(optimizer, model)) if optimizer is not None else Needs(0, 0)
    limit = _limit(budget, model, device)
    speed = rates or Rates.measured(device)

    def job() -> Check:
        return _checked(model, inputs, kwargs, limit, needs, Forecast(model, inputs, kwargs, speed))

    return by_itself(job, Surroundings({device.type}))


def _checked(model: nn.Module, inputs: Any, kwargs: Any, limit: int, needs: Needs, forecast: Forecast) -> Check:
    gradients = gradient_bytes(model)
    floor = gradients + needs.passing_bytes if needs.passing_bytes else 0  # what the optimizer's step needs anyway
    plain = max(forecast.plain_bytes + needs.state_bytes, floor)
    reason, smallest = "", None

    def price(budget: int) -> Price | None:
        if budget < floor:
            return None
        try:
            found = forecast.within(budget - needs.state_bytes)
        except (FitError, InfeasibleBudget):
            return None
        peak = max(found.peak_bytes + needs.state_bytes, floor)
        return Price(budget, peak, found.time_ratio, found.way)

    try:
        smallest = max(forecast.smallest_bytes() + needs.state_bytes, floor)
    except FitError as error:
        reason = str(error)
    answer = price(limit)
    if answer is not None and smallest is not None:
        smallest = min(smallest, limit)
    least = plain if smallest is None else smallest
    items = forecast.items
    asked = [plain, *(int(share * (items.peak_bytes + needs.state_bytes)) for share in _SHARES)]
    prices = [price(budget) for budget in (*(budget for budget in asked if budget > least), least)]
    return Check(
        type(model).__name__,
        sum(p.nbytes for p in model.parameters()),
        sum(b.nbytes for b in model.buffers()),
        _bytes((inputs, kwargs)),
        gradients,
        needs.state_bytes,
        needs.passing_bytes - needs.state_bytes,
        items.gradient_bytes,
        items.activation_bytes,
        items.workspace_bytes,
        plain,
        smallest,
        reason,
        limit,
        answer,
        tuple(found for found in prices if found is not None),
        forecast.recurrent,
    )


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _limit(budget: int | str | None, model: nn.Module, device: torch.device) -> int:
    if budget not in (None, "auto"):
        return budget_bytes(budget, device)
    missing = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == "meta")
    return max(budget_bytes(None, device) - missing, 1)


def _optimizer(optimizer: Optimizers, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not isinstance(optimizer, str):
        return optimizer(trained)
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if optimizer.lower() not in known:
        raise ValueError(f"no optimizer is called {optimizer!r}; torch.optim has {', '.join(sorted(known))}")
    return known[optimizer.lower()](trained)
