"""Blocks that are opened and tiny ones that are grouped: the plain loop, bit for bit, and no one could tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from plain import assert_same, observe, seed_everything
from remat.blocks import granularity
from remat.blocks.block import Block
from remat.blocks.calls import ChainCall
from stacks import chained, of, plain_chain, planned
from steps import leaf

WIDTH, COUNT = 16, 4


def perceptrons(kind: type[nn.Sequential] = nn.Sequential) -> list[nn.Module]:
    """Blocks with a tape that is much larger than what goes between their modules."""
    seed_everything(2)
    inner = [lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.1)), nn.Sigmoid, nn.Tanh, lambda: nn.BatchNorm1d(WIDTH)]
    return [kind(nn.Linear(WIDTH, WIDTH), *(make() for make in inner)) for _ in range(COUNT)]


def least(blocks: list[nn.Module], x: Tensor, *shared: Tensor) -> int:
    """The smallest budget for blocks as they are given."""
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        remat.plan(remat.profile(blocks, x, *shared), 1)
    return refusal.value.smallest_budget_bytes


def example() -> tuple[list[nn.Module], Tensor]:
    blocks, x = perceptrons(), leaf(64, WIDTH)
    for tensor in (x, *(p for block in blocks for p in block.parameters())):
        tensor.grad = torch.zeros_like(tensor)
    return blocks, x


def test_blocks_are_opened_where_that_is_the_only_way() -> None:
    blocks, x = example()
    budget = least(blocks, x) - 1
    assert planned(of(blocks, x), budget).chain.length == 6 * COUNT
    seed_everything(1)
    expected = observe(plain_chain, of(perceptrons(), leaf(64, WIDTH)))
    for check in (False, True):
        seed_everything(1)
        assert_same(observe(chained(budget=2 * budget, check=check), of(perceptrons(), leaf(64, WIDTH))), expected)
    assert remat.measure(lambda: remat.chain(blocks, x, budget=budget).sum().backward()).peak_bytes <= budget


class Other(nn.Sequential):
    """Someone else's."""


@contextmanager
def hooked(blocks: list[nn.Module]) -> Iterator[None]:
    hook = blocks[0].register_forward_hook(lambda *_: None)
    yield
    hook.remove()


@contextmanager
def hooked_everywhere(_: list[nn.Module]) -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    hook.remove()


@contextmanager
def replaced(blocks: list[nn.Module]) -> Iterator[None]:
    blocks[0].forward = lambda x: nn.Sequential.forward(blocks[0], x)
    yield


@contextmanager
def another_type(blocks: list[nn.Module]) -> Iterator[None]:
    blocks[:] = [Other(*block) for block in blocks]
    yield


@pytest.mark.parametrize(
    ("around", "unopened"), [(hooked, 1), (replaced, 1), (another_type, COUNT), (hooked_everywhere, COUNT)]
)
def test_what_could_tell_is_not_opened(around: Callable[[Any], Any], unopened: int) -> None:
    blocks, x = example()
    with around(blocks):
        call = ChainCall(blocks, x, (), {})
        assert len(granularity.opened(blocks, call)) == unopened + 6 * (COUNT - unopened)


def test_what_takes_shared_arguments_is_not_opened() -> None:
    blocks, x = example()
    assert granularity.opened(blocks, ChainCall(blocks, x, (x,), {})) == blocks


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_groups_are_the_plain_loop(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        seed_everything(3)
        modules = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)]
        blocks = [*modules, *(nn.Linear(WIDTH, WIDTH) for _ in range(5)), modules[0], modules[3], nn.Tanh()]
        return of(blocks, leaf(64, WIDTH))

    expected = observe(plain_chain, make())
    monkeypatch.setattr(granularity, "_groups", lambda call, _: (3, 1, 2, *[2] * ((call.length - 6) // 2)))
    monkeypatch.setattr(granularity, "_BLOCK_S", 1.0)
    budget = int(share * planned(make(), "1GiB").peak_bytes)
    assert planned(make(), budget).chain.length == 6
    assert_same(observe(chained(budget=budget), make()), expected)
    assert_same(observe(chained(budget=budget), make()), expected), "the cut that is remembered"


def test_groups_are_of_neighbours_that_take_little_time() -> None:
    def known(milliseconds: float) -> Any:
        return SimpleNamespace(
            stage=remat.Stage(1, (remat.Tape(1, forward_s=milliseconds / 2e3, backward_s=milliseconds / 2e3),))
        )

    watched = nn.Linear(2, 2)
    watched.weight.register_post_accumulate_grad_hook(lambda _: None)
    blocks = [*(nn.Linear(2, 2) for _ in range(7)), watched, torch.sin, nn.ReLU(), nn.ReLU()]
    call: Any = SimpleNamespace(blocks=[Block(block) for block in blocks], length=len(blocks))
    seconds = [1, 1, 0.9, 0.2, 5, 5, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert granularity._groups(call, list(map(known, seconds))) == (3, 1, 1, 1, 1, 1, 1, 2)
    assert granularity._groups(call, [known(9)] * len(blocks)) == ()


def test_a_refusal_keeps_no_block_alive() -> None:
    blocks, x = example()
    watch = weakref.ref(blocks[0])
    with pytest.raises(remat.InfeasibleBudget):
        remat.chain(blocks, x, budget=1)
    del blocks
    assert watch() is None, "by reference counting alone"
