"""A model captured in several graphs: one budget for the step, eager's bits, measured."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import remat
from graph.networks import step
from remat.graph import compilation
from remat.graph.backend import last_step
from remat.graph.op_costs import estimated
from remat.graph.sharing import Take, shared, smallest_bytes, step_peak_bytes


def test_what_a_step_takes() -> None:
    one, other = Take(50, 30, 60, 5, 1), Take(40, 20, 45, 7, 1)
    assert step_peak_bytes([one]) == 60
    # The forward of the second on what the first keeps, 70, and its backward, 75; the first's own on what that leaves.
    assert step_peak_bytes([one, other]) == 75
    assert step_peak_bytes([one, other, one]) == 30 + 20 + 60
    assert step_peak_bytes([other, one]) == 20 + 60


def test_shares_fit_and_none_can_be_bettered_alone() -> None:
    draw = random.Random(1)
    compared = []
    for _ in range(60):
        menus = {}
        for part in range(draw.randint(1, 3)):
            sizes, seconds = sorted(draw.sample(range(100), 4)), sorted(draw.sample(range(50), 4), reverse=True)
            menus[part] = [Take(k + 9, k, k + draw.randint(1, 40), 2, s) for k, s in zip(sizes, seconds, strict=True)]
        steps = [[draw.choice(list(menus)) for _ in range(4)] + list(menus) for _ in range(2)]
        budget = round(smallest_bytes(menus, steps) * draw.uniform(0.9, 2))
        chosen = shared(menus, steps, budget)
        fitting = [
            sum(menus[p][k].seconds for p, k in enumerate(found))
            for found in itertools.product(*(range(4) for _ in menus))
            if all(step_peak_bytes([menus[p][found[p]] for p in calls]) <= budget for calls in steps)
        ]
        if chosen is None:
            assert budget < smallest_bytes(menus, steps)
            continue
        for part, k in ((part, k) for part in menus for k in range(4)):
            trial = {**chosen, part: k}
            fits = all(step_peak_bytes([menus[p][trial[p]] for p in calls]) <= budget for calls in steps)
            assert not fits or menus[part][k].seconds >= menus[part][chosen[part]].seconds
        compared.append(sum(menus[p][k].seconds for p, k in chosen.items()) / max(1, min(fitting)))
    assert sum(compared) / len(compared) < 1.05


class Parted(nn.Module):
    """Layers in three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self._layers() for _ in range(3))

    @staticmethod
    def _layers() -> nn.Module:
        return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        x = nn.functional.dropout(self.parts[1](x), 0.5)
        torch._dynamo.graph_break()
        return self.parts[2](x).square().sum()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compilation, "measured", estimated)  # the same everywhere
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    return remat.measure(lambda: model(x).backward()).peak_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the front end looks, and hides it from users
@pytest.mark.usefixtures("fresh")
def test_parts_share_one_budget() -> None:
    torch.manual_seed(0)
    model, x = Parted(), torch.randn(512, 16)
    eager = copy.deepcopy(model)
    wanted = step(lambda x, *_: eager(x), [x, *eager.parameters()])
    plain = peak_of(eager, x)
    budget = round(0.7 * plain)
    compiled = torch.compile(model, backend="remat", options={"budget": budget, "gradients_exist": True})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ratios = []
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        found = step(lambda x, *_: compiled(x), [x, *model.parameters()])
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        made = last_step()
        assert made is not None
        ratios.append([plan.time_ratio for plan in made.plans])
        assert len(made.plans) == 3
        assert f"3 graphs in a step take {made.peak_bytes / 1024:.0f} KiB" in made.explain()
    assert max(ratios[1]) < max(ratios[0])  # what was planned as small as could be is planned anew
    assert ratios[2] == ratios[1]
    measured = peak_of(compiled, x)
    assert measured <= budget
    assert made.peak_bytes == pytest.approx(measured, rel=0.1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the front end looks, and hides it from users
@pytest.mark.usefixtures("fresh")
def test_parts_that_cannot_share_a_budget_say_what_they_need() -> None:
    model, x = Parted(), torch.randn(512, 16)

    def refusal(budget_bytes: int) -> remat.InfeasibleBudget | None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="remat", options={"budget": budget_bytes})
        try:
            for _ in range(2):  # what parts leave to one another is known after the first
                model.zero_grad()
                compiled(x).backward()
        except Exception as caught:
            cause: BaseException | None = caught
            while cause is not None and not isinstance(cause, remat.InfeasibleBudget):
                cause = cause.__cause__ or cause.__context__
            assert cause is not None
            return cause
        return None

    budget, said = 1, []
    while (refused := refusal(budget)) is not None:
        said.append(str(refused))
        assert refused.smallest_budget_bytes > budget
        budget = refused.smallest_budget_bytes
    assert "1 graph of the model, not counting those still to be captured, which need more" in said[0]
    assert "3 graphs of one model together" in said[-1]
    assert "not counting" not in said[-1]
    assert len(said) <= 3
