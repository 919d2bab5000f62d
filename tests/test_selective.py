"""Selective tapes: gradients bit for bit, expensive operators once, and what is kept, to the byte."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from nets import NETS, Residual
from remat.selective import recording, storages_of


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def recorded(net: nn.Module, x: Tensor) -> Tensor:
    """`net(x)` with a selective tape; buffers and the random stream are put back for the replay as they were."""
    random, buffers = torch.get_rng_state(), [buffer.clone() for buffer in net.buffers()]

    def rerun() -> None:
        after, later = torch.get_rng_state(), [buffer.clone() for buffer in net.buffers()]
        torch.set_rng_state(random)
        put(buffers)
        try:
            net(x.detach().requires_grad_())
        finally:
            torch.set_rng_state(after)
            put(later)

    def put(values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(net.buffers(), values, strict=True):
                buffer.copy_(value)

    with recording(rerun, storages_of([x, *net.parameters(), *net.buffers()])):
        return net(x)


def results(net: nn.Module, x: Tensor, forward: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    y = forward(net, x)
    arriving = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    gradients = torch.autograd.grad(y, [x, *net.parameters()], arriving, materialize_grads=True)
    return [y.detach(), *gradients, *(buffer.clone() for buffer in net.buffers()), torch.get_rng_state()]


def check(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    expected = results(*make(), lambda net, x: net(x))
    got = results(*make(), recorded)
    assert all(map(torch.equal, got, expected))


class Lambda(nn.Module):
    """A function as a module, with two weights and a bias."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(12, 12) / 4), nn.Parameter(torch.randn(12, 12) / 4)
        self.b = nn.Parameter(torch.randn(12))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w, self.v, self.b)


