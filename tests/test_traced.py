"""`remat.scan(compile=True)`: the plain loop up to rounding, within the budget, or as it is with a reason."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from halves import COMPILED, recorded_in_halves
from plain import LOSSES, Observation, Program, leaves_of, observe, plain_scan, same
from remat.loops import Loop
from remat.traced import fusing, ranges
from remat.traced.lowering import lowered
from remat.traced.programs import Arriving
from remat.traced.stages import TracedStages
from remat.traced.traced import Traced
from remat.traced.tracing import Problem
from remat.trees import Structure
from steps import PROGRAMS

# Of every kind of step one or two: each is traced and measured once.
TRACED = [
    "elman", "gru-cell", "stacked-cells-with-dropout", "convolutional-lstm", "complex-diagonal",
    "bfloat16-state-and-float32-sum", "spiking", "transformer-block", "parametrized-weight",
    "effective-weight-made-once", "frozen-and-unused-parameters", "nothing-trainable", "ordered-dict-of-lists",
    "same-tensor-twice-in-the-carry", "same-tensor-twice-at-first-only", "outputs-without-gradient", "carry-is-a-view",
    "results-changed-in-place", "carry-changed-in-place", "gradients-clipped-on-the-way",
    "autocast-inside-with-a-disabled-part", "fast-weights-learned-inside",
]  # fmt: skip
REFUSED = {
    "key-value-cache-of-fixed-size": "plain value",
    "data-dependent-branches": "without values",
    "noise-from-everywhere": "draws from random",
    "batch-norm": "changes",
    "buffers-that-are-replaced": "changes",
    "checkpoint-inside": "random numbers in its backward",
    "gradients-clipped-on-entry": "hooks on its carry",
    "tokens-and-sparse-embedding": "sparse",
    "fused-lstm-over-chunks": "fused recurrent layer",
}


def plan_of(program: Program, budget: int | str, compiled: Any = "python") -> remat.Plan:
    with program.around(), torch.enable_grad():
        return remat.plan_scan(
            program.step, program.carry, program.xs, length=program.length, budget=budget, compile=compiled
        )


def smallest(program: Program) -> int:
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        plan_of(program, 1)
    return refusal.value.smallest_budget_bytes


def close(got: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor) or not (wanted.is_floating_point() or wanted.is_complex()):
        return same(got, wanted)
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    share = 1e-4 if wanted.dtype in (torch.float32, torch.complex64, torch.float64) else 0.05
    limit = share * (float(wanted.abs().max()) + 1e-3) if wanted.numel() else 0.0
    return torch.allclose(got, wanted, rtol=share, atol=limit, equal_nan=True)


def assert_close(got: Observation, wanted: Observation, *, rough: bool = False) -> None:
    """Numbers up to rounding; everything else as it is."""
    for item in dataclasses.fields(Observation):
        have, want = getattr(got, item.name), getattr(wanted, item.name)
        if item.name in ("outputs", "gradients"):
            assert have.keys() == want.keys()
            for key in want:
                if rough and isinstance(want[key], Tensor):
                    torch.testing.assert_close(have[key], want[key], rtol=0.02, atol=0.02)
                else:
                    assert close(have[key], want[key]), f"{item.name} {key}: {have[key]} instead of {want[key]}"
        else:
            assert same(have, want), f"{item.name}: {have!r} instead of {want!r}"


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_step_is_the_plain_loop(name: str) -> None:
    make = PROGRAMS[name]
    loss = LOSSES["everything" if len(name) % 2 else "one leaf"]
    expected = observe(plain_scan, make(), loss)
    for budget in (smallest(make()), "1GiB"):  # steps one by one, and many in a range
        got = observe(partial(remat.scan, budget=budget, compile="python"), make(), loss)
        assert_close(got, expected, rough=name.startswith("autocast"))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["lstm-cell", "tied-embedding"])
def test_gradients_that_arrive_at_some_results_only(name: str, loss: str) -> None:
    make = PROGRAMS[name]
    expected = observe(plain_scan, make(), LOSSES[loss])
    got = observe(partial(remat.scan, budget=smallest(make()), compile="python"), make(), LOSSES[loss])
    assert_close(got, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_says_why_and_runs_as_it_is(name: str) -> None:
    make = PROGRAMS[name]
    with pytest.raises(remat.StepError, match=REFUSED[name]):
        plan_of(make(), "1GiB")
    explained = plan_of(make(), "1GiB", True).explain()
    assert "runs as it is" in explained
    assert REFUSED[name] in explained
    assert same(
        observe(partial(remat.scan, budget="1GiB", compile=True), make()).gradients,
        observe(partial(remat.scan, budget="1GiB"), make()).gradients,
    )


def test_other_reasons_not_to_trace() -> None:
    cell, xs, h = nn.RNNCell(4, 4), torch.randn(5, 2, 4), torch.zeros(2, 4)
    table = np.ones(4, dtype=np.float32)

    def refused(step: Any, reason: str, **more: Any) -> None:
        with pytest.raises(remat.StepError, match=reason):
            remat.scan(step, h, more.pop("xs", xs), budget="1MiB", compile="python", **more)

    def plain(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return cell(x, h), None

    refused(plain, "compares runs", check=True)
    refused(plain, "number of the step", lengths=[5, 3])
    refused(lambda h, x: (cell(x, h) + torch.from_numpy(table), None), "NumPy")
    hooked = nn.RNNCell(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    refused(lambda h, x: (hooked(x, h), None), "has hooks")
    with torch.device("cpu"):
        refused(plain, "mode is active")
    with pytest.raises(ValueError, match="inductor"):
        remat.scan(plain, h, xs, budget="1MiB", compile="always")


@pytest.mark.parametrize("name", ["lstm-cell", "convolutional-lstm"])
def test_the_budget_holds_and_the_prediction_is_true(name: str) -> None:
    def run(program: Program, budget: int) -> int:
        wrt = [tensor for tensor in program.wrt.values() if tensor.requires_grad]

        def whole() -> None:
            results = remat.scan(program.step, program.carry, program.xs, budget=budget, compile="python")
            tensors = [leaf for _, leaf in leaves_of(results) if leaf.requires_grad]
            torch.autograd.grad(tensors, wrt, [torch.ones_like(t) for t in tensors], allow_unused=True)

        whole()
        return remat.measure(whole).peak_bytes

    make = partial(PROGRAMS[name], 61)
    most = plan_of(make(), "1GiB").peak_bytes  # measured where there is room for it
    least = smallest(make())
    for budget in (least, (least + most) // 2, most):
        program = make()
        made = plan_of(program, budget)
        peak = run(program, budget)
        assert peak <= budget
        # Where next to nothing is kept, what single programs hold for a moment is most of these small budgets.
        assert made.peak_bytes - peak <= (0.03 if budget > least else 0.15) * budget


@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_have_channels_last_inside_and_the_callers_layout_outside(kernel: int) -> None:
    conv, grid = nn.Conv2d(3, 3, kernel, padding=kernel // 2), torch.randn(2, 3, 4, 5, requires_grad=True)

    def step(grid: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grid = torch.tanh(conv(grid) + x)
        return grid, grid.mean((2, 3))

    xs, weights = torch.randn(9, 2, 3, 4, 5), list(conv.parameters())
    carry, ys = remat.scan(step, grid, xs, budget="1MiB", compile="python")
    expected, others = plain_scan(step, grid, xs)
    assert carry.stride() == expected.stride()
    ours = torch.autograd.grad(ys.sum() + carry.square().sum(), [grid, *weights])
    theirs = torch.autograd.grad(others.sum() + expected.square().sum(), [grid, *weights])
    torch.testing.assert_close((carry, ys, *ours), (expected, others, *theirs), check_stride=True)
    structures = Structure(grid), [grid], Structure(xs[0]), [xs[0]]
    traced = Traced(Problem(step, *structures, (True,), weights, weights))
    inside = traced.joint.carries[0].meta["val"]
    assert inside.is_contiguous(memory_format=torch.channels_last) is (kernel == 3)


class Passing:
    """Memory for what steps write and no tape keeps; the most of it that there was at a time."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make, self._made, self.most = make, weakref.WeakSet[Tensor](), 0

    def __iter__(self) -> Passing:
        return self

    def __next__(self) -> Tensor:
        made = self._make()
        self._made.add(made)
        self.most = max(self.most, len(self._made))
        return made


