"""Traced steps, closely: generated code does what its graph says; sums over time are as true as the plain loop's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import remat
from plain import plain_scan
from remat.traced.graphs import value_of
from remat.traced.lowering import lowered
from remat.traced.products import add_product, blank_sum, passing_bytes
from remat.traced.programs import Arriving, Plan, Program
from remat.traced.traced import Traced
from remat.traced.tracing import Problem
from remat.trees import Structure

# ---- generated Python against the interpreter of graphs

Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {
    "linear": lambda a, _, w, b: F.linear(a, w, b),
    "product": lambda a, b, w, _: (a @ w) * b,
    "tanh": lambda a, *_: torch.tanh(a),
    "sigmoid": lambda a, *_: torch.sigmoid(a),
    "sum": lambda a, b, *_: a + b,
    "difference": lambda a, b, *_: a - 0.5 * b,
    "gate": lambda a, b, *_: torch.where(a > 0, b, a),
    "softmax": lambda a, *_: a.softmax(-1),
    "halves exchanged": lambda a, b, *_: torch.cat([b.chunk(2, 1)[1], a.chunk(2, 1)[0]], 1),
    "normalized": lambda a, _, w, b: F.layer_norm(a, (4,), w[0], b),
    "turned": lambda a, b, *_: (a.t() @ b).mean(0) + a,
    "written into": lambda a, b, *_: a.clone().mul_(b).exp_().clamp(max=9.0),
}
MOVES = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9))


def traced(moves: list[tuple[str, int, int]], carried: tuple[int, int]) -> Traced:
    w, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[Any, Tensor]:
        values = [*carry, x]
        for name, first, second in moves:
            values.append(OPERATIONS[name](values[-1 - first % len(values)], values[-1 - second % len(values)], w, b))
        left, right = (values[-1 - place % len(values)] for place in carried)
        return (left, right), values[-1].square().sum(1)

    carry, x = (torch.randn(3, 4), torch.randn(3, 4)), torch.randn(3, 4, requires_grad=True)
    shape, inner = Structure(carry), Structure(x)
    return Traced(Problem(step, shape, list(carry), inner, [x], (True, True), [w, b], [w, b]))


def example(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.copy_(torch.randn(value.shape) > 0 if value.dtype is torch.bool else torch.randn(value.shape))


def assert_as_interpreted(program: Program) -> None:
    inputs = [example(value_of(node)) for node in program.graph.nodes if node.op == "placeholder"]
    others = [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs]
    got = lowered(program)(*inputs)
    wanted = fx.Interpreter(fx.GraphModule({}, program.graph)).run(*others)
    for mine, theirs in zip((*got, *inputs), (*wanted, *others), strict=True):  # slots are among the inputs
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=8)
@given(st.lists(MOVES, min_size=3, max_size=9), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_generated_code_does_what_the_graph_says(moves: list[tuple[str, int, int]], carried: tuple[int, int]) -> None:
    torch.manual_seed(0)
    step = traced(moves, carried)
    assert_as_interpreted(step.advance(outputs=True).program)
    last = Arriving(frozenset(k for k in step.joint.tangents if k < 2), frozenset([0]))
    for menu in step.menu:
        assert_as_interpreted(menu.record(outputs=True).program)
        for arriving in (last, menu.before(last)):
            assert_as_interpreted(menu.backward(arriving).program)


# ---- sums over time against float64


class Mixed(nn.Module):
    """One kind of parameter each, on a state of shape (3, 8)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        made = {
            "addmm": nn.Linear(8, 8),
            "mm": nn.Linear(8, 8, bias=False),
            "convolution": nn.Conv1d(2, 2, 3, padding=1),
            "gates": nn.GRUCell(8, 8),
        }
        self.layer = made.get(kind)
        self.table = nn.Embedding(5, 8) if kind == "embedding" else None
        shapes = {"bmm": (3, 8, 8), "broadcast": (8,), "einsum": (2, 4, 4)}
        self.weight = nn.Parameter(torch.randn(shapes[kind]) / 3) if kind in shapes else None

    def forward(self, h: Tensor, x: Tensor, token: Tensor) -> Tensor:
        if self.kind in ("addmm", "mm"):
            h = self.layer(h)
        elif self.kind == "gates":
            h = self.layer(x, h)
        elif self.kind == "convolution":
            h = self.layer(h.view(3, 2, 4)).reshape(3, 8)
        elif self.kind == "embedding":
            h = h + self.table(token)
        elif self.kind == "bmm":
            h = torch.bmm(h.unsqueeze(1), self.weight).squeeze(1)
        elif self.kind == "einsum":
            h = torch.einsum("bhd,hde->bhe", h.view(3, 2, 4), self.weight).reshape(3, 8)
        else:
            h = h * self.weight
        return torch.tanh(h + x)


KINDS = {
    "addmm": {"product", "sum"},
    "mm": {"product"},
    "bmm": {"products"},
    "einsum": {"products"},
    "convolution": {"convolution", "sum"},
    "gates": {"product", "sum"},
    "embedding": {"rows"},
    "broadcast": {"value"},
}


