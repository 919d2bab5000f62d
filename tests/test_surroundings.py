"""Stages run again in the forward's surroundings; backwards run in those of the backward, as the plain run's do."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

STEPS, BATCH, TIME, WIDTH = 5, 2, 6, 16


class Attention(nn.Module):
    """Dropout inside of attention: its backward computes otherwise under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(BATCH, TIME, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return x + self.out(found.transpose(1, 2).reshape(BATCH, TIME, WIDTH))


class Watched(torch.autograd.Function):
    """Writes down whether autocast is on in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.seen.append(torch.is_autocast_enabled("cpu"))
        return gradients[0] * 2, None


Run = Callable[[Tensor], Tensor]


def layers(runs: Sequence[Run], x: Tensor, budget: Any) -> Tensor:
    return remat.chain(runs, x, budget=budget)


def time(runs: Sequence[Run], x: Tensor, budget: Any) -> Tensor:
    return remat.scan(lambda h, _: (runs[0](h), None), x, length=STEPS, budget=budget)[0]


def plain(runs: Sequence[Run], x: Tensor, _: Any) -> Tensor:
    for run in runs:
        x = run(x)
    return x


LOOPS = {"chain": layers, "scan": time}
BUDGETS = {"all kept": "1GiB", "all run again": None}


def budget_of(kept: str, loop: Any, runs: Sequence[Run], x: Tensor) -> Any:
    """A budget by name: much, or the smallest that works."""
    if BUDGETS[kept]:
        return BUDGETS[kept]
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        loop(runs, x, 1)
    return refusal.value.smallest_budget_bytes


@pytest.mark.parametrize("kept", BUDGETS)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("backward_too", [False, True])
def test_attention_with_dropout_under_autocast(name: str, kept: str, backward_too: bool) -> None:
    torch.manual_seed(0)
    modules = [Attention() for _ in range(STEPS)] if name == "chain" else [Attention()] * STEPS
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)

    def gradients(loop: Any, budget: Any) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loop(modules, x, budget).float().square().mean()
        with torch.autocast("cpu", torch.bfloat16) if backward_too else nullcontext():
            return list(torch.autograd.grad(loss, [x, *parameters]))

    wanted = gradients(plain, None)
    with torch.autocast("cpu", torch.bfloat16):
        budget = budget_of(kept, LOOPS[name], modules, x)
    found = gradients(LOOPS[name], budget)
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("kept", BUDGETS)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("around", [(True, False), (False, True), (True, True)])
def test_a_backward_meets_the_autocast_of_its_own_time(name: str, kept: str, around: tuple[bool, bool]) -> None:
    seen: list[bool] = []
    x = torch.randn(BATCH, TIME, requires_grad=True)
    forwards: list[bool] = []

    def run(h: Tensor) -> Tensor:
        forwards.append(torch.is_autocast_enabled("cpu"))
        return Watched.apply(h, seen).sin()

    with torch.autocast("cpu", torch.bfloat16, enabled=around[0]):
        budget = budget_of(kept, LOOPS[name], [run] * STEPS, x)
        forwards.clear()
        result = LOOPS[name]([run] * STEPS, x, budget)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=around[1]):
        result.sum().backward()
    assert set(forwards) == {around[0]}, "stages run again as they ran first"
    assert seen == [around[1]] * STEPS