@COMPILED
@pytest.mark.parametrize("name", ["stacked-cells-with-dropout", "convolutional-lstm", "fast-weights-learned-inside"])
def test_a_step_of_which_next_to_nothing_is_kept_is_the_plain_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorded_in_halves(monkeypatch, "bare", "bare")
    passing: list[Passing] = []
    monkeypatch.setattr(ranges, "_passing", lambda make: passing.append(Passing(make)) or passing[-1])
    scan = partial(remat.scan, budget=2**30 + 1, compile="inductor")  # a budget that no other test has a plan for
    got = observe(scan, PROGRAMS[name](), LOSSES["everything"])
    assert made
    assert max(each.most for each in passing) == 2  # of a step, and of the next while it takes its place
    assert_close(got, observe(plain_scan, PROGRAMS[name](), LOSSES["everything"]))


def test_ranges_recorded_in_two_ways_share_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several entries of a menu in one schedule: the plain loop's gradients, of which there is one set at a time."""
    cell, xs = nn.LSTMCell(4, 32), torch.randn(8, 2, 4)
    start, weights = (torch.zeros(2, 32), torch.zeros(2, 32)), list(cell.parameters())
    gradient_bytes = sum(weight.nbytes for weight in weights)

    def train(scan: Any, **more: Any) -> list[Tensor]:
        _, ys = scan(lambda c, x: ((c := cell(x, c)), c[0]), start, xs, **more)
        return list(torch.autograd.grad(ys.square().sum(), weights))

    peaks = {}
    for number, pair in enumerate(itertools.product(("whole", "lean"), repeat=2)):
        recorded_in_halves(monkeypatch, *pair)
        run = partial(train, remat.scan, budget=2**30 + number, compile="python")  # another budget is another plan
        torch.testing.assert_close(run(), train(plain_scan))
        peaks[pair] = remat.measure(run).peak_bytes
    for late, early in peaks:
        alone = max(peaks[late, late], peaks[early, early])
        assert peaks[late, early] < alone + gradient_bytes // 2


