"""`remat.chain` is the plain loop over blocks, bit for bit: every stack of layers at every kind of budget."""

from __future__ import annotations

import pytest

from plain import assert_same, observe
from stacks import STACKS, budget_at, chained, plain_chain


@pytest.mark.parametrize("share", [1, 0.4, 0], ids=["ample", "tight", "smallest"])
@pytest.mark.parametrize("name", STACKS)
def test_every_stack_at_every_budget(name: str, share: float) -> None:
    make = STACKS[name]
    expected = observe(plain_chain, make())
    assert_same(observe(chained(budget=budget_at(make(), share)), make()), expected)
