"""What a step changes, reads and says beside its carry: replayed as it was, or refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import remat
from plain import plain_scan, same
from test_pains import B, H, elman, grads, inputs, planners, scan, weight


@planners
def test_warnings_of_a_step_are_those_of_the_plain_loop(planner: str) -> None:
    w, xs = weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        warnings.warn("a step says so", UserWarning, stacklevel=2)
        return elman(w)(h, x)

    def run(loop: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop(step, torch.zeros(B, H), xs)[1].sum().backward()
        return [str(warning.message) for warning in caught]

    assert run(partial(scan, planner=planner)) == run(plain_scan)


@pytest.mark.parametrize("kind", ["dtype", "shape"])
def test_p30_a_step_that_differs_in_its_replay_is_named(kind: str) -> None:
    w, xs = weight(), inputs()

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        h = torch.tanh(h @ w + x)
        if t == 4 and is_in_backward[0]:
            h = h.double() if kind == "dtype" else h[:1]
        return (h, t + 1), h.sum()

    is_in_backward[0] = False
    _, ys = scan(step, (torch.zeros(B, H), 0), xs, planner="constant")
    is_in_backward[0] = True
    with pytest.raises((remat.StepError, RuntimeError), match=r"step \d+"):
        ys.sum().backward()
    assert w.grad is None


is_in_backward = [False]


def test_a_step_may_call_into_other_libraries() -> None:
    import hypothesis
    import rich

    w, xs = weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        assert h.shape == x.shape, "pytest rewrites this into calls of its own"
        if h.isnan().any():
            rich.print(h)
            hypothesis.note("never")
        return elman(w)(h, x)

    expected = grads(plain_scan(step, torch.zeros(B, H), xs)[1].sum(), w)
    assert same(grads(scan(step, torch.zeros(B, H), xs)[1].sum(), w), expected)


@pytest.mark.parametrize("planner", ["keep-all", "constant"])
def test_settings_in_containers_are_seen_anew_at_each_call(planner: str) -> None:
    """The same function, set up otherwise by the caller: what was learnt of one call must not mislead the next."""
    settings: dict[str, Any] = {"detach": True, "act": "tanh", "scale": 1.0}
    w = torch.eye(4).requires_grad_()
    xs = torch.linspace(-1, 1, 6 * 2 * 4).reshape(6, 2, 4)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = getattr(torch, settings["act"])(h @ w + x) * settings["scale"]
        h = z.detach() if settings["detach"] else z
        return h, (z if settings["act"] == "tanh" else z.detach())

    for settings["detach"], settings["act"] in ((True, "tanh"), (False, "tanh"), (False, "sin"), (True, "sin")):
        carry, ys = remat.scan(step, torch.zeros(2, 4), xs, budget="1MiB", planner=planner)
        h, outputs = torch.zeros(2, 4), []
        for x in xs:
            h, y = step(h, x)
            outputs.append(y)
        stacked = torch.stack(outputs)
        assert (carry.requires_grad, ys.requires_grad) == (h.requires_grad, stacked.requires_grad)
        assert torch.equal(ys, stacked)
        if ys.requires_grad:
            assert torch.equal(*(torch.autograd.grad(t.sum(), [w], retain_graph=True)[0] for t in (ys, stacked)))


@pytest.mark.parametrize("outside", [False, True], ids=["an input", "a tensor from outside"])
@pytest.mark.parametrize("length", [1, 4])
def test_what_is_handed_on_as_carry_is_not_changed_by_us(length: int, outside: bool) -> None:
    """A step that changes its carry in place, and hands on what is not its own: refused, and all is as it was."""
    w, xs, fixed = torch.randn(8, 8, requires_grad=True), torch.randn(length, 4, 8), torch.randn(4, 8)
    before = xs.clone(), fixed.clone()

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        a, b = carry
        a.mul_(x)
        h = torch.tanh(b @ w)
        return (fixed if outside else x, h), h

    def by_way_of_another_place(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        carry[0].mul_(2)
        return (carry[1], fixed if outside else x), torch.tanh(x @ w)

    def of_the_input(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x.mul_(2)
        return carry, torch.tanh(x @ w)

    with pytest.raises(remat.StepError, match="changes its input in place"):
        remat.scan(of_the_input, (torch.zeros(4, 8), torch.ones(4, 8)), xs, budget="1GiB")
    with pytest.raises(remat.StepError, match=r"in place.*return a clone of it"):
        remat.scan(by_way_of_another_place, (torch.zeros(4, 8), torch.ones(4, 8)), xs, budget="1GiB")
    with pytest.raises(remat.StepError, match=r"in place.*return a clone of it"):
        remat.scan(step, (torch.zeros(4, 8), torch.ones(4, 8)), xs, budget="1GiB")
    assert torch.equal(xs, before[0])
    assert torch.equal(fixed, before[1])


def test_outputs_that_the_next_step_changes_are_refused_after_a_loop_of_one_step_too() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry.mul_(2)
        h = carry + x
        return h, h

    start, xs = torch.zeros(4, 8, requires_grad=True), torch.randn(3, 4, 8)
    remat.scan(step, start * 1, xs[:1], budget="1GiB")
    with pytest.raises(remat.StepError, match="return a clone of it"):
        remat.scan(step, start * 1, xs, budget="1GiB")


def test_a_carry_that_the_step_before_still_needs_is_not_to_be_changed() -> None:
    def step(carry: tuple[Tensor, Tensor], _x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        a, b = carry
        c = a * b
        b.mul_(2)
        return (b, c), c.sum()

    start = torch.zeros(4, 8), torch.randn(4, 8, requires_grad=True) * 0.5
    with pytest.raises(remat.StepError, match="in place where the step before needs it"):
        remat.scan(step, start, torch.randn(3, 4, 8), budget="1GiB")


def test_an_output_that_came_to_share_with_what_is_changed_is_refused() -> None:
    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        a, b = carry
        a.mul_(torch.tanh(x))
        return (a, a), b

    start, w = (torch.zeros(4, 8), torch.zeros(4, 8)), torch.randn(8, 8, requires_grad=True)
    with pytest.raises(remat.StepError, match="return a clone of it"):
        remat.scan(lambda carry, x: step(carry, x @ w), start, torch.randn(3, 4, 8), budget="1GiB")


def test_what_is_changed_in_a_place_of_its_own_is_nobody_elses() -> None:
    """A count in place, beside an input that is handed on and a state that is an output too."""
    w, xs = torch.randn(8, 8, requires_grad=True), torch.randn(6, 4, 8)

    def step(carry: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        count, before, h = carry
        count.add_(1)
        h = torch.tanh(h @ w + before + count)
        return (count, x, h), h

    def run(scan: Any, **more: Any) -> list[Tensor]:
        carry, ys = scan(step, (torch.zeros(()), torch.zeros(4, 8), torch.zeros(4, 8)), xs, **more)
        return [*carry, ys, *torch.autograd.grad(ys.sum(), [w])]

    for planner in ("tight", "constant"):
        found, wanted = run(remat.scan, budget="1GiB", planner=planner), run(plain_scan)
        assert all(map(torch.equal, found, wanted))
