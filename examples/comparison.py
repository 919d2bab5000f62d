"""What the examples have in common: one training pass plainly, one within a budget, and what they took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import remat


@dataclass(frozen=True)
class Comparison:
    """What both passes took, and whether they agree bit for bit."""

    plain_bytes: int
    budget_bytes: int
    peak_bytes: int
    equal: bool


def compare(tensors: Iterable[Tensor], loss: Callable[[int | None], Tensor], share: float) -> Comparison:
    """Run `loss(None)` and `loss(budget)` with their backward passes, from one random seed; print what they took.

    Args:
        tensors: what gets gradients.
        loss: makes the loss, within a budget in bytes or, for None, with the plain loop.
        share: the budget, as a share of what the plain pass takes.
    """
    tensors = list(tensors)

    def measured(budget: int | None) -> tuple[int, float, list[Tensor]]:
        for tensor in tensors:
            tensor.grad = None
        torch.manual_seed(0)
        taken = remat.measure(lambda: loss(budget).backward())
        return taken.peak_bytes, taken.seconds, [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]

    plain_bytes, plain_s, gradients = measured(None)
    budget_bytes = int(share * plain_bytes)
    measured(budget_bytes)  # the first call also measures the step and plans; it keeps within the budget, too
    peak_bytes, budgeted_s, others = measured(budget_bytes)
    equal = len(gradients) == len(others) and all(map(torch.equal, gradients, others))
    print(f"plain     {plain_bytes / 2**20:8.2f} MiB  {plain_s:6.2f} s")
    print(f"remat     {peak_bytes / 2**20:8.2f} MiB  {budgeted_s:6.2f} s  within {budget_bytes / 2**20:.2f} MiB")
    print(f"gradients {'equal, bit for bit' if equal else 'DIFFER'}")
    return Comparison(plain_bytes, budget_bytes, peak_bytes, equal)
