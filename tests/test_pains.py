"""What people report about recomputation elsewhere, each case by its number.

P01 batch norm, P03 dropout, P04 autocast, P06 views and in-place results, P09 captured tensors, P10 pytrees and P15
branches are also met, at every budget and loss, in `test_scan_exact`. Elsewhere only: P22 and P23 in
`test_scan_memory`, P30 in `test_scan_state`, P32 and P33 in `test_distributed`. The last test here counts them all.
"""

from __future__ import annotations

import ast
import copy
import re
import threading
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from plain import plain_scan, same

T, B, H = 16, 8, 24
AMPLE = "1GiB"
# "hsm" keeps few carries, "constant" none, "keep-all" all: they recompute, or not, at any budget.
planners = pytest.mark.parametrize("planner", ["keep-all", "hsm", "constant"])


def scan(step: Any, carry: Any, xs: Any = None, *, planner: str = "hsm", **kwargs: Any) -> Any:
    return remat.scan(step, carry, xs, budget=AMPLE, planner=planner, **kwargs)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weight() -> Tensor:
    return (torch.randn(H, H) * 0.5).requires_grad_()


def inputs() -> Tensor:
    return torch.randn(T, B, H)


def elman(w: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    return step


def grads(loss: Tensor, *wrt: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, wrt)


@planners
def test_p01_batch_norm_statistics_move_once(planner: str) -> None:
    norm, xs = nn.BatchNorm1d(H), inputs()
    reference = copy.deepcopy(norm)
    w = weight()

    def run(loop: Any, norm: nn.Module) -> None:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(norm(h @ w + x))
            return h, h

        for _ in range(3):
            loop(step, torch.zeros(B, H), xs)[1].sum().backward()

    run(plain_scan, reference)
    run(partial(scan, planner=planner), norm)
    assert same(dict(norm.named_buffers()), dict(reference.named_buffers()))
    assert norm.num_batches_tracked == 3 * T


@planners
@pytest.mark.parametrize("kind", ["list", "dict", "attribute", "nonlocal", "tensor"])
def test_p02_what_a_step_keeps_for_itself_is_replayed_or_refused(kind: str, planner: str) -> None:
    xs = inputs()

    class Cache:
        def __init__(self) -> None:
            self.items: list[Tensor] = []
            self.by_name: dict[str, Tensor] = {}
            self.last = torch.zeros(B, H)
            self.count = 0

    def run(loop: Any) -> tuple[Any, ...]:
        torch.manual_seed(3)
        w, cache = weight(), Cache()
        memory, count = torch.zeros(B, H), 0

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal count
            kept: Any = 0
            if kind == "list":
                cache.items.append(h.detach())
                kept = sum(cache.items[-2:])
            elif kind == "dict":
                kept = cache.by_name.get("h", 0)
                cache.by_name["h"] = h.detach()
            elif kind == "attribute":
                kept = cache.last / (cache.count + 1)
                cache.last, cache.count = h.detach(), cache.count + 1
            elif kind == "tensor":
                kept = memory.clone()
                memory.mul_(0.5).add_(h.detach())
            else:
                count += 1
                kept = 1 / count
            h = torch.tanh(h @ w + x + kept)
            return h, h

        ys = loop(step, torch.zeros(B, H), xs)[1]
        (g,) = grads(ys.sum(), w)
        return ys.detach(), g, len(cache.items), cache.by_name.get("h"), cache.last, cache.count, memory, count

    expected = run(plain_scan)
    try:
        got = run(partial(scan, planner=planner))
    except remat.RematError as refusal:
        message = str(refusal)
    else:
        assert same(got, expected)
        return
    assert "chang" in message


@planners
def test_p03_dropout_masks_are_those_of_the_forward(planner: str) -> None:
    w, xs = weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(h @ w + x), 0.5)
        return h, h

    torch.manual_seed(0)
    expected = grads(plain_scan(step, torch.zeros(B, H), xs)[1].sum(), w)
    torch.manual_seed(0)
    assert same(grads(scan(step, torch.zeros(B, H), xs, planner=planner)[1].sum(), w), expected)


