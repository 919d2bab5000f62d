"""`remat.chain` is the plain loop over blocks, bit for bit: every stack of layers at every kind of budget."""

from __future__ import annotations

import pytest

from plain import assert_same, observe
from stacks import STACKS, budget_at, chained, plain_chain


@pytest.mark.parametrize("level", ["ample", "tight", "smallest", "constant"])
@pytest.mark.parametrize("name", STACKS)
def test_every_stack_at_every_budget(name: str, level: str) -> None:
    make = STACKS[name]
    expected = observe(plain_chain, make())
    if level == "constant":
        settings = {"budget": "1GiB", "planner": "constant"}
    else:
        settings = {"budget": budget_at(make(), {"ample": 1, "tight": 0.4, "smallest": 0}[level])}
    assert_same(observe(chained(**settings), make()), expected)
