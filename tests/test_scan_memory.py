"""What `remat.scan` really allocates: within the budget, as predicted, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from budgets_of import plan_of, settings_at, smallest_budget
from plain import Program, leaves_of, plain_scan
from steps import PROGRAMS

STEPS, BATCH, HIDDEN, INPUT = 200, 8, 64, 16


def lstm(steps: int = STEPS) -> Program:
    torch.manual_seed(0)
    cell, xs = nn.LSTMCell(INPUT, HIDDEN), torch.randn(steps, BATCH, INPUT)

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = cell(x, state)
        return (h, c), h.square().mean()

    start = (torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN))
    return Program(step, start, xs, wrt=dict(cell.named_parameters()))


def train(program: Program, loop: Callable[..., Any] = plain_scan, **kwargs: Any) -> None:
    """Forward, gradients for everything that needs one, and away with it all."""
    with program.around():
        results = loop(program.step, program.carry, program.xs, length=program.length, **kwargs)
    outputs = [leaf for _, leaf in leaves_of(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    del results
    wanted = [tensor for tensor in program.wrt.values() if tensor.requires_grad]
    if outputs and wanted:
        arriving = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, wanted, arriving, allow_unused=True)


def peak_of(program: Program, **kwargs: Any) -> int:
    kwargs.setdefault("loop", remat.scan)
    return remat.measure(lambda: train(program, **kwargs)).peak_bytes


# ---- the peak


@pytest.mark.parametrize("percent", [80, 50, 20, 10, 6])
def test_the_peak_is_within_the_budget_and_as_predicted(percent: int) -> None:
    plain = peak_of(lstm(), loop=plain_scan)
    budget = plain * percent // 100
    predicted = plan_of(lstm(), budget).peak_bytes
    measured = peak_of(lstm(), budget=budget)
    assert measured <= budget
    assert predicted <= budget
    assert abs(predicted - measured) <= 0.02 * budget


def test_gradients_from_the_end_that_do_not_get_far() -> None:
    """The carry hands on the last two values only, and a backward adds to the gradient of all inputs."""
    w, xs = torch.randn(48, 48).requires_grad_(), torch.randn(30, 24, 48).requires_grad_()

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        return (torch.tanh(x @ w * xs.mean(0)), carry[0]), None

    program = Program(step, (torch.zeros(24, 48), torch.zeros(24, 48)), xs, wrt={"w": w, "xs": xs})
    budget = smallest_budget(program)
    assert peak_of(program, budget=budget) <= budget


def test_keeping_everything_costs_what_the_plain_loop_costs() -> None:
    plain = peak_of(lstm(), loop=plain_scan)
    train(lstm(), loop=remat.scan, budget="1GiB")  # measured once
    assert peak_of(lstm(), budget="1GiB") <= plain * 1.02 + 2**15


# ---- nothing left


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counting has to do it alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_bytes(body: Callable[[], object], times: int) -> list[int]:
    """Bytes gained over the start after each call of `body`."""
    gained = []
    total = 0
    for _ in range(times):
        total += remat.measure(body).net_bytes
        gained.append(total)
    return gained


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("level", ["ample", "tight"])
@pytest.mark.parametrize("name", ["lstm-cell", "stacked-cells-with-dropout", "batch-norm"])
def test_p23_bytes_are_flat_over_many_calls(name: str, level: str) -> None:
    make = PROGRAMS[name]
    settings = settings_at(make(), level)
    program = make()
    gained = live_bytes(lambda: train(program, remat.scan, **settings), 30)
    assert len(set(gained[1:])) == 1


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("level", ["ample", "tight"])
def test_bytes_are_flat_without_a_backward(level: str) -> None:
    program = lstm(50)
    settings = settings_at(lstm(50), level)

    def forward() -> None:
        remat.scan(program.step, program.carry, program.xs, **settings)

    assert len(set(live_bytes(forward, 30)[1:])) == 1


class Bomb(torch.autograd.Function):
    """Raises in its backward, once it is armed."""

    armed = False

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        if Bomb.armed:
            raise ZeroDivisionError
        return grad


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("planner", ["keep-all", "constant", "hsm"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_bytes_are_flat_after_exceptions(where: str, planner: str) -> None:
    w, xs, start = torch.randn(24, 24).requires_grad_(), torch.randn(20, 8, 24), torch.zeros(8, 24)
    fail = [False]

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        h = torch.tanh(h @ w + x)
        if t == 11:
            if fail[0] and where == "forward":
                raise ZeroDivisionError
            h = Bomb.apply(h)
        return (h, t + 1), h

    def attempt() -> None:
        try:
            (_, _), ys = remat.scan(step, (start, 0), xs, budget="1GiB", planner=planner)
            torch.autograd.grad(ys.sum(), [w])
        except ZeroDivisionError:
            return
        assert not fail[0]
        assert not Bomb.armed

    attempt()
    fail[0], Bomb.armed = where == "forward", where == "backward"
    try:
        gained = live_bytes(attempt, 12)
    finally:
        Bomb.armed = False
    assert len(set(gained[1:])) == 1
    fail[0] = False
    attempt()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("planner", ["keep-all", "constant", "hsm", "tight"])
def test_nothing_is_alive_after_the_outputs_are_gone(planner: str) -> None:
    """Weak references to what the steps made, the inputs and the weights, by reference counting alone."""
    made: list[weakref.ref[Tensor]] = []

    def seen(tensor: Tensor) -> Tensor:
        made.append(weakref.ref(tensor))
        return tensor

    def run(*, backward: bool) -> None:
        w, xs = seen(torch.randn(24, 24).requires_grad_()), seen(torch.randn(20, 8, 24).requires_grad_())

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = seen(torch.tanh(seen(seen(h) @ w + seen(x))))
            return h, h

        _, ys = remat.scan(step, seen(torch.zeros(8, 24)), xs, budget="1GiB", planner=planner)
        if backward:
            ys.sum().backward()

    for backward in (True, False):
        run(backward=backward)
        assert len(made) > 60
        assert not [ref for ref in made if ref() is not None]


@pytest.mark.usefixtures("no_collector")
def test_p22_used_up_steps_are_gone_before_older_ones_are_rebuilt() -> None:
    """Intermediates alive during the backward: a few steps' worth, not all."""
    inner = most = 0

    def gone() -> None:
        nonlocal inner
        inner -= 1

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        nonlocal inner, most
        z = torch.sin(carry[0]) + x
        for _ in range(4):
            z = torch.tanh(z.exp().log1p())
            inner += 1
            weakref.finalize(z, gone)
            most = max(most, inner)
        return (z, carry[1] + 1), z.sum()

    start, xs = torch.randn(8, 24).requires_grad_(), torch.randn(40, 8, 24)
    _, ys = remat.scan(step, (start, 0), xs, budget="1GiB", planner="constant")
    torch.autograd.grad(ys.sum(), [start])
    assert most <= 3 * 4


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_exceeds_its_budget(name: str) -> None:
    make = PROGRAMS[name]
    budget = settings_at(make(), "tight")["budget"]
    assert peak_of(make(), budget=budget) <= budget