def plans_of(module: Mixed, step: Any, item: tuple[Tensor, Tensor]) -> list[Plan]:
    h, parameters = torch.zeros(3, 8), list(module.parameters())
    problem = Problem(step, Structure(h), [h], Structure(item), list(item), (True,), parameters, parameters)
    return [menu.plan for menu in Traced(problem).menu]


@pytest.mark.parametrize("kind", KINDS)
def test_deferred_gradients_are_as_true_as_the_plain_loops(kind: str) -> None:
    torch.manual_seed(2)
    data = [(torch.randn(40, 3, 8), torch.randint(5, (40, 3))) for _ in range(4)]

    def gradients(scan: Any, dtype: torch.dtype, **more: Any) -> Tensor:
        module = Mixed(kind).to(dtype)

        def step(h: Tensor, item: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            h = module(h, *item)
            return h, h

        if more:
            *_, plan = plans_of(module, step, (data[0][0][0], data[0][1][0]))
            assert {term.kind for term in (*plan.terms, *plan.values)} == KINDS[kind]
            if kind == "gates":  # gradients of gates take the places of what was saved, one by one
                assert not plan.slots
                assert {len(term.operands) for term in plan.terms} == {3, 4}
        found = []
        for xs, tokens in data:
            _, ys = scan(step, torch.zeros(3, 8, dtype=dtype), (xs.to(dtype), tokens), **more)
            found += torch.autograd.grad(ys.square().sum(), list(module.parameters()))
        return torch.cat([gradient.double().flatten() for gradient in found])

    truth = gradients(plain_scan, torch.float64)
    plain = gradients(plain_scan, torch.float32)
    got = gradients(remat.scan, torch.float32, budget="100KiB", compile="python")
    # Rounding is random, and differs between numbers of threads: over so many numbers only a little.
    assert (got - truth).norm() <= 1.2 * (plain - truth).norm()


@pytest.mark.parametrize("right", [40, 200, 900])
@pytest.mark.parametrize("lefts", [(200,), (40, 100, 60), (900,), (300, 600)])
def test_sums_of_products_are_as_true_as_the_plain_way(lefts: tuple[int, ...], right: int) -> None:
    """Small and large, wide and narrow, whole and in pieces, and rows of several calls."""
    torch.manual_seed(0)
    value = torch.empty(sum(lefts), right)
    total, plain, truth = (
        blank_sum(value, turned=True),
        torch.zeros_like(value),
        torch.zeros_like(value, dtype=torch.float64),
    )
    for rows in (64, 16):
        left, other = torch.randn(rows, sum(lefts)), torch.randn(rows, right)
        add_product(total, left.split(lefts, 1), other, 64, passing_bytes([total]))
        plain += left.t() @ other
        truth += left.double().t() @ other.double()
    assert total.shape == truth.shape
    assert (total - truth).norm() <= 1.2 * (plain - truth).norm()


def test_few_rows_take_the_bytes_of_many() -> None:
    """A trial of two steps must foresee what many take."""
    total = blank_sum(torch.empty(1024, 256), turned=True)
    room = passing_bytes([total])

    def peak_bytes(rows: int) -> int:
        left, right = torch.randn(rows, 1024), torch.randn(rows, 256)
        add = partial(add_product, total, [left], right, 256, room)
        add()
        return remat.measure(add).peak_bytes

    many = peak_bytes(256)
    more = 1.02 if torch.__version__ >= (2, 10) else 1.25  # older ones' oneDNN makes none of the copies foreseen
    assert 0.98 * many <= peak_bytes(32) <= more * many
    assert many <= 1.5 * room


@pytest.mark.parametrize(("share", "turned"), [(1.0, False), (1.3, True)])
def test_sums_lie_turned_only_where_they_can_be_copied_at_the_end(
    share: float, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are most of it: at the end a copy of one would not fit into the smallest budget."""
    cell, xs = nn.LSTMCell(64, 256), torch.randn(40, 16, 64)
    start = torch.zeros(16, 256), torch.zeros(16, 256)
    laid_out: list[bool] = []

    def noted(value: Tensor, *, turned: bool) -> Tensor:
        laid_out.append(turned)
        return blank_sum(value, turned=turned)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        carry = cell(x, carry)
        return carry, carry[0].square().mean()

    def train(budget: int) -> None:
        remat.scan(step, start, xs, budget=budget, compile="python")[1].sum().backward()

    with pytest.raises(remat.InfeasibleBudget) as refused:
        train(1)
    budget = int(refused.value.smallest_budget_bytes * share)
    train(budget)
    cell.zero_grad(set_to_none=False)
    monkeypatch.setattr("remat.traced.sums.blank_sum", noted)
    taken = remat.measure(lambda: train(budget))
    assert taken.peak_bytes <= budget
    assert set(laid_out) == {turned}