@planners
def test_p04_autocast_is_entered_again(planner: str) -> None:
    w, xs, seen = weight(), inputs(), Counter[tuple[torch.dtype, str]]()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = F.linear(h, w)
        with torch.autocast("cpu", enabled=False):
            seen[F.linear(h, w).dtype, "disabled"] += 1
        seen[z.dtype, "enabled"] += 1
        h = torch.tanh(z.float() + x)
        return h, h

    with torch.autocast("cpu", torch.bfloat16):
        _, ys = scan(step, torch.zeros(B, H), xs, planner=planner)
    ys.sum().backward()
    assert set(seen) == {(torch.bfloat16, "enabled"), (torch.float32, "disabled")}


@planners
def test_p05_weights_shared_under_autocast(planner: str) -> None:
    lin, xs = nn.Linear(H, H), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(lin(torch.tanh(lin(h))).float() + x)
        return h, h

    def run(loop: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            before = lin(xs[0])  # the cast is in the cache already
            _, ys = loop(step, before.float(), xs)
            after = lin(ys[-1])
        return grads(ys.sum() + after.float().sum(), *lin.parameters())

    for got, expected in zip(run(partial(scan, planner=planner)), run(plain_scan), strict=True):
        assert (got - expected).norm() <= 0.02 * expected.norm()  # sums of bfloat16 numbers


@planners
@pytest.mark.parametrize(
    "tail",
    [
        nn.ReLU(inplace=True),
        nn.Flatten(),
        lambda z: z[:, :4],
        lambda z: torch.einsum("bi,bi->b", z, z),
        lambda z: z.t(),
        lambda z: z.expand(3, B, H),
    ],
    ids=["relu_", "flatten", "slice", "einsum", "transpose", "expand"],
)
def test_p06_views_and_in_place_results_at_the_end(tail: Callable[[Tensor], Tensor], planner: str) -> None:
    lin, xs = nn.Linear(H, H), inputs().requires_grad_()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = F.instance_norm((lin(h) + x)[None])[0]
        return torch.tanh(z), tail(z * 1)

    wanted = (*lin.parameters(), xs)
    expected = grads(plain_scan(step, torch.zeros(B, H), xs)[1].sum(), *wanted)
    assert same(grads(scan(step, torch.zeros(B, H), xs, planner=planner)[1].sum(), *wanted), expected)


@planners
def test_p07_adapters_learn_though_no_argument_needs_a_gradient(planner: str) -> None:
    frozen, adapter = nn.Embedding(9, H).requires_grad_(False), nn.Linear(H, H)
    tokens = torch.randint(9, (T, B))

    def step(h: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(adapter(frozen(token) + h))
        return h, h

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        carry, ys = scan(step, torch.zeros(B, H), tokens, planner=planner)
        ys.sum().backward()
    assert carry.requires_grad
    assert frozen.weight.grad is None
    assert same(adapter.weight.grad, grads(plain_scan(step, torch.zeros(B, H), tokens)[1].sum(), adapter.weight)[0])


@planners
@pytest.mark.parametrize("start", ["without", "with", "partly"])
def test_p08_initial_carry_without_gradient(start: str, planner: str) -> None:
    a = torch.tensor(0.9, requires_grad=True)
    xs = torch.randn(T)
    carry = (torch.zeros((), requires_grad=start != "without"), torch.zeros((), requires_grad=start == "with"))

    def step(c: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        z = a * c[0] + x
        return (z, c[1] * a + z), z

    for loss in (lambda c, _: c[0], lambda _, y: y.sum(), lambda c, y: c[1] + y[3]):
        expected = grads(loss(*plain_scan(step, carry, xs)), a)
        assert same(grads(loss(*scan(step, carry, xs, planner=planner)), a), expected)


@planners
def test_p09_captured_tensors_get_their_gradient(planner: str) -> None:
    encoder, w, xs = nn.Linear(5, H), weight(), inputs()
    source = torch.randn(B, 5)

    def run(loop: Any) -> tuple[Tensor, ...]:
        context = encoder(source)

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h @ w + x + context)
            return h, h

        return grads(loop(step, torch.zeros(B, H), xs)[1].sum(), w, *encoder.parameters())

    assert same(run(partial(scan, planner=planner)), run(plain_scan))


@planners
def test_p09_used_inside_and_outside(planner: str) -> None:
    """Both uses are summed; the parts from outside the loop are added by the outer graph, in its own order."""
    raw, xs = weight(), inputs()

    def run(loop: Any) -> tuple[Tensor, ...]:
        w = raw / raw.norm()
        _, ys = loop(elman(w), torch.zeros(B, H) @ w, xs)
        return grads(ys.sum() + (ys[-1] @ w).sum() + raw.sum(), raw)

    torch.testing.assert_close(run(partial(scan, planner=planner)), run(plain_scan), rtol=1e-5, atol=1e-5)


State = namedtuple("State", "h c")


@planners
def test_p10_named_tuples_and_dicts(planner: str) -> None:
    w, xs, start = weight(), inputs().requires_grad_(), torch.randn(B, H).requires_grad_()

    def step(s: State, x: dict[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        s = State(torch.tanh(s.h @ w + x["a"]), s.c + 1)
        return s, {"y": s.h}

    carry, ys = scan(step, State(start, torch.zeros(())), {"a": xs}, planner=planner)
    assert type(carry) is State
    assert set(ys) == {"y"}
    assert (carry.c, carry.c.requires_grad) == (T, False)
    _, expected = plain_scan(step, State(start, torch.zeros(())), {"a": xs})
    assert same(grads(ys["y"].sum(), w, xs, start), grads(expected["y"].sum(), w, xs, start))


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert len(ctx.saved_tensors) == 2
        a, b = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        assert torch.equal(a, again)
        return grad @ b.t(), a.t() @ grad


@planners
def test_p11_saved_tensors_read_twice(planner: str) -> None:
    w, xs = weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(Twice.apply(h, w) + x)
        return h, h

    expected = grads(plain_scan(step, torch.zeros(B, H), xs)[1].sum(), w)
    assert same(grads(scan(step, torch.zeros(B, H), xs, planner=planner)[1].sum(), w), expected)


@planners
def test_p12_the_functional_form_touches_nothing(planner: str) -> None:
    w, v, xs = weight(), weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x @ v)
        return h, h

    (expected,) = grads(plain_scan(step, torch.zeros(B, H), xs)[1].sum(), w)
    (got,) = grads(scan(step, torch.zeros(B, H), xs, planner=planner)[1].sum(), w)
    assert same(got, expected)
    assert w.grad is None
    assert v.grad is None
    scan(step, torch.zeros(B, H), xs, planner=planner)[1].sum().backward(inputs=[w])
    assert same(w.grad, expected)
    assert v.grad is None


@planners
def test_p13_a_retained_graph_is_used_again(planner: str) -> None:
    w, xs = weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(h @ w + x), 0.2)
        return h, h

    def run(loop: Any) -> list[Tensor]:
        torch.manual_seed(1)
        _, ys = loop(step, torch.zeros(B, H), xs)
        return [
            torch.autograd.grad(ys.sum(), [w], retain_graph=True)[0],
            torch.autograd.grad(ys[5].sum(), [w], retain_graph=True)[0],
            torch.autograd.grad(ys.sum(), [w])[0],
            torch.rand(3),
        ]

    got = run(partial(scan, planner=planner))
    assert same(got, run(plain_scan))
    assert same(got[0], got[2])


@planners
def test_p14_hooks_of_a_shared_parameter_fire_once(planner: str) -> None:
    xs = inputs()

    def run(loop: Any) -> tuple[Any, ...]:
        torch.manual_seed(2)
        w, events = weight(), []
        w.register_hook(lambda g: (events.append("hook"), g.clamp(-1e-3, 1e-3))[1])
        w.register_post_accumulate_grad_hook(lambda p: events.append(f"accumulated {p is w}"))
        for _ in range(2):
            loop(elman(w), torch.zeros(B, H), xs)[1].sum().backward()
        return events, w.grad

    got = run(partial(scan, planner=planner))
    assert got[0] == ["hook", "accumulated True"] * 2
    assert same(got, run(plain_scan))


@planners
def test_p15_branches_take_the_same_path(planner: str) -> None:
    w, v, xs = weight(), weight(), inputs().round()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ (w if bool((h.sum() + x.sum()) > 0) else v))
        top = h.topk(3, -1).indices
        return h, h.gather(-1, top)

    start = torch.ones(B, H)
    expected = grads(plain_scan(step, start, xs)[1].sum(), w, v)
    assert same(grads(scan(step, start, xs, planner=planner)[1].sum(), w, v), expected)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Doubling(TorchFunctionMode):
    """Makes every sine twice as large."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@planners
def test_p16_default_dtype_and_modes_of_the_forward(planner: str) -> None:
    w, xs = weight().detach().double().requires_grad_(), inputs().double()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x + torch.ones(H) + torch.sin(h))  # fails in the matrix product if these are float32
        return h, h

    def run(loop: Any) -> tuple[Tensor, ...]:
        with default_dtype(torch.float64), Doubling():
            _, ys = loop(step, torch.zeros(B, H), xs)
        return grads(ys.sum(), w)

    assert same(run(partial(scan, planner=planner)), run(plain_scan))
    assert torch.get_default_dtype() == torch.float32


def test_p16_dispatch_modes_see_replays_as_well() -> None:
    w, xs = weight(), inputs()
    remat.plan_scan(elman(w), torch.zeros(B, H), xs, budget=AMPLE, planner="constant")
    with Counting():
        _, ys = scan(elman(w), torch.zeros(B, H), xs, planner="constant")
    Counting.count = 0
    ys.sum().backward()
    assert Counting.count >= T * (T - 1) // 2


@planners
def test_p17_module_hooks_come_in_pairs_and_can_skip_replays(planner: str) -> None:
    cell, xs, events, first = nn.GRUCell(H, H), inputs(), [], []
    cell.register_forward_pre_hook(lambda *_: events.append(+1))
    cell.register_forward_hook(lambda *_: events.append(-1))
    cell.register_forward_hook(lambda *_: None if remat.is_recomputing() else first.append(1))

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    try:
        scan(step, torch.zeros(B, H), xs, planner=planner)[1].sum().backward()
    except remat.RematError:
        pytest.fail("hooks that write to a list are no reason to refuse")
    assert sum(events) == 0
    assert min(accumulate(events)) >= 0
    assert len(first) == T
    assert not remat.is_recomputing()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_p18_function_transforms_work_or_are_refused_in_a_sentence() -> None:
    w, xs = weight().detach(), inputs()

    def loss(loop: Any, w: Tensor, xs: Tensor) -> Tensor:
        return loop(elman(w), torch.zeros(xs.shape[1:]), xs)[1].sum()

    for transform in (
        lambda f: torch.func.grad(f)(w, xs),
        lambda f: torch.func.vmap(torch.func.grad(f), (None, 1))(w, xs),
        lambda f: torch.func.jvp(f, (w, xs), (w, xs))[1],
    ):
        torch.testing.assert_close(transform(partial(loss, scan)), transform(partial(loss, plain_scan)))


class Two(nn.Linear):
    """Returns a tuple of one tuple and a number."""

    def forward(self, x: Tensor) -> Any:
        return ((super().forward(x).tanh(), x),), 3


class One(nn.Linear):
    """Takes what `Two` returns, as it is."""

    def forward(self, value: Any) -> dict[str, Tensor]:
        (pair,), number = value
        assert type(pair) is tuple
        assert number == 3
        return {"z": super().forward(pair[0]) + pair[1]}


@pytest.mark.parametrize("planner", ["keep-all", "constant"])
def test_p19_a_block_gets_what_the_one_before_returned(planner: str) -> None:
    """And P28: keys and parameters are those of the plain container."""
    blocks, x = [Two(H, H), One(H, H), nn.Identity()], torch.randn(B, H)
    net = remat.Sequential(*blocks, budget=AMPLE, planner=planner)
    plain = nn.Sequential(*blocks)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert list(map(id, net.parameters())) == list(map(id, plain.parameters()))
    found, expected = net(x), plain(x)
    assert list(found) == list(expected) == ["z"]
    wanted = list(plain.parameters())
    assert same(grads(found["z"].square().sum(), *wanted), grads(expected["z"].square().sum(), *wanted))


def test_p20_p21_the_number_in_a_refusal_is_one_that_holds() -> None:
    """And where the plain loop fits, everything is kept."""
    w, xs, start = weight(), torch.randn(60, 8 * B, H), torch.zeros(8 * B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h.square().mean()

    def run(**settings: Any) -> None:
        loop = partial(remat.scan, **settings) if settings else plain_scan
        grads(loop(step, start, xs)[1].sum(), w)

    with pytest.raises(ValueError, match=r"\d+ bytes") as refused:
        run(budget=1000)
    found = re.search(r"works is (\d+) bytes", str(refused.value))
    assert found is not None
    smallest = int(found[1])
    assert remat.measure(lambda: run(budget=smallest)).peak_bytes <= smallest
    plain = int(remat.measure(run).peak_bytes * 1.05)
    assert remat.plan_scan(step, start, xs, budget=plain).forward_runs == 60
    assert remat.measure(lambda: run(budget=plain)).peak_bytes <= plain


def test_p24_the_outputs_are_named_when_they_fill_the_budget() -> None:
    w, xs = weight(), torch.randn(200, B, H)
    with pytest.raises(remat.InfeasibleBudget, match="outputs") as refusal:
        remat.scan(elman(w), torch.zeros(B, H), xs, budget=200 * B * H * 4)
    parts = refusal.value.parts_bytes
    assert max(parts, key=lambda name: parts[name]) in ("outputs", "gradients of outputs")


def test_p25_a_longer_horizon_is_asked_about_without_running_it() -> None:
    cell, calls = nn.GRUCell(H, H), Counter[str]()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        calls["step"] += not remat.is_recomputing()
        return cell(x, h), None

    made = remat.plan_scan(step, torch.zeros(B, H), torch.zeros(4000, B, H), budget="1MiB")
    assert made.chain.length == 4000
    assert made.peak_bytes <= 2**20
    assert calls["step"] == 0


def test_p26_nothing_is_run_twice_when_everything_fits() -> None:
    w, xs, runs = weight(), inputs(), Counter[bool]()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        runs[remat.is_recomputing()] += 1
        return elman(w)(h, x)

    for _ in range(2):
        scan(step, torch.zeros(B, H), xs, planner="auto")[1].sum().backward()
    before = runs[True]
    scan(step, torch.zeros(B, H), xs, planner="auto")[1].sum().backward()
    assert (runs[False], runs[True] - before) == (3 * T, 0)


@pytest.mark.parametrize("planner", ["hsm", "constant", "sqrt", "tight"])
def test_p27_the_last_step_is_not_run_again(planner: str) -> None:
    w, xs = weight(), inputs()
    last = Counter[bool]()

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        if t == T - 1:
            last[remat.is_recomputing()] += 1
        h, y = elman(w)(h, x)
        return (h, t + 1), y

    _, ys = scan(step, (torch.zeros(B, H), 0), xs, planner=planner)
    before = last.total()
    ys.sum().backward()
    assert last[False] == 1
    assert last.total() == before


def test_p29_a_report_says_what_was_planned() -> None:
    w, xs = weight(), inputs()
    made = remat.plan_scan(elman(w), torch.zeros(B, H), xs, budget="1MiB")
    text = made.explain()
    assert all(word in text for word in ("keep-all", "16 stages", "1 MiB"))


def test_p31_keyword_arguments_reach_the_step() -> None:
    w, mask, xs = weight(), torch.randn(H).requires_grad_(), inputs()

    def step(h: Tensor, x: Tensor, *, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x * mask) * scale
        return h, h

    bound = partial(step, mask=mask, scale=0.5)
    expected = grads(plain_scan(bound, torch.zeros(B, H), xs)[1].sum(), w, mask)
    assert same(grads(scan(bound, torch.zeros(B, H), xs)[1].sum(), w, mask), expected)


def test_p34_the_plan_is_a_function_of_shapes_and_budget() -> None:
    w, xs = weight(), torch.randn(60, B, H)
    texts = {remat.plan_scan(elman(w), torch.zeros(B, H), xs + k, budget="150KiB").schedule.text() for k in range(3)}
    assert len(texts) == 1


def test_p35_frozen_weights_that_are_filled_and_emptied_around_each_call() -> None:
    """As partitioned parameters are: the data is there only while the module runs."""
    frozen, adapter, xs = nn.Linear(H, H).requires_grad_(False), nn.Linear(H, H), inputs()
    full = frozen.weight.data.clone()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(adapter(h) + frozen(x))
        return h, h

    expected = grads(plain_scan(step, torch.zeros(B, H), xs)[1].sum(), *adapter.parameters())
    frozen.register_forward_pre_hook(lambda m, _: setattr(m.weight, "data", full.clone()))
    frozen.register_forward_hook(lambda m, *_: setattr(m.weight, "data", full.new_empty(0)))
    frozen.weight.data = full.new_empty(0)
    assert same(grads(scan(step, torch.zeros(B, H), xs)[1].sum(), *adapter.parameters()), expected)


# torch.compile asks any tensor that is no leaf for its .grad, and so warns by itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_p36_a_compiled_step_is_compiled_once_and_a_compiled_loop_is_not_unrolled() -> None:
    w, compiled = weight(), []

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module.forward

    fast = torch.compile(elman(w), backend=backend)
    for length in (10, 40):
        before = len(compiled)
        xs = torch.randn(length, B, H)
        expected = grads(plain_scan(elman(w), torch.zeros(B, H), xs)[1].sum(), w)
        assert same(grads(scan(fast, torch.zeros(B, H), xs)[1].sum(), w), expected)
    assert 0 < before == len(compiled)  # with and without autograd, and no more for another length
    compiled.clear()
    whole = torch.compile(lambda xs: scan(elman(w), torch.zeros(B, H), xs)[1].sum(), backend=backend)
    assert same(grads(whole(xs), w), expected)
    assert max(compiled, default=0) < 10
    torch.compiler.reset()


def test_p37_dropout_at_every_budget() -> None:
    w, xs = weight(), torch.randn(60, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(h @ w + x), 0.5)
        return h, h

    def run(loop: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        return *grads(loop(step, torch.zeros(B, H), xs)[1].sum(), w), torch.get_rng_state()

    expected = run(plain_scan)
    with pytest.raises(remat.InfeasibleBudget) as refused:
        run(partial(remat.scan, budget=1))
    smallest = refused.value.smallest_budget_bytes
    ample = remat.plan_scan(step, torch.zeros(B, H), xs, budget=AMPLE).peak_bytes
    for budget in range(smallest, ample + 1, (ample - smallest) // 6):
        assert same(run(partial(remat.scan, budget=budget)), expected), budget


def test_p38_a_capture_into_a_cuda_graph_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(remat.StepError, match="CUDA graph"):
        scan(elman(weight()), torch.zeros(B, H), inputs())


# ---- several at once


def test_two_scans_alive_at_once_backward_in_either_order() -> None:
    w, xs = weight(), inputs()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(h @ w + x), 0.3)
        return h, h

    def run(loop: Any, *, newest_first: bool) -> list[Tensor]:
        torch.manual_seed(4)
        results = [loop(step, torch.zeros(B, H), xs)[1], loop(step, torch.ones(B, H), xs)[1]]
        order = results[::-1] if newest_first else results
        return [*(grads(ys.square().sum(), w)[0] for ys in order), torch.rand(2)]

    for newest_first in (False, True):
        got = run(partial(scan, planner="constant"), newest_first=newest_first)
        assert same(got, run(plain_scan, newest_first=newest_first))


@pytest.mark.parametrize(("outer", "inner"), [("hsm", "keep-all"), ("constant", "hsm"), ("keep-all", "constant")])
def test_a_scan_within_a_scan(outer: str, inner: str) -> None:
    w, v, xs = weight(), weight(), torch.randn(5, 4, B, H).requires_grad_()

    def run(outer_loop: Any, inner_loop: Any) -> tuple[Tensor, ...]:
        def small(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.dropout(torch.tanh(h @ w + x), 0.2)
            return h, h

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h, ys = inner_loop(small, torch.tanh(h @ v), x)
            return h, ys.mean(0)

        torch.manual_seed(6)
        carry, ys = outer_loop(step, torch.zeros(B, H), xs)
        return (*grads(carry.sum() + ys.square().sum(), w, v, xs), torch.rand(2))

    got = run(partial(scan, planner=outer), partial(scan, planner=inner))
    expected = run(plain_scan, plain_scan)
    assert same(got[2:], expected[2:])
    for a, b in zip(got[:2], expected[:2], strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()  # the inner loops' sums for the weights are added as one


def test_threads_do_not_disturb_each_other() -> None:
    """Without randomness, which threads share in plain PyTorch too."""
    results: dict[int, Any] = {}
    made = {k: (weight(), inputs()) for k in range(4)}

    def work(k: int) -> None:
        w, xs = made[k]
        planner = ("keep-all", "hsm", "constant", "tight")[k]
        for _ in range(3):
            results[k] = grads(scan(elman(w), torch.zeros(B, H), xs, planner=planner)[1].sum(), w)

    threads = [threading.Thread(target=work, args=(k,)) for k in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, (w, xs) in made.items():
        assert same(results[k], grads(plain_scan(elman(w), torch.zeros(B, H), xs)[1].sum(), w))


def test_backward_in_another_thread() -> None:
    w, xs, results = weight(), inputs(), []
    _, ys = scan(elman(w), torch.zeros(B, H), xs, planner="constant")
    thread = threading.Thread(target=lambda: results.append(grads(ys.sum(), w)))
    thread.start()
    thread.join()
    assert same(results[0], grads(plain_scan(elman(w), torch.zeros(B, H), xs)[1].sum(), w))


@planners
def test_anomaly_mode(planner: str) -> None:
    w, xs = weight(), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            got = grads(scan(elman(w), torch.zeros(B, H), xs, planner=planner)[1].sum(), w)
    assert same(got, grads(plain_scan(elman(w), torch.zeros(B, H), xs)[1].sum(), w))


@planners
def test_saved_tensor_hooks_around_it(planner: str) -> None:
    w, xs = weight(), inputs()

    def run(loop: Any) -> tuple[Tensor, ...]:
        with torch.autograd.graph.save_on_cpu():
            _, ys = loop(elman(w), torch.zeros(B, H), xs)
        return grads(ys.sum(), w)

    assert same(run(partial(scan, planner=planner)), run(plain_scan))


def test_every_case_has_a_test() -> None:
    """A number in the name or the docstring of a test function of this suite."""
    texts = [
        f"{node.name.replace('_', ' ')} {ast.get_docstring(node)}"
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    named = {int(number) for text in texts for number in re.findall(r"(?i)\bp(\d\d)\b", text)}
    assert named >= set(range(1, 39)), sorted(set(range(1, 39)) - named)
