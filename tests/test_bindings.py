"""What a step or block reads is, in a replay, what it was in the first run; and afterwards what it has become."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from plain import Loop, plain_scan, same, seed_everything
from stacks import plain_chain

H, B, STEPS = 64, 128, 12
SCALE = 1.0


class Settings:
    """An object of the user's."""

    def __init__(self) -> None:
        self.power = 1.0


class Cell(nn.Module):
    """Reads an attribute, an object's attribute, a dictionary, a mode and parameters."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(H, H), nn.Dropout(0.3), nn.BatchNorm1d(H)
        self.gain, self.settings, self.named = 1.0, settings, {"shift": 0.0}

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm(self.linear(self.drop(h))) * self.gain + self.named["shift"]
        return torch.tanh(h) * self.settings.power * SCALE


def with_everything_changed(loop: Loop, *, chained: bool, again: bool) -> list[Any]:
    """Gradients, and all else that a program leaves that goes on to other things before its backward."""
    global SCALE
    seed_everything(1)
    settings, SCALE = Settings(), 1.0
    cells, factor = [Cell(settings) for _ in range(6 if chained else 1)], 1.0

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cells[0](h) * factor + x
        return h, h.sum()

    xs = torch.randn(STEPS, B, H)
    if chained:
        loss = loop([*cells, lambda h: h * factor], xs[0])[0].sum()
    else:
        loss = loop(step, torch.zeros(B, H), xs)[1].sum()
    for cell in cells:
        cell.eval()
        cell.gain, cell.named["shift"], cell.linear = 2.0, 1.0, nn.Linear(H, H)
    weights = [parameter for cell in cells for parameter in cell.norm.parameters()]
    settings.power, SCALE, factor = 3.0, 4.0, 5.0
    found = [torch.autograd.grad(loss, weights, retain_graph=again) for _ in range(1 + again)]
    assert not any(cell.training for cell in cells)
    assert [cells[0].gain, cells[0].named, settings.power, SCALE, factor] == [2.0, {"shift": 1.0}, 3.0, 4.0, 5.0]
    return [*found, loss.detach(), [cell.state_dict() for cell in cells]]


def scan_within(**settings: Any) -> Loop:
    return partial(remat.scan, budget="1GiB", **settings)


def chain_within(**settings: Any) -> Loop:
    return lambda blocks, x: (remat.chain(blocks, x, budget="1GiB", **settings), None)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("planner", ["auto", "constant"])
def test_what_has_changed_since_changes_no_gradient(planner: str, again: bool) -> None:
    for chained, plain, budgeted in ((False, plain_scan, scan_within), (True, plain_chain, chain_within)):
        change = partial(with_everything_changed, chained=chained, again=again)
        assert same(change(budgeted(planner=planner)), change(plain))


class Model(nn.Module):
    """Runs a loop over its layers."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def over_time(layers: nn.ModuleList, x: Tensor, *, loop: Loop) -> Tensor:
    return loop(lambda h, _: (F.relu(layers[0](h)), None), x, None, length=STEPS)[0]


@pytest.mark.parametrize("planner", ["auto", "constant"])
def test_parameters_lent_for_a_call(planner: str) -> None:
    """`functional_call` takes them away before the backward; buffers too."""

    def gradients(run: Callable[[nn.ModuleList, Tensor], Tensor]) -> list[Any]:
        seed_everything(1)
        model = Model(run)
        weights = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        lent = {**{name: weight * 2 for name, weight in weights.items()}, **buffers}
        loss = torch.func.functional_call(model, lent, (torch.randn(B, H),)).sum()
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        return [found, buffers, model.state_dict()]

    expected = gradients(lambda layers, x: plain_chain(layers, x)[0])
    assert same(gradients(lambda layers, x: remat.chain(layers, x, budget="1GiB", planner=planner)), expected)
    expected = gradients(partial(over_time, loop=plain_scan))
    assert same(gradients(partial(over_time, loop=scan_within(planner=planner))), expected)


class Gains(nn.Module):
    """Reads the last of more weights than are looked at of other dictionaries' items."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.gains = nn.ParameterList([torch.ones(1) for _ in range(300)])
        self.named = {number: torch.ones(1) for number in range(300)}

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) * self.gains[299] * self.named[299]


@pytest.mark.parametrize("planner", ["auto", "constant"])
def test_one_of_many_weights_replaced_since(planner: str) -> None:
    def gradients(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Any]:
        seed_everything(1)
        cell = Gains()
        weights = [cell.gains[299], *cell.linear.parameters()]
        loss = run(cell, torch.randn(B, H)).sum()
        cell.gains[299], cell.named[299] = nn.Parameter(torch.zeros(1)), torch.zeros(1)
        found = [torch.autograd.grad(loss, weights, retain_graph=not again) for again in (False, True)]
        return [*found, cell.gains[299].detach(), cell.named[299]]

    def scanned(loop: Loop) -> list[Any]:
        return gradients(lambda cell, x: loop(lambda h, _: (cell(h), None), x, None, length=STEPS)[0])

    assert same(scanned(scan_within(planner=planner)), scanned(plain_scan))
    expected = gradients(lambda cell, x: plain_chain([cell] * 6, x)[0])
    assert same(gradients(lambda cell, x: chain_within(planner=planner)([cell] * 6, x)[0]), expected)


class Slotted:
    __slots__ = ("power",)

    def __init__(self) -> None:
        self.power = 1.0


@pytest.mark.parametrize("change", ["list", "hook removed", "hook added", "slot", "class"])
def test_what_is_read_as_it_is_then_is_found_by_check(change: str) -> None:
    class Net(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factors, self.slotted = nn.Linear(4, 4), [1.0], Slotted()
            self.hook = self.linear.register_forward_hook(lambda _, __, out: out * 1.5)

        def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.linear(h) * self.factors[0] * self.slotted.power * Net.scale + x)
            return h, h

    seed_everything(1)
    net = Net()
    ys = remat.scan(net, torch.zeros(2, 4), torch.randn(9, 2, 4), budget="1GiB", planner="constant", check=True)[1]
    if change == "list":
        net.factors[0] = 2.0
    elif change == "hook removed":
        net.hook.remove()
    elif change == "hook added":
        net.linear.register_forward_hook(lambda _, __, out: out * 2)
    elif change == "slot":
        net.slotted.power = 2.0
    else:
        Net.scale = 2.0
    with pytest.raises(remat.StepError, match=r"a replay of step .* another carry than its first run"):
        ys.sum().backward()
