"""Pieces of a plan for Inductor: what is run again stays run again, what is not Inductor's stays outside."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import fx, nn

import remat
from graph.corpus import case
from graph.joint import within
from graph.networks import step
from remat.graph import compilation, fusing
from remat.graph.backend import last_plan
from remat.graph.compilation import Options
from remat.graph.op_costs import estimated

Pieces = list[fx.GraphModule]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    """Pieces run as PyTorch would run them, and are noted."""
    found: Pieces = []

    def as_it_is(module: fx.GraphModule, _inputs: Any) -> Any:
        found.append(module)
        return lambda args: module(*[args.pop(0) for _ in range(len(args))])

    monkeypatch.setattr(fusing, "_through_inductor", as_it_is)
    return found


def of(name: str) -> tuple[Any, list[torch.Tensor]]:
    """A case as a scalar, and tensors of its own."""
    function, args = case(name)
    return lambda *xs: function(*xs).square().mean(), [a.detach().clone().requires_grad_(a.requires_grad) for a in args]


def smallest(function: Any, args: list[torch.Tensor]) -> int:
    with pytest.raises(remat.InfeasibleBudget) as caught:
        within(function, args, budget=1, gradients_exist=True, lowering="inductor")[0](*args)
    return caught.value.smallest_budget_bytes


def test_a_piece_computes_nothing_twice_and_draws_nothing(pieces: Pieces) -> None:
    function, tensors = of("attention")
    wanted = step(function, tensors)
    function, tensors = of("attention")
    budget = smallest(function, tensors)
    call, made = within(function, tensors, budget=budget, gradients_exist=True, lowering="inductor")
    found = step(call, tensors)
    assert torch.equal(found["random state"], wanted["random state"])
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)
    for piece in pieces:
        nodes = [node for node in piece.graph.nodes if node.op == "call_function"]
        assert len({(node.target, str(node.args), str(node.kwargs)) for node in nodes}) == len(nodes)
        assert not any("bernoulli" in str(node.target) for node in nodes)
    assert made.plan is not None
    order = made.plan.program.order
    assert len(set(order)) < len(order)


@pytest.mark.parametrize(("layers", "extra_share"), [(12, 0.45), (6, 2.0)])
def test_what_takes_more_than_the_budget_is_planned_again(
    monkeypatch: pytest.MonkeyPatch, layers: int, extra_share: float
) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(16, 16), nn.Tanh())))
    x = torch.randn(256, 16)
    model(x).sum().backward()
    budget = round(0.8 * remat.measure(lambda: model(x).sum().backward()).peak_bytes)

    def greedy(module: fx.GraphModule, _inputs: Any) -> Any:
        """Pieces that take more than they are planned to."""

        def run(args: list[Any]) -> Any:
            taken = torch.empty(round(extra_share * budget), dtype=torch.uint8)
            del taken
            return module(*[args.pop(0) for _ in range(len(args))])

        return run

    monkeypatch.setattr(fusing, "_through_inductor", greedy)
    monkeypatch.setattr(compilation, "measured", estimated)  # the same everywhere
    options = {"budget": budget, "gradients_exist": True, "lowering": "inductor"}
    compiled = torch.compile(lambda x: model(x).sum(), backend="remat", options=options)
    plans = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(x).backward()
            plans.append(last_plan())
    assert (plans[-1].peak_bytes < plans[0].peak_bytes <= budget) or extra_share >= 1
    measured = remat.measure(lambda: compiled(x).backward()).peak_bytes
    assert (measured <= budget) == (extra_share < 1)
    assert any("more than the budget" in str(one.message) for one in said) == (extra_share >= 1)
    torch._dynamo.reset()


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_inductor_runs_a_plan_within_its_budget() -> None:
    function, tensors = of("sigmoids")
    tensors[0] = torch.randn(512, 32)
    wanted = step(function, tensors)
    budget = smallest(function, tensors)
    call, _ = within(function, tensors, budget=budget, gradients_exist=True, lowering="inductor")
    for tensor in tensors:
        tensor.grad = None
    found = step(call, tensors)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)
    assert remat.measure(lambda: call(*tensors).backward()).peak_bytes <= budget
    loss = call(*tensors)
    first = torch.autograd.grad(loss, tensors[1:], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, tensors[1:]), strict=True))


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    function, args = case("sigmoids")
    with pytest.raises(remat.RematError, match=r'needs a C\+\+ compiler .* take lowering "eager"'):
        within(function, args, lowering="inductor")[0](*args)
    with pytest.raises(ValueError, match="lowering is one of eager, inductor, not 'triton'"):
        Options.from_mapping({"lowering": "triton"})