def test_the_graph_is_made_again_where_anything_differs() -> None:
    w = torch.randn(6, 6, requires_grad=True)
    settings = {"rate": 0.1}

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w * settings["rate"] + x)
        return h, h

    def loop(scan: Any, h: Tensor, xs: Tensor, **more: Any) -> list[Tensor]:
        carry, ys = scan(step, h, xs, **more)
        return [ys.detach(), *torch.autograd.grad(ys.sum() + carry.sum(), [w])]

    for rate, batch, dtype in ((0.1, 2, torch.float32), (0.7, 2, torch.float32), (0.7, 3, torch.float32)):
        settings["rate"] = rate
        h, xs = torch.zeros(batch, 6, dtype=dtype), torch.randn(7, batch, 6, dtype=dtype)
        got = loop(remat.scan, h, xs, budget="1MiB", compile="python")
        for mine, theirs in zip(got, loop(plain_scan, h, xs), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    program = PROGRAMS["stacked-cells-with-dropout"]()
    wrt = list(program.wrt.values())
    _, ys = remat.scan(program.step, program.carry, program.xs, budget="400KiB", compile="python")
    first = torch.autograd.grad(ys.sum(), wrt, retain_graph=True)
    again = torch.autograd.grad(ys.sum(), wrt)
    assert same(list(first), list(again))


def test_gradients_of_two_parameters_never_share_memory() -> None:
    """Both biases of a cell have the same gradient; each must be free to change its own."""
    cell, xs = nn.LSTMCell(3, 4), torch.randn(6, 2, 3)
    start = (torch.zeros(2, 4), torch.zeros(2, 4))
    _, ys = remat.scan(lambda c, x: ((c := cell(x, c)), c[0]), start, xs, budget="1MiB", compile="python")
    ys.sum().backward()
    first = cell.bias_ih.grad
    assert first is not None
    kept = first.clone()
    assert cell.bias_hh.grad is not None
    cell.bias_hh.grad.add_(1)
    assert torch.equal(first, kept)


def test_inductor_writes_into_the_same_slots_and_leaves_draws_to_pytorch() -> None:
    """One small step with dropout through the compiler: results, gradients, random stream, budget."""
    cell, xs, h = nn.RNNCell(4, 8), torch.randn(24, 2, 4), torch.zeros(2, 8)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(cell(x, h), 0.25)
        return h, h

    def trained(scan: Any, **more: Any) -> list[Tensor]:
        torch.manual_seed(5)
        _, ys = scan(step, h, xs, **more)
        gradients = torch.autograd.grad(ys.square().sum(), list(cell.parameters()))
        return [ys.detach(), *gradients, torch.get_rng_state()]

    expected = trained(plain_scan)
    made = remat.plan_scan(step, h, xs, budget="1GiB", compile="inductor")
    assert "not fused" not in made.explain()
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        remat.plan_scan(step, h, xs, budget=1, compile="inductor")
    for budget in (made.peak_bytes, refusal.value.smallest_budget_bytes):
        got = trained(remat.scan, budget=budget, compile="inductor")
        assert torch.equal(got.pop(), expected[-1])
        for mine, theirs in zip(got, expected, strict=False):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("heavy", [False, True])
def test_a_fused_step_advances_by_the_program_that_records_it(heavy: bool) -> None:
    """Whatever is fused with what, and so rounded how: a replay meets the carries that were stored."""
    cell, readout, h, x = nn.RNNCell(4, 8), nn.Linear(8, 50), torch.zeros(2, 8), torch.randn(2, 4)
    parameters = [*cell.parameters(), *readout.parameters()]
    through_compiler = []

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, readout(h).logsumexp(1) if heavy else h.square()

    def fusing(program: Any) -> Any:
        through_compiler.append(program)
        return lowered(program)

    structures = Structure(h), [h], Structure(x), [x]
    traced = Traced(Problem(step, *structures, (True,), parameters, parameters), fusing)
    advances = {id(traced.advance(outputs=first)) for first in (True, False)}
    records = {id(menu.record(outputs=first)) for menu in traced.menu for first in (True, False)}
    if heavy:  # not computed in vain; operator by operator, both ways give the same bits
        names = [str(node.target) for node in traced.advance(outputs=False).program.graph.nodes]
        assert not any("logsumexp" in name for name in names)
        assert names.count("aten.addmm.default") == 2
        assert through_compiler == []
    else:
        assert advances == records
        assert len(records) == 1


@pytest.mark.parametrize(("rows", "width", "compiled"), [(8, 16, "python"), (64, 128, "python"), (64, 128, "inductor")])
def test_large_products_run_through_onednn(rows: int, width: int, compiled: str) -> None:
    """Forward with a bias, backward without; its weight is transposed in one of them. Small ones stay."""
    layer, xs, h = nn.Linear(width, width), torch.randn(5, rows, width), torch.zeros(rows, width)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(layer(h) + x)
        return h, h.mean(1)

    def trained(scan: Any, **more: Any) -> list[Tensor]:
        _, ys = scan(step, h, xs, **more)
        return [ys.detach(), *torch.autograd.grad(ys.square().sum(), list(layer.parameters()))]

    made = remat.plan_scan(step, h, xs, budget="4MiB", compile=compiled)
    assert "not fused" not in made.explain()
    for mine, theirs in zip(
        trained(remat.scan, budget=made.peak_bytes, compile=compiled), trained(plain_scan), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    structures, weights = (Structure(h), [h], Structure(xs[0]), [xs[0]]), list(layer.parameters())
    traced = Traced(Problem(step, *structures, (True,), weights, weights))
    arriving = Arriving(frozenset([0]), frozenset([0]))
    for ready in (traced.advance(outputs=True), traced.menu[0].record(outputs=True), traced.menu[0].backward(arriving)):
        names = [str(node.target) for node in ready.program.graph.nodes]
        assert names.count("mkldnn._linear_pointwise.default") == (rows == 64)
        assert any("addmm" in name or "aten.mm" in name for name in names) is (rows == 8)


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_inputs_are_taken_ahead_with_the_same_bits_in_every_replay(bias: bool) -> None:
    """As many steps at once as there is room for; however a range begins and ends, a step meets the same rows."""
    torch.manual_seed(0)
    layer, xs, h = nn.Linear(64, 512, bias=bias), torch.randn(11, 16, 64), torch.zeros(16, 512)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(layer(x) - 0.5 * h)
        return h, h

    def trained(scan: Any, **more: Any) -> list[Tensor]:
        _, ys = scan(step, h, xs, **more)
        return [ys.detach(), *torch.autograd.grad(ys.square().sum(), list(layer.parameters()))]

    structures, weights = (Structure(h), [h], Structure(xs[0]), [xs[0]]), list(layer.parameters())
    traced = Traced(Problem(step, *structures, (True,), weights, weights))
    (ahead,) = traced.ahead
    assert ahead.steps == 8
    for ready in (traced.advance(outputs=True), traced.menu[0].record(outputs=True)):
        assert not any("linear" in str(node.target) or "mm" in str(node.target) for node in ready.program.graph.nodes)
    stages = TracedStages(
        traced, Loop(step, Structure(h), [h], Structure(xs[0]), [xs], 11, None), [weights[n] for n in traced.externals]
    )
    rows = [stages.window().at(index)[0] for index in range(11)]
    for start in range(11):
        window = stages.window()
        assert all(torch.equal(window.at(index)[0], rows[index]) for index in range(start, 11))
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        remat.plan_scan(step, h, xs, budget=1, compile="python")
    for budget in (refusal.value.smallest_budget_bytes, "1GiB"):
        ours = trained(remat.scan, budget=budget, compile="python")
        torch.testing.assert_close(ours, trained(plain_scan))


def test_what_inductor_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such register")

    monkeypatch.setattr(fusing, "_through_inductor", broken)
    cell, xs, h = nn.RNNCell(4, 4), torch.randn(6, 2, 4), torch.zeros(2, 4)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return cell(x, h), None

    with pytest.raises(remat.StepError, match=r"no such register; compile=True"):
        remat.scan(step, h, xs, budget="1MiB", compile="inductor")
    explained = remat.plan_scan(step, h, xs, budget="1MiB", compile=True).explain()
    assert "not fused by Inductor: RuntimeError: no such register" in explained
    program = PROGRAMS["complex-diagonal"]()
    with pytest.raises(remat.StepError, match="complex numbers"):
        plan_of(program, "1GiB", "inductor")
