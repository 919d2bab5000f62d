"""What is remembered of a module holds only as long as nothing of it has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from remat.blocks.block import Block
from remat.blocks.plain import _walked, plain


class Bag(nn.Module):
    """Settings of several kinds beside children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.sizes, self.name = 0.5, (1, 2), "bag"
        self.config = SimpleNamespace(width=3, names=["a"], more=SimpleNamespace(dtype=torch.float32, share=0.5))
        self.rule = functional.relu
        self.inner = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called here."""
        raise NotImplementedError


def replaced_data(bag: Bag) -> None:
    bag.inner[2].weight.data = torch.zeros(5, 4)


CHANGES: dict[str, Callable[[Bag], object]] = {
    "mode": lambda bag: bag.inner[1].eval(),
    "a setting": lambda bag: setattr(bag, "name", "sack"),
    "a setting of another kind": lambda bag: setattr(bag, "name", None),
    "a new setting": lambda bag: setattr(bag, "more", 3),
    "one less": lambda bag: delattr(bag, "name"),
    "a float that becomes 0": lambda bag: setattr(bag, "scale", 0.0),
    "a tuple": lambda bag: setattr(bag, "sizes", (1, 3)),
    "what an object of settings holds": lambda bag: setattr(bag.config, "width", 4),
    "a list in it": lambda bag: bag.config.names.append("b"),
    "an object in it": lambda bag: setattr(bag.config.more, "dtype", torch.float64),
    "more in it": lambda bag: setattr(bag.config, "height", 1),
    "a tensor in it": lambda bag: setattr(bag.config, "width", torch.zeros(2)),
    "another object": lambda bag: setattr(bag, "config", SimpleNamespace()),
    "another function": lambda bag: setattr(bag, "rule", functional.relu6),
    "frozen": lambda bag: bag.inner[2].weight.requires_grad_(False),
    "a gradient": lambda bag: setattr(bag.inner[2].weight, "grad", torch.zeros(4, 4)),
    "another dtype": lambda bag: bag.inner[2].double(),
    "another shape": replaced_data,
    "tied": lambda bag: setattr(bag.inner[2], "bias", bag.inner[1].weight),
    "no bias": lambda bag: setattr(bag.inner[2], "bias", None),
    "a child more": lambda bag: bag.inner.append(nn.ReLU()),
    "another child": lambda bag: bag.inner.__setitem__(2, nn.Linear(4, 5)),
    "another class": lambda bag: setattr(bag.inner[1], "__class__", nn.InstanceNorm2d),
    "a hook": lambda bag: bag.inner[1].register_forward_hook(lambda *_: None),
    "a backward hook": lambda bag: bag.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    bag = Bag()
    before = Block(bag)
    assert plain(bag) is plain(bag), "a look is enough"
    CHANGES[change](bag)
    after = Block(bag)
    assert after.key != before.key
    walked = _walked(bag)
    assert after.plain == (walked is not None)
    if walked is not None:
        assert after.key == walked.key
        assert list(map(id, after.tensors)) == list(map(id, walked.tensors))


def test_what_makes_no_difference_makes_none() -> None:
    bag, other = Bag(), Bag()
    assert Block(bag).key == Block(other).key
    before = Block(bag).key
    bag.scale = 0.25
    with torch.no_grad():
        bag.inner[2].weight.add_(1)
    bag.inner[2].weight = nn.Parameter(torch.ones(4, 4))
    assert Block(bag).key == before
    assert any(tensor is bag.inner[2].weight for tensor in Block(bag).tensors)


def test_nothing_is_kept_alive() -> None:
    bag = Bag()
    Block(bag)
    gone, weight = weakref.ref(bag), weakref.ref(bag.inner[2].weight)
    del bag
    gc.collect()
    assert gone() is None
    assert weight() is None
