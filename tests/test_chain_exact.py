"""`remat.chain` is the plain loop over blocks, bit for bit: every stack of layers at every kind of budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

import remat
from plain import Program, assert_same, observe, same, seed_everything
from stacks import STACKS, Convolutions, Residual, budget_at, chained, of, plain_chain
from steps import leaf


@pytest.mark.parametrize("level", ["ample", "tight", "constant"])
@pytest.mark.parametrize("name", STACKS)
def test_every_stack_at_every_budget(name: str, level: str) -> None:
    make = STACKS[name]
    expected = observe(plain_chain, make())
    given_ = {
        "ample": {"budget": "1GiB", "check": True},  # without check= it would be the plain loop
        "constant": {"budget": "1GiB", "planner": "constant"},
    }.get(level) or {"budget": budget_at(make(), 0.4)}
    assert_same(observe(chained(**given_), make()), expected)


# ---- drawn at random

WIDTHS = (3, 8, 20)


@st.composite
def lists_of_blocks(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]]]:
    """A seed, and blocks by name with the width that each leaves."""
    kinds = ["linear", "tanh", "in place", "dropout", "norm", "view", "residual", "again"]
    blocks = draw(st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from(WIDTHS)), min_size=1, max_size=9))
    return draw(st.integers(0, 99)), blocks


def built(seed: int, described: list[tuple[str, int]]) -> Program:
    seed_everything(seed)
    width, blocks = WIDTHS[0], []
    for kind, wanted in described:
        if kind == "again" and blocks:
            same_width = [b for b in blocks if isinstance(b, nn.LayerNorm | Residual) and width_of(b) == width]
            blocks += same_width[:1]
        elif kind == "linear":
            blocks.append(nn.Linear(width, wanted))
            width = wanted
        elif kind == "norm":
            blocks.append(nn.BatchNorm1d(width))
        elif kind == "residual":
            blocks.append(Residual(width, drop=0.2))
        elif kind == "view":
            blocks.append(lambda x: x.view(x.shape))
        else:
            blocks.append({"tanh": nn.Tanh(), "in place": nn.ReLU(inplace=True)}.get(kind, nn.Dropout(0.4)))
    x = leaf(6, WIDTHS[0])
    return of([nn.Identity(), torch.sin, *blocks], x, x=x)


def width_of(block: nn.Module) -> int:
    return block.norm.normalized_shape[0] if isinstance(block, Residual) else block.normalized_shape[0]


@settings(max_examples=15)
@given(lists_of_blocks(), st.sampled_from(["keep-all", "constant"]))
def test_any_list_of_blocks(described: tuple[int, list[tuple[str, int]]], planner: str) -> None:
    try:
        expected = observe(plain_chain, built(*described))
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):  # the plain loop's own word, after a tanh for instance
            raise
        return
    assert_same(observe(chained(budget="1GiB", planner=planner), built(*described)), expected)


# ---- a real training


def test_digits_are_learnt_the_same_to_the_last_bit() -> None:
    """Losses and batch-norm statistics of a deep network on scikit-learn's digits, with a budget and without."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)

    def trained(chain: Callable[[Any, Tensor], Tensor]) -> list[Any]:
        seed_everything(0)
        blocks = [nn.Conv2d(1, 8, 3, padding=1), *(Convolutions(8, 8) for _ in range(9)), nn.AdaptiveAvgPool2d(2)]
        net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for first in range(0, 64 * 12, 64):
            optimizer.zero_grad()
            loss = F.cross_entropy(chain(net, images[first : first + 64]), labels[first : first + 64])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [losses, dict(net.named_buffers()), dict(net.state_dict())]

    expected = trained(lambda net, x: net(x))
    assert expected[0][-1] < 0.95 * expected[0][0]  # how fast depends on the machine
    assert same(trained(lambda net, x: remat.chain(net, x, budget="1536KiB")), expected)
