"""Everything remat raises on purpose.

RematError
├── InfeasibleBudget   (ValueError)    no schedule fits; carries the smallest budget that does
├── IllegalSchedule    (ValueError)    the simulator refused an action
├── UnsupportedChain   (ValueError)    this planner cannot plan this chain; names one that can
├── StepError          (ValueError)    the step, its inputs or its results break the contract of `scan`
└── FitError           (ValueError)    `fit` found no way to train this model inside a budget
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .sizes import format_bytes


class RematError(Exception):
    """Base class of remat's own errors."""


class InfeasibleBudget(RematError, ValueError):
    """No schedule of the asked kind stays inside the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_budget_bytes: the smallest budget with which the same call works.
        parts_bytes: what that smallest budget is made of, by name, in bytes.
    """

    def __init__(self, budget_bytes: int, smallest_budget_bytes: int, parts_bytes: Mapping[str, int]) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_budget_bytes = smallest_budget_bytes
        self.parts_bytes = dict(parts_bytes)
        made_of = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts_bytes.items() if size)
        super().__init__(
            f"a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small; "
            f"the smallest that works is {smallest_budget_bytes} bytes ({format_bytes(smallest_budget_bytes)})"
            + (f": {made_of}" if made_of else "")
        )

    def __reduce__(self) -> tuple[type[InfeasibleBudget], tuple[int, int, dict[str, int]]]:
        return type(self), (self.budget_bytes, self.smallest_budget_bytes, self.parts_bytes)


class IllegalSchedule(RematError, ValueError):
    """An action that cannot be carried out where it stands.

    Attributes:
        action: the refused action, or None when the schedule ended too early.
        position: its index in the schedule, from 0.
        reason: why it was refused.
    """

    def __init__(self, action: object, position: int, reason: str) -> None:
        self.action, self.position, self.reason = action, position, reason
        what = "the schedule ends" if action is None else str(action)
        super().__init__(f"action {position}, {what}: {reason}")

    def __reduce__(self) -> tuple[type[IllegalSchedule], tuple[object, int, str]]:
        return type(self), (self.action, self.position, self.reason)


class UnsupportedChain(RematError, ValueError):
    """The planner has no answer for a chain of this kind; the message names one that has."""


class StepError(RematError, ValueError):
    """A step, or what was handed to it, breaks the contract of `remat.scan`."""


class KeptTensors(RematError):
    """A step keeps tensors with gradients beside its carry; never reaches the user.

    Attributes:
        places: where.
    """

    def __init__(self, places: Sequence[Any]) -> None:
        self.places = tuple(places)
        super().__init__(f"tensors are kept in {len(self.places)} places")


class LateChange(RematError):
    """A later step changed something that the first did not; never reaches the user.

    Attributes:
        numbers: what changed, by the number of its source.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        super().__init__(f"sources {self.numbers} changed")


class LateGradient(RematError):
    """Leaves of carries, or outputs, need a gradient at steps at which none was foreseen; never reaches the user.

    Attributes:
        needed: which do at any step.
    """

    def __init__(self, needed: Any) -> None:
        self.needed = needed
        super().__init__("more gradients are needed than were foreseen")


class FitError(RematError, ValueError):
    """There is no way to train this model, called like this, inside a budget; says what stood in the way of each."""
