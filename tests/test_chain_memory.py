"""What `remat.chain` really allocates: within the budget, as predicted, whoever has gradients already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from plain import Program, leaves_of, seed_everything
from stacks import STACKS, Convolutions, budget_at, chained, plain_chain, planned

SIZE = 16


def network(blocks: int = 12) -> nn.Sequential:
    seed_everything(3)
    half = blocks // 2
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Convolutions(8, 8) for _ in range(half)),
        Convolutions(8, 16, 2),
        *(Convolutions(16, 16) for _ in range(half)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def training(net: nn.Module, chain: Callable[[Any, Tensor], Tensor], *, made: bool) -> Callable[[], None]:
    """A training step; `made`: gradients exist before."""
    x = torch.randn(6, 3, SIZE, SIZE)
    for p in net.parameters():
        p.grad = torch.zeros_like(p) if made else None

    def step() -> None:
        chain(net, x).square().mean().backward()

    return step


@pytest.mark.parametrize("made", [True, False], ids=["gradients exist", "gradients appear"])
@pytest.mark.parametrize("percent", [100, 70, 50, 36])  # below, some machines' convolutions take more workspace
def test_the_peak_is_within_the_budget_and_as_predicted(percent: int, made: bool) -> None:
    net = network()
    budget = remat.measure(training(net, lambda net, x: net(x), made=made)).peak_bytes * percent // 100
    step = training(net, lambda net, x: remat.chain(net, x, budget=budget), made=made)
    predicted = remat.plan_chain(net, torch.randn(6, 3, SIZE, SIZE), budget=budget).peak_bytes
    measured = remat.measure(step).peak_bytes
    assert measured <= budget
    assert abs(predicted - measured) <= 0.02 * budget
    assert predicted <= budget


def test_keeping_everything_costs_what_the_plain_loop_costs() -> None:
    net = network()
    plain = remat.measure(training(net, lambda net, x: net(x), made=True)).peak_bytes
    ours = remat.measure(training(net, lambda net, x: remat.chain(net, x, budget="1GiB"), made=True)).peak_bytes
    assert ours <= 1.01 * plain


def train(program: Program, loop: Callable[..., Any]) -> None:
    with program.around():
        results = loop(program.step, program.carry, program.xs)
    outputs = [leaf for _, leaf in leaves_of(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    del results
    arriving = [torch.ones_like(output) for output in outputs]
    torch.autograd.backward(outputs, arriving)


@pytest.mark.parametrize(
    "name", sorted(STACKS.keys() - {"counters-and-lists"})
)  # blocks are measured anew as lists grow
def test_no_stack_exceeds_its_budget(name: str) -> None:
    for share in (0, 0.5):
        program = STACKS[name]()
        budget = budget_at(program, share)
        assert remat.measure(lambda p=program, b=budget: train(p, chained(budget=b))).peak_bytes <= budget


def test_no_second_copy_of_all_gradients() -> None:
    """With small activations and large weights, whose gradients exist, the peak is a small part of the gradients."""
    seed_everything(1)
    net = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(2, 64)
    gradients = sum(p.nbytes for p in net.parameters())
    for budget in ("1GiB", 2 * 64 * 4 * 40 + 2 * 64 * 64 * 4):
        peak = remat.measure(lambda b=budget: remat.chain(net, x, budget=b).sum().backward()).peak_bytes
        assert peak < 0.2 * gradients


def test_memory_grows_with_the_root_of_the_depth() -> None:
    """One extra forward at most: within a budget of a multiple of the root, networks of any depth can be trained."""
    least = []
    for blocks in (8, 32, 128):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(blocks)))
        x = torch.randn(64, 32, requires_grad=True)
        for tensor in (x, *layers.parameters()):
            tensor.grad = torch.zeros_like(tensor)
        one, whole = planned(Program(layers, x), "1GiB").chain.stage(0), planned(Program(layers, x), "1GiB").peak_bytes
        budget = int(3 * (one.carry_bytes + one.menu[0].tape_bytes) * blocks**0.5 + 10 * one.carry_bytes)
        made = planned(Program(layers, x), min(budget, whole))
        assert made.forward_runs <= 2 * blocks
        least.append(made.peak_bytes)
    assert least[2] < 0.5 * whole
    assert plain_chain(layers, x)[0].shape == x.shape


class Numbered(nn.Module):
    """A block that knows its place, as those of many libraries do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_blocks_that_differ_in_their_number_cost_the_same() -> None:
    plan = remat.plan_chain([Numbered(number) for number in range(8)], torch.randn(32, 64, requires_grad=True))
    stages = [stage for stage, count in plan.chain.runs for _ in range(count)]
    assert len({(stage.forward_s, *(tape.forward_s + tape.backward_s for tape in stage.menu)) for stage in stages}) == 1
