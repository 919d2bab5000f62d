"""Books kept on fake tensors against what the meter and PyTorch's own counter say of the real run."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from nets import NETS
from remat import measure
from remat.estimate import Ledger, Rates
from remat.selective import storages_of

RATES = Rates(flops_per_s=1e9, bytes_per_s=1e9, operator_s=1e-6)


def train(net: nn.Module, x: Tensor) -> list[Tensor]:
    y = net(x)
    return list(torch.autograd.grad(y, [x, *net.parameters()], torch.ones_like(y)))


def books_of(net: nn.Module, x: Tensor) -> Ledger:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = mode.from_tensor(x)
        with Ledger(RATES) as ledger:
            results = train(net, fake)
            ledger.mark()
        del results
    return ledger


@pytest.mark.parametrize("name", NETS)
def test_bytes_are_those_of_the_meter(name: str) -> None:
    net, x = NETS[name]()
    train(net, x)  # what kernels make once is made now
    gc.collect()
    measured = measure(lambda: train(net, x))
    ledger = books_of(net, x)
    assert abs(ledger.peak_bytes - measured.peak_bytes) <= 0.03 * measured.peak_bytes
    assert abs(ledger.readings[0].net_bytes - measured.net_bytes) <= 0.001 * measured.net_bytes
    assert ledger.live_bytes == 0  # all results are gone


@pytest.mark.parametrize("name", sorted(NETS.keys() - {"attention"}))  # the counter has no formula for its kernel
def test_arithmetic_is_that_of_the_flop_counter(name: str) -> None:
    net, x = NETS[name]()
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Ledger(Rates(1.0, float("inf"), 0.0)) as ledger:
        train(net, mode.from_tensor(x))
    assert ledger.seconds == counter.get_total_flops() > 0


def test_attention_counts_as_two_products_each_way_and_half_a_one_more() -> None:
    with FakeTensorMode(), Ledger(Rates(1.0, float("inf"), 0.0)) as ledger:
        q = torch.randn(4, 2, 32, 16).requires_grad_()
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        forward = ledger.seconds
        torch.autograd.grad(y, [q], torch.ones_like(y))
    assert forward == 2 * 2 * 4 * 2 * 32 * 32 * 16  # two products over batch, heads, queries, keys, channels
    assert ledger.seconds - forward == 2.5 * forward


def test_a_large_operator_costs_its_arithmetic_or_its_bytes() -> None:
    a, x = torch.randn(64, 64), torch.randn(1000)
    with Ledger(RATES) as product:
        a @ a
    with Ledger(RATES) as addition:
        x + x
    with Ledger(RATES) as view:
        x.view(10, 100)
    assert product.seconds == pytest.approx(2 * 64**3 / 1e9 + 1e-6)
    assert addition.seconds == pytest.approx(3 * 4000 / 1e9 + 1e-6)
    assert view.seconds == 0


def test_blocks_of_the_caching_allocator() -> None:
    with Ledger(dataclasses.replace(RATES, device_type="cuda")) as ledger:
        held = torch.zeros(1), torch.zeros(129)
    assert ledger.live_bytes == 512 + 1024
    del held
    assert ledger.live_bytes == 0


def test_effects_are_noted() -> None:
    net, x = NETS["residual"]()
    statistics = storages_of(net.buffers())
    with Ledger(RATES) as training:
        net(x)
    assert training.written == statistics
    assert not training.draws
    with Ledger(RATES) as evaluating:
        net.eval()(x)
        torch.nn.functional.dropout(x, 0.5)
    assert not evaluating.written
    assert evaluating.draws


def test_rates_of_this_machine() -> None:
    rates = Rates.measured()
    assert 1e8 < rates.flops_per_s < 1e15
    assert 1e8 < rates.bytes_per_s < 1e14
    assert 1e-8 < rates.operator_s < 1e-2
