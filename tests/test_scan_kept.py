"""State with gradients that a step keeps beside its carry: what the plain loop makes of it, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from budgets_of import settings_at
from plain import Loop, Program, assert_same, observe, plain_scan, same, seed_everything
from steps import B, H, leaf, parameters

STEPS = 11
KINDS: dict[str, Callable[[], Program]] = {}


class Cell(nn.Module):
    """A cell whose hidden state is its own; `read` says whether a step uses what the one before has left."""

    def __init__(self, start: Tensor | None, *, read: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) * 0.3)
        self.state, self.read = start, read
        self.trace: Any = 0.0

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.state is None or self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        before = self.state if self.read else h
        self.state = torch.tanh(before @ self.weight + x)
        self.trace = self.state.detach() * 0.5
        h = h * 0.5 + self.state
        return h, h.sum(-1)


def values(state: Any) -> Any:
    return state.detach().clone() if isinstance(state, Tensor) else state


def kind(make: Callable[[], tuple[Any, dict[str, Tensor], Callable[[], Any]]]) -> None:
    def fresh() -> Program:
        seed_everything(1)
        step, wrt, state = make()
        xs = leaf(STEPS, B, H)
        return Program(step, torch.zeros(B, H), xs, wrt={**wrt, "xs": xs}, state=lambda: [values(s) for s in state()])

    KINDS[make.__name__.replace("_", "-")] = fresh


@kind
def read_and_written() -> Any:
    start = leaf(B, H)
    cell = Cell(start * 2)
    return cell, {**parameters(cell), "start": start}, lambda: (cell.state, cell.state.requires_grad, cell.trace)


@kind
def of_no_shape_at_first() -> Any:
    cell = Cell(torch.zeros(0))
    return cell, parameters(cell), lambda: (cell.state, cell.state.requires_grad)


@kind
def none_at_first() -> Any:
    cell = Cell(None)
    return cell, parameters(cell), lambda: (cell.state, cell.state.requires_grad)


@kind
def written_before_it_is_read() -> Any:
    cell = Cell(leaf(B, H) * 2, read=False)
    return cell, parameters(cell), lambda: (cell.state, cell.state.requires_grad)


@kind
def a_parameter_at_first() -> Any:
    cell = Cell(None)
    cell.start = nn.Parameter(torch.randn(B, H))
    vars(cell)["state"] = cell.start
    return cell, parameters(cell), lambda: (cell.state, cell.state.requires_grad)


@kind
def a_buffer() -> Any:
    cell = Cell(None)
    del cell.state
    cell.register_buffer("state", torch.zeros(B, H), persistent=False)
    return cell, parameters(cell), lambda: (cell.state, cell.state.requires_grad)


@kind
def an_attribute_that_comes_to_be() -> Any:
    class Late:
        def __call__(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            before = self.state if hasattr(self, "state") else x
            self.state = torch.sin(before @ w + h)
            return self.state * 0.5, before

    w, step = leaf(H, H), Late()
    return step, {"w": w}, lambda: (step.state, step.state.requires_grad)


@kind
def in_a_dictionary() -> Any:
    w, cache = leaf(H, H), {"first": 1, "h": torch.zeros(B, H), "last": 2}

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        cache["h"] = torch.tanh(cache["h"] @ w + x)
        return h + cache["h"], h

    return step, {"w": w}, lambda: (list(cache), cache["h"], cache["h"].requires_grad)


@kind
def in_a_list_of_layers() -> Any:
    weights, states = [leaf(H, H), leaf(H, H)], [torch.zeros(B, H), leaf(B, H)]
    start = states[1]

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for k, w in enumerate(weights):
            states[k] = x = torch.tanh(states[k] @ w + x)
        return h + x, x

    return step, {"w0": weights[0], "w1": weights[1], "start": start}, lambda: (*states, len(states))


@kind
def in_a_variable_around_two_functions() -> Any:
    w, state, count = leaf(H, H), torch.zeros(B, H), 0

    def move(x: Tensor) -> None:
        nonlocal state
        state = torch.tanh(state @ w + x)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal count
        move(x)
        count += 1
        return h + state / count, state

    return step, {"w": w}, lambda: (state, state.requires_grad, count)


GLOBAL_STATE = torch.zeros(B, H)


@kind
def in_a_global() -> Any:
    global GLOBAL_STATE
    w, GLOBAL_STATE = leaf(H, H), torch.zeros(B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        global GLOBAL_STATE
        GLOBAL_STATE = torch.tanh(GLOBAL_STATE @ w + x)
        return h + GLOBAL_STATE, h

    return step, {"w": w}, lambda: (GLOBAL_STATE, GLOBAL_STATE.requires_grad)


@kind
def from_the_fifth_step_on() -> Any:
    cell, w = Cell(torch.zeros(B, H)), leaf(H, H)

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if x[0, 0] > 1:
            return cell(carry, x)
        h = torch.tanh(carry @ w)
        return h, h.sum(-1)

    return step, {**parameters(cell), "w": w}, lambda: (cell.state, cell.state.requires_grad)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("level", ["ample", "tight"])
def test_state_beside_the_carry(name: str, level: str) -> None:
    expected = observe(plain_scan, KINDS[name]())
    assert_same(observe(partial(remat.scan, **settings_at(KINDS[name](), level)), KINDS[name]()), expected)


def settings(level: str) -> dict[str, Any]:
    return settings_at(KINDS["read-and-written"](), level)


@pytest.mark.parametrize("level", ["ample", "constant"])
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("history", ["kept", "cut"])
def test_calls_one_after_the_other(level: str, read: bool, history: str) -> None:
    """State goes on from call to call, with its history unless it is cut; used graphs are not touched again."""

    def run(loop: Loop) -> list[Any]:
        seed_everything(1)
        cell, xs = Cell(torch.zeros(B, H), read=read), leaf(3, STEPS, B, H)
        h, seen, losses = torch.zeros(B, H), [], []
        for x in xs:
            h, y = loop(cell, h, x)
            losses.append(y.square().sum() + cell.state.mean())  # what is left can be used as in the plain loop
            if history == "cut":
                seen += torch.autograd.grad(losses.pop(), [cell.weight, xs])
                h = h.detach()
                if read:
                    cell.state = cell.state.detach()
        if losses:
            seen += torch.autograd.grad(sum(losses), [xs])  # of the weight each call is summed by itself
        return [*seen, h, cell.state]

    assert same(run(partial(remat.scan, **settings(level))), run(plain_scan))


@pytest.mark.parametrize("level", ["tight"])
def test_nothing_is_kept_alive(level: str) -> None:
    """Neither the graph by the state that is left, once it is used, nor the object by its own state."""
    given = settings(level)
    cell = Cell(torch.zeros(B, H))
    held = weakref.ref(cell)
    for _ in range(2):
        _, ys = remat.scan(cell, torch.zeros(B, H), torch.randn(STEPS, B, H), **given)
        ys.sum().backward()
        cell.state = cell.state.detach()
    gc.collect()
    gc.disable()
    try:
        remat.scan(cell, torch.zeros(B, H), torch.randn(STEPS, B, H), **given)[1].sum().backward()
        del cell, ys
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("after", [lambda ys: ys.sum(), lambda ys: ys.square().mean(), lambda ys: ys[-1]])
@pytest.mark.parametrize("level", ["constant"])
def test_results_of_used_graphs_that_lie_about_are_left_alone(level: str, after: Callable[[Tensor], Tensor]) -> None:
    def run(loop: Loop) -> list[Tensor | None]:
        seed_everything(1)
        cell, h = Cell(None, read=False), torch.zeros(B, H)
        for _ in range(3):
            _, ys = loop(cell, h, torch.randn(STEPS, B, H))
            cell.last = after(ys)
            cell.last.sum().backward()
        return [cell.weight.grad, cell.last.detach()]

    assert same(run(partial(remat.scan, **settings(level))), run(plain_scan))


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("level", ["ample", "constant"])
def test_an_error_leaves_what_the_plain_loop_leaves(level: str, at: int) -> None:
    def run(loop: Loop) -> Any:
        seed_everything(1)
        cell, xs = Cell(torch.zeros(B, H)), leaf(STEPS, B, H)

        def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
            h, t = carry
            if t == at and not remat.is_recomputing():
                raise ZeroDivisionError
            h, y = cell(h, x)
            return (h, t + 1), y

        with pytest.raises(ZeroDivisionError):
            loop(step, (torch.zeros(B, H), 0), xs)
        return cell.state.detach()

    assert same(run(partial(remat.scan, **settings(level))), run(plain_scan))


def test_what_grows_is_refused() -> None:
    seen: list[Tensor] = []
    w = leaf(H, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        seen.append(h)
        return h, h

    with pytest.raises(remat.StepError, match=r"in a list.*return them as outputs"):
        remat.scan(step, torch.zeros(B, H), torch.randn(STEPS, B, H), budget="1MiB")
    assert not seen


def test_what_is_changed_in_place_is_refused() -> None:
    w, box = leaf(H, H), {"h": leaf(B, H) * 2}

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        box["h"] = box["h"].mul_(0.5) + torch.tanh(x @ w)
        return h + box["h"], h

    with pytest.raises(remat.StepError, match="in place"):
        remat.scan(step, torch.zeros(B, H), torch.randn(STEPS, B, H), budget="1MiB")


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_it_is_in_the_budget(share: float) -> None:
    seed_everything(1)
    cell, xs = Cell(torch.zeros(64, H), read=False), torch.randn(60, 64, H)

    def run(loop: Loop) -> None:
        cell.zero_grad()
        carry, ys = loop(cell, torch.zeros(64, H), xs)
        (ys.sum() + carry.sum()).backward()

    run(plain_scan)
    budget = int(share * remat.measure(lambda: run(plain_scan)).peak_bytes)
    run(partial(remat.scan, budget=budget))
    assert remat.measure(lambda: run(partial(remat.scan, budget=budget))).peak_bytes <= budget