def test_the_budget_holds_from_the_first_call_on() -> None:
    """Looking at the step and measuring it take place within the budget too."""
    budget = smallest_budget(lstm())
    cell = nn.LSTMCell(INPUT, HIDDEN + 8)  # of a size that nothing has seen before
    start = torch.zeros(BATCH, HIDDEN + 8), torch.zeros(BATCH, HIDDEN + 8)
    xs = torch.randn(STEPS, BATCH, INPUT)

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = cell(x, state)
        return (h, c), h.square().mean()

    budget = budget * 3 // 2
    assert peak_of(Program(step, start, xs, wrt=dict(cell.named_parameters())), budget=budget) <= budget


@pytest.mark.parametrize("steps", [2, 8, 32, 128])
def test_a_horizon_that_grows(steps: int) -> None:
    budget = smallest_budget(lstm(128)) + 2**15
    assert peak_of(lstm(steps), budget=budget) <= budget


def test_memory_does_not_grow_with_the_length() -> None:
    """Twice the steps of a loss in the carry need the same budget."""

    def program(steps: int) -> Program:
        cell, xs = nn.GRUCell(INPUT, HIDDEN), torch.randn(steps, BATCH, INPUT)

        def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
            h = cell(x, carry[0])
            return (h, carry[1] + h.square().mean()), None

        return Program(step, (torch.zeros(BATCH, HIDDEN), torch.zeros(())), xs, wrt=dict(cell.named_parameters()))

    budget = smallest_budget(program(50)) * 5 // 4
    assert peak_of(program(50), budget=budget) <= budget
    assert peak_of(program(400), budget=budget) <= budget


def test_ten_thousand_steps_without_recursion() -> None:
    steps, budget = 10_000, "1MiB"
    w, xs = torch.tensor(0.5, requires_grad=True), torch.linspace(-1, 1, steps)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        h = torch.tanh(w * carry[0] + x)
        return (h, carry[1] + h), None

    def run() -> Tensor:
        (_, total), _ = remat.scan(step, (torch.zeros(256), torch.zeros(256)), xs, budget=budget)
        (gradient,) = torch.autograd.grad(total.sum(), [w])
        return gradient

    measured = remat.measure(run)
    assert measured.peak_bytes <= 2**20
    assert measured.value.isfinite()


@pytest.mark.usefixtures("no_collector")
def test_the_graph_holds_nothing_once_it_is_used() -> None:
    """After the backward only what the user holds is left: outputs and gradients."""
    program = lstm(50)
    settings = settings_at(lstm(50), "half")
    train(program, remat.scan, **settings)

    def run() -> list[Any]:
        carry, ys = remat.scan(program.step, program.carry, program.xs, **settings)
        return [carry, ys, torch.autograd.grad(ys.sum(), list(program.wrt.values()))]

    measured = remat.measure(run)
    held = sum(leaf.nbytes for _, leaf in leaves_of(measured.value))
    assert measured.net_bytes == held


@pytest.mark.parametrize("name", ["gradients-from-the-sixth-step-on", "dropout-now-and-then"])
def test_the_number_in_the_first_refusal_holds_for_what_comes_late(name: str) -> None:
    """Gradients that are needed, or random numbers drawn, for the first time after the steps that are measured."""
    program = PROGRAMS[name]()
    inner = program.step
    program.step = lambda carry, x: inner(carry, x)  # which was not seen before
    with pytest.raises(remat.InfeasibleBudget) as refused:
        train(program, remat.scan, budget=1)
    budget = refused.value.smallest_budget_bytes
    for _ in range(2):
        assert peak_of(program, budget=budget) <= budget


@pytest.mark.parametrize("planner", ["tight", "constant"])
def test_what_only_the_first_pass_holds_has_room(planner: str) -> None:
    """Random streams at the start, beside a step that takes more in its forward than in its backward."""
    w, start = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)

    def step(h: Tensor, _x: None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            aside = torch.ones(2**13).sum()
        h = torch.tanh(h @ w) * aside
        return h, h

    def train(budget: int) -> None:
        _, ys = remat.scan(step, start, length=13, budget=budget, planner=planner)
        torch.autograd.grad(ys.sum(), [w, start])

    with pytest.raises(remat.InfeasibleBudget) as refusal:
        train(1024)
    budget = refusal.value.smallest_budget_bytes
    assert remat.measure(lambda: train(budget)).peak_bytes <= budget
