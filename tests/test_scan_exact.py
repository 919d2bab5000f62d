"""`remat.scan` is the plain loop, bit for bit: every program of `steps`, at every kind of budget, for every loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from budgets_of import plan_of, settings_at, smallest_budget
from plain import LOSSES, Loop, Program, assert_same, observe, plain_scan, same, seed_everything, weighted_sum
from steps import PROGRAMS

programs = pytest.mark.parametrize("name", PROGRAMS)


def check(name: str, level: str, loss: str) -> None:
    """The program within a budget against the plain loop, on fresh tensors each."""
    make = PROGRAMS[name]
    expected = observe(plain_scan, make(), LOSSES[loss])
    got = observe(partial(remat.scan, **settings_at(make(), level)), make(), LOSSES[loss])
    assert_same(got, expected)


@pytest.mark.parametrize("level", ["ample", "tight", "constant"])
@programs
def test_every_program_at_every_budget(name: str, level: str) -> None:
    check(name, level, "everything")


@pytest.mark.parametrize("loss", ["final carry", "one step"])
@programs
def test_every_program_for_every_loss(name: str, loss: str) -> None:
    check(name, "tight", loss)


@pytest.mark.parametrize("steps", [1, 2, 3, 29])
@pytest.mark.parametrize("name", ["gru-cell", "stacked-cells-with-dropout", "batch-norm", "carries-that-swap-places"])
def test_other_numbers_of_steps(name: str, steps: int) -> None:
    make = partial(PROGRAMS[name], steps)
    expected = observe(plain_scan, make())
    assert_same(observe(partial(remat.scan, budget=smallest_budget(make())), make()), expected)


@pytest.mark.parametrize("planner", ["keep-all", "constant", "sqrt", "recursive", "hsm", "ism", "msm", "tight"])
@pytest.mark.parametrize("name", ["elman", "noise-from-everywhere", "same-tensor-twice-in-the-carry"])
def test_every_planner(name: str, planner: str) -> None:
    make = PROGRAMS[name]
    expected = observe(plain_scan, make())
    assert_same(observe(partial(remat.scan, budget="1GiB", planner=planner), make()), expected)


@pytest.mark.parametrize("level", ["ample", "tight", "constant"])
@pytest.mark.parametrize("wrt", [["w"], ["h"], ["xs"], ["u", "h"], ["xs", "w"]], ids="-".join)
def test_gradients_of_a_subset_leave_everything_else_alone(wrt: list[str], level: str) -> None:
    make = PROGRAMS["elman"]
    expected = observe(plain_scan, make(), wrt=wrt)
    program = make()
    assert_same(observe(partial(remat.scan, **settings_at(make(), level)), program, wrt=wrt), expected)
    assert all(tensor.grad is None for tensor in program.wrt.values())


@pytest.mark.parametrize("level", ["ample", "tight", "constant"])
def test_a_budget_that_is_small_means_recomputation(level: str) -> None:
    runs = plan_of(PROGRAMS["gru-cell"](), **settings_at(PROGRAMS["gru-cell"](), level)).forward_runs
    assert runs == {"ample": 13, "tight": 26, "constant": 91}[level]


def rounds(loop: Loop, program: Program, count: int) -> dict[str, Tensor | None]:
    """Gradients accumulated over several calls."""
    seed_everything(3)
    for _ in range(count):
        total = LOSSES["everything"](*loop(program.step, program.carry, program.xs, length=program.length))
        assert total is not None
        total.backward()
    return {name: tensor.grad for name, tensor in program.wrt.items()}


@pytest.mark.parametrize("name", ["elman", "stacked-cells-with-dropout", "batch-norm", "parametrized-weight"])
def test_backward_accumulates(name: str) -> None:
    make = PROGRAMS[name]
    expected = rounds(plain_scan, make(), 3)
    got = rounds(partial(remat.scan, **settings_at(make(), "tight")), make(), 3)
    assert same(got, expected)


@pytest.mark.parametrize("level", ["ample", "tight"])
def test_training_is_the_same_for_many_iterations(level: str) -> None:
    def train(loop: Loop) -> list[Tensor]:
        program = PROGRAMS["stacked-cells-with-dropout"]()
        net = program.modules[0]
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            _, ys = loop(net, program.carry, program.xs)
            loss = ys.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in net.parameters())]

    settings = settings_at(PROGRAMS["stacked-cells-with-dropout"](), level)
    assert same(train(partial(remat.scan, **settings)), train(plain_scan))


@pytest.mark.parametrize("level", ["ample", "tight", "constant"])
def test_loops_in_a_row_and_outputs_used_together(level: str) -> None:
    """The second loop goes through the first one's outputs backwards; weights are shared, and used before them."""

    def run(loop: Loop) -> dict[str, Tensor]:
        program = PROGRAMS["elman"]()
        w, xs = program.wrt["w"], program.wrt["xs"]
        carry, ys = loop(program.step, program.carry, xs)
        back = nn.GRUCell(ys.shape[-1], ys.shape[-1])
        carry, zs = loop(lambda h, y: ((z := back(y, h)), z), carry, ys.flip(0))
        total = weighted_sum([carry, zs, ys])
        assert total is not None
        wanted = {**program.wrt, **dict(back.named_parameters())}
        assert w.grad is None
        return dict(zip(wanted, torch.autograd.grad(total, list(wanted.values())), strict=True))

    settings = {"planner": "constant"} if level == "constant" else {}
    budget = {"ample": "1GiB", "tight": "130KiB", "constant": "1GiB"}[level]
    assert same(run(partial(remat.scan, budget=budget, **settings)), run(plain_scan))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "name", ["gru-cell", "stacked-cells-with-dropout", "batch-norm", "plain-values-among-the-leaves"]
)
def test_without_autograd(name: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    def quietly(loop: Loop) -> Loop:
        def run(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return loop(*args, **kwargs)

        return run

    make = PROGRAMS[name]
    expected = observe(quietly(plain_scan), make())
    assert_same(observe(quietly(partial(remat.scan, budget="1MiB")), make()), expected)
    assert not any(expected.requires_grad.values())


def test_evaluation_mode_and_back() -> None:
    def run(loop: Loop) -> list[Any]:
        program = PROGRAMS["batch-norm"]()
        seen = []
        for training in (True, False, True):
            for module in program.modules:
                module.train(training)
            seen.append(observe(loop, program))
        return seen

    settings = settings_at(PROGRAMS["batch-norm"](), "tight")
    for got, expected in zip(run(partial(remat.scan, **settings)), run(plain_scan), strict=True):
        assert_same(got, expected)


def test_outputs_of_a_scan_are_ordinary_tensors() -> None:
    """They may be changed in place, viewed, hooked and retained like any other result."""

    def run(loop: Loop) -> list[Tensor]:
        program = PROGRAMS["elman"]()
        carry, ys = loop(program.step, program.carry, program.xs)
        seen: list[Tensor] = []
        ys.register_hook(lambda g: seen.append(g.clone()))
        ys.mul_(1.5)
        ys.retain_grad()
        first = ys[0]
        total = (first.exp() + ys.mul(2).relu_()[1:].sum(0)).sum() + carry.square().sum()
        total.backward()
        assert ys.grad is not None
        return [*seen, ys.grad, *(t.grad for t in program.wrt.values() if t.grad is not None)]

    settings = settings_at(PROGRAMS["elman"](), "tight")
    assert same(run(partial(remat.scan, **settings)), run(plain_scan))
