"""Convolutions in traced steps: taken apart, and as true as the plain loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from halves import COMPILED, recorded_in_halves
from plain import plain_scan
from remat.traced.traced import Traced
from remat.traced.tracing import Problem
from remat.trees import Structure

WAYS = ["python", pytest.param("inductor", marks=COMPILED)]


class Automaton(nn.Module):
    """A grid that convolutions change: 3×3 into a wider one, 1×1 back; or the other way round."""

    def __init__(self, kernels: tuple[int, int], *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        first, second = kernels
        self.seen = nn.Conv2d(4, 10, first, padding=first // 2, bias=bias)
        self.rule = nn.Conv2d(10, 4, second, padding=second // 2, bias=bias)

    def forward(self, grid: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grid = torch.tanh(grid + 0.3 * self.rule(F.relu(self.seen(grid) + x)))
        return grid, grid.square().mean((1, 2, 3))


def traced(module: Automaton, grid: Tensor, x: Tensor) -> Traced:
    weights = list(module.parameters())
    return Traced(Problem(module, Structure(grid), [grid], Structure(x), [x], (True,), weights, weights))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kernels", "bias"), [((3, 1), True), ((1, 3), True), ((3, 1), False)])
def test_gradients_are_as_true_as_the_plain_loops(
    kernels: tuple[int, int], bias: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    data = [(torch.randn(2, 4, 12, 14), torch.randn(9, 10, 1, 1)) for _ in range(8)]

    def gradients(scan: Any, dtype: torch.dtype, **more: Any) -> list[Tensor]:
        module, found = Automaton(kernels, bias=bias).to(dtype), []
        for grid, xs in data:
            start = grid.to(dtype).requires_grad_()
            carry, ys = scan(module, start, xs.to(dtype), **more)
            found += torch.autograd.grad(ys.sum() + carry.square().sum(), [start, *module.parameters()])
        return [gradient.double() for gradient in found]

    def error(found: list[Tensor]) -> float:
        return sum(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))

    truth = gradients(plain_scan, torch.float64)
    plain = gradients(plain_scan, torch.float32)
    other = "bare" if way == "inductor" else "whole"
    for number, pair in enumerate((("lean", other), (other, "lean"))):
        plans = recorded_in_halves(monkeypatch, *pair)
        got = gradients(remat.scan, torch.float32, budget=2**30 + number, compile=way)
        assert plans
        # Rounding is random, and over so many numbers only a little.
        assert error(got) <= 1.25 * error(plain)


@pytest.mark.parametrize(("size", "kinds"), [((12, 14), set()), ((3, 4), {"product", "sum", "convolution"})])
def test_what_waits_for_other_steps(size: tuple[int, int], kinds: set[str]) -> None:
    """1×1 is a product, a bias's gradient a sum; of many pixels nothing waits, which would cost memory."""
    step = traced(Automaton((3, 1), bias=True), torch.randn(2, 4, *size), torch.randn(10, 1, 1))
    names = [str(node.target) for node in step.joint.graph.nodes]
    assert names.count("aten.convolution.default") == 1
    assert {"aten.addmm.default", "aten.sum.dim_IntList"} <= set(names)
    for menu in step.menu:
        assert {term.kind for term in menu.plan.terms} == kinds
