"""What may be run again: custom operators, changes in place, collectives and draws are told apart, and kept to."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import remat
from graph.joint import within
from graph.networks import step
from remat.graph import compilation
from remat.graph.capture import kind_of
from remat.graph.graphs import Kind
from remat.graph.op_costs import estimated

aten = torch.ops.aten
ran: Counter[str] = Counter()


@pytest.fixture(scope="module")
def custom() -> Iterator[Any]:
    """An operator of somebody else's, and one that changes what it is given."""
    with torch.library._scoped_library("remat_tests", "FRAGMENT") as library:
        library.define("swish(Tensor x) -> Tensor")
        library.define("count_(Tensor(a!) seen, Tensor x) -> Tensor")

        def swish(x: torch.Tensor) -> torch.Tensor:
            ran["swish"] += 1
            return x * torch.sigmoid(x)

        def count(seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            ran["count_"] += 1
            seen.add_(1)
            return x.exp()

        for name, run in (("swish", swish), ("count_", count)):
            library.impl(name, run, "CPU")
            torch.library.register_fake(f"remat_tests::{name}", lambda *args: torch.empty_like(args[-1]), lib=library)

        def slope(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return grad * (s + x * s * (1 - s))

        def keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:  # noqa: ARG001
            ctx.save_for_backward(inputs[0])

        torch.library.register_autograd("remat_tests::swish", slope, setup_context=keep, lib=library)
        yield torch.ops.remat_tests


def kind(op: Any, *args: Any, **kwargs: Any) -> Kind:
    graph = fx.Graph()
    return kind_of(graph.call_function(op, args, kwargs), fresh=(0,))


def test_operators_are_told_apart() -> None:
    assert kind(aten.mm.default) is Kind.EXPENSIVE
    assert kind(aten.exp.default) is Kind.CHEAP
    assert kind(aten.exp_.default) is Kind.MUTATION
    assert kind(aten.bernoulli.p) is Kind.RANDOM
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert kind(attention, None, None, None, 0.0) is Kind.EXPENSIVE
    assert kind(attention, None, None, None, 0.5) is Kind.RANDOM
    assert kind(torch.ops.higher_order.cond) is Kind.OPAQUE
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed._functional_collectives")  # declares them

        for op in ("all_reduce", "wait_tensor"):
            assert kind(getattr(torch.ops._c10d_functional, op).default) is Kind.COLLECTIVE
    assert not any(one.repeatable for one in (Kind.MUTATION, Kind.COLLECTIVE, Kind.OPAQUE))


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_others_operators_run_once_a_step(custom: Any, monkeypatch: pytest.MonkeyPatch, lowering: str) -> None:
    monkeypatch.setattr(compilation, "measured", estimated)
    monkeypatch.setattr("remat.graph.fusing._through_inductor", lambda module, _: lambda args: module(*args))

    def function(weight: torch.Tensor, seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(custom.swish(F.layer_norm(x @ weight, [16])))
        with torch.no_grad():
            factor = custom.count_(seen, x.mean())
        return (x * factor).square().sum()

    def tensors() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(16, 16, requires_grad=True), torch.zeros(4), torch.randn(64, 16)]

    wanted = step(function, tensors())
    mine = tensors()
    with pytest.raises(remat.InfeasibleBudget) as caught:
        within(function, mine, budget=1, lowering=lowering)[0](*mine)
    call, made = within(function, mine, budget=caught.value.smallest_budget_bytes, lowering=lowering)
    mine = tensors()
    call(*mine)
    mine = tensors()
    ran.clear()
    found = step(call, mine)
    assert ran == {"swish": 3, "count_": 1}
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)
        assert lowering == "inductor" or torch.equal(found[key], value)
    assert made.plan is not None
    order = made.plan.program.order
    assert len(set(order)) < len(order)