def changed_after_it_was_read(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    z = y + b
    y.mul_(2)
    return torch.tanh(z) @ v * torch.sigmoid(y)


def changed_through_a_view(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    y[:, :4].mul_(2)
    y.add_(b)
    return torch.tanh(y.tanh() @ v)


def random_in_place(x: Tensor, w: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return torch.tanh(F.dropout(x @ w, 0.4, inplace=True) @ v).exp()


def saved_before_it_changed(x: Tensor, w: Tensor, v: Tensor, _: Tensor) -> Tensor:
    y = x @ w
    z = y * y
    y.mul_(2)
    return torch.tanh(z @ v + y)


def attention_that_drops(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    q, k = (x @ w).view(1, 2, -1, 6), (x @ v).view(1, 2, -1, 6)
    mixed = F.scaled_dot_product_attention(q, k, q + b[:6], dropout_p=0.3).reshape(-1, 12)
    return F.dropout(mixed.tanh(), 0.2) @ w


def one_product_twice_and_none_after(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = torch.sin(x @ w + b)
    return torch.cat([y @ v, y @ v], 1).cos().chunk(2, 1)[0]


class Twice(torch.autograd.Function):
    """A function of the user's, which asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ctx.save_for_backward(x, w, y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, _ = ctx.saved_tensors
        *_, y = ctx.saved_tensors
        inner = grad * y.cos()
        return inner @ w.T, x.T @ inner


def own_function(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return Twice.apply(torch.tanh(x + b), w) @ v


FUNCTIONS = [
    attention_that_drops,
    changed_after_it_was_read,
    changed_through_a_view,
    one_product_twice_and_none_after,
    own_function,
    random_in_place,
]


@pytest.mark.parametrize("name", NETS)
def test_networks_are_the_plain_run_bit_for_bit(name: str) -> None:
    check(NETS[name])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_are_the_plain_run_bit_for_bit(function: Callable[..., Tensor]) -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(4)
        return Lambda(function), torch.randn(10, 12, requires_grad=True)

    check(make)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "product": lambda y, w, _: y @ w,
    "product, changed": lambda y, w, _: (y @ w).tanh_(),
    "product with a bias": lambda y, w, b: torch.addmm(b, y, w),
    "point-wise": lambda y, _, b: torch.sin(y) * b,
    "saves its result": lambda y, *_: torch.sigmoid(y),
    "normalised": lambda y, _, b: F.layer_norm(y, (12,), b),
    "dropout": lambda y, *_: F.dropout(y, 0.3),
    "views": lambda y, *_: y.t().reshape(y.shape).flip(0),
    "in place": lambda y, *_: y.clone().mul_(1.5).add_(1),
    "in place on what came": lambda y, *_: (y * 1.0).relu_(),
    "read twice": lambda y, w, _: y * (y @ w),
    "no gradient": lambda y, w, _: y + (y.detach() @ w.detach()),
}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=7))
def test_random_stages_are_the_plain_run_bit_for_bit(names: list[str]) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        y = x @ v + b
        for name in names:
            y = OPERATIONS[name](y, w, b)
        return y

    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(5)
        return Lambda(function), torch.randn(6, 12, requires_grad=True)

    check(make)


@pytest.mark.parametrize("name", ["residual", "attention", "perceptron", "depthwise"])
def test_expensive_operators_run_once(name: str) -> None:
    expensive = {"convolution", "addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu"}

    def count(forward: Callable[[nn.Module, Tensor], Tensor]) -> Counter[str]:
        net, x = NETS[name]()
        with Calls() as calls:
            results(net, x, forward)
        return calls.count

    plain, selective = count(lambda net, x: net(x)), count(recorded)
    assert {k: selective[k] for k in expensive} == {k: plain[k] for k in expensive}
    assert sum(selective.values()) > sum(plain.values())


def test_a_residual_block_keeps_its_first_convolution_and_nothing_else() -> None:
    """The carry enters anyway; whole, it keeps two activations of ReLU, the convolution's result, and statistics."""
    net, x = Residual(16), torch.randn(4, 16, 8, 8, requires_grad=True)
    net(x), recorded(net, x)
    gc.collect()
    whole = remat.measure(lambda: net(x))
    selective = remat.measure(lambda: recorded(net, x))
    states = torch.get_rng_state().nbytes + sum(buffer.nbytes for buffer in net.buffers())  # for the replay
    assert whole.net_bytes == 4 * x.nbytes + 4 * 16 * 4  # the result among them
    assert selective.net_bytes == 2 * x.nbytes + states


def test_what_is_rebuilt_goes_as_backward_goes() -> None:
    """No more is alive at any moment of the backward than in the plain run's, but for the states of the replay."""
    net, x = Residual(16), torch.randn(16, 16, 8, 8, requires_grad=True)

    def backward(forward: Callable[[nn.Module, Tensor], Tensor]) -> int:
        measured = remat.measure(lambda: torch.autograd.grad(forward(net, x).sum(), [x, *net.parameters()]))
        return measured.peak_bytes

    backward(recorded)
    states = torch.get_rng_state().nbytes + sum(buffer.nbytes for buffer in net.buffers())
    assert backward(recorded) <= backward(lambda net, x: net(x)) + 3 * states


def test_nothing_is_left_by_reference_counting_alone() -> None:
    net, x = Residual(4), torch.randn(2, 4, 4, 4, requires_grad=True)

    def train(*, backward: bool) -> None:
        y = recorded(net, x)
        if backward:
            torch.autograd.grad(y.sum(), [x])

    train(backward=True)
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            assert remat.measure(lambda done=backward: train(backward=done)).net_bytes == 0
    finally:
        gc.enable()


def test_what_autograd_refuses_is_refused() -> None:
    torch.manual_seed(6)
    net, x = Lambda(saved_before_it_changed), torch.randn(10, 12, requires_grad=True)
    for forward in (lambda net, x: net(x), recorded):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results(net, x, forward)


def test_a_stage_that_differs_the_second_time_is_refused() -> None:
    times = [0]

    def function(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        times[0] += 1
        y = x @ w if times[0] == 1 else torch.addmm(b, x, w)
        return torch.sin(torch.tanh(y) @ v)

    net, x = Lambda(function), torch.randn(10, 12, requires_grad=True)
    with pytest.raises(remat.StepError, match=r"calls aten\.addmm\.default, aten\.mm\.default before"):
        results(net, x, recorded)


def test_a_stage_that_saves_less_the_second_time_is_refused() -> None:
    times = [0]

    def function(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        times[0] += 1
        y = torch.tanh(x @ w + b)
        return torch.sin(y) @ v if times[0] == 1 else y

    net, x = Lambda(function), torch.randn(10, 12, requires_grad=True)
    with pytest.raises(remat.StepError, match="does something else than in its first run"):
        results(net, x, recorded)
