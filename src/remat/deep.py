"""`remat bench resnet1000`: Chen's headline trained on this machine, within shares of the plain run's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .chain import chain, plan_chain
from .errors import InfeasibleBudget
from .meter import measure

SHARES: Final = (0.5, 7 / 48, 0.10, 0.05, 0.02)  # of plain; 7/48 is the paper's memory
Forward = Callable[[Tensor], Tensor]


class Bottleneck(nn.Module):
    """He et al. 2016, "Identity mappings": batch norm and activation before each of three convolutions, input added."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        middle = leaving // 4
        self.norm1, self.conv1 = nn.BatchNorm2d(entering), nn.Conv2d(entering, middle, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(middle), nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(middle), nn.Conv2d(middle, leaving, 1, bias=False)
        self.short = nn.Conv2d(entering, leaving, 1, stride, bias=False) if entering != leaving else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        y = self.conv1(h)
        y = self.conv2(F.relu(self.norm2(y)))
        y = self.conv3(F.relu(self.norm3(y)))
        result: Tensor = y + (x if self.short is None else self.short(h))
        return result


def resnet(depth: int, width: int = 16) -> nn.Sequential:
    """A network of `depth` = 9n + 2 layers for small images of ten classes."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    entering = width
    for stage, leaving in enumerate((4 * width, 8 * width, 16 * width)):
        for index in range((depth - 2) // 9):
            blocks.append(Bottleneck(entering, leaving, 2 if stage and not index else 1))
            entering = leaving
    return nn.Sequential(
        *blocks, nn.BatchNorm2d(entering), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, 10)
    )


class Training:
    """A training iteration of such a network on images of size × size, with one way of running it or another."""

    def __init__(self, depth: int, batch: int, size: int) -> None:
        self.net = resnet(depth)
        self.images, self.labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
        for parameter in self.net.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def iterate(self, forward: Forward) -> None:
        """Gradients, forward and backward; parameters stay as they are."""
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        F.cross_entropy(forward(self.images), self.labels).backward()  # type: ignore[no-untyped-call]

    def gradients(self, forward: Forward) -> list[Tensor]:
        """Copies of all gradients after an iteration."""
        self.iterate(forward)
        return [p.grad.clone() for p in self.net.parameters() if p.grad is not None]

    def budgeted(self, budget_bytes: int) -> Forward:
        """The way of running it inside a budget."""
        return lambda x: chain(self.net, x, budget=budget_bytes)


class Result(NamedTuple):
    """What a budget came to.

    Attributes:
        share: the budget as a share of the plain measured peak.
        peak_bytes: measured.
        times: processor time over plain's, iterations taken in turn; the median.
        foreseen: the same by the plan, over every stage once forward and once backward.
        equal: whether all gradients are the plain run's, bit for bit.
    """

    share: float
    peak_bytes: int
    times: float
    foreseen: float
    equal: bool


class Refused(NamedTuple):
    """A share that is too small, and the smallest budget that is not."""

    share: float
    smallest_budget_bytes: int


def experiment(depth: int, batch: int, size: int, rounds: int) -> Iterator[int | Result | Refused]:
    """Train plainly and within budgets: yields the plain peak in bytes, then a result for each of `SHARES`.

    What cannot be met is said.
    """
    training = Training(depth, batch, size)
    plain: Forward = training.net.__call__
    training.iterate(plain)
    plain_bytes = measure(partial(training.iterate, plain)).peak_bytes
    yield plain_bytes
    for share in SHARES:
        budget_bytes = int(plain_bytes * share)
        try:
            plan = plan_chain(training.net, training.images, budget=budget_bytes)
        except InfeasibleBudget as refusal:
            yield Refused(share, refusal.smallest_budget_bytes)
            continue
        way = training.budgeted(budget_bytes)
        equal = all(map(torch.equal, training.gradients(plain), training.gradients(way)))
        peak_bytes = measure(partial(training.iterate, way)).peak_bytes
        ratios = [_seconds(training, way) / _seconds(training, plain) for _ in range(rounds)]
        yield Result(share, peak_bytes, median(ratios), plan.seconds / plan.lower_bound_s, equal)


def _seconds(training: Training, way: Forward) -> float:
    begin = time.process_time()
    training.iterate(way)
    return time.process_time() - begin
