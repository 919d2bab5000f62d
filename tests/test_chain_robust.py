"""What happens around `remat.chain`: order of events, hooks, graphs used again, errors, other front ends."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from plain import accumulator_mark, assert_same, observe, same, seed_everything
from remat.blocks import granularity, survey
from remat.schedules import Record
from stacks import STACKS, B, D, Residual, budget_at, chained, of, plain_chain, planned
from steps import leaf

# Nothing runs again (but without check= that would be the plain loop); all does, often.
AMPLE, AGAIN = {"budget": "1GiB", "check": True}, {"budget": "1GiB", "planner": "constant"}
levels = pytest.mark.parametrize("settings", [AMPLE, AGAIN], ids=["ample", "constant"])


@pytest.fixture(autouse=True)
def blocks_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether tiny blocks are grouped depends on how long they take, which these tests should not."""
    monkeypatch.setattr(granularity, "_groups", lambda *_: ())


def residual(count: int = 8, **kwargs: Any) -> list[nn.Module]:
    seed_everything(5)
    return [Residual(**kwargs) for _ in range(count)]


def tight(blocks: Any, x: Tensor) -> int | str:
    return budget_at(of(blocks, x), 0.3)


def test_a_tight_budget_means_recomputation() -> None:
    blocks, x = residual(), leaf(B, D)
    for tensor in (x, *(p for block in blocks for p in block.parameters())):
        tensor.grad = torch.zeros_like(tensor)  # or the end, with all gradients there, would need most
    assert planned(of(blocks, x), "1GiB").forward_runs == 8
    made = planned(of(blocks, x), tight(blocks, x))
    selective = sum(a.stop - a.start for a in made.schedule if isinstance(a, Record) and a.entry)
    assert made.forward_runs + selective > 12


# ---- order of events


@levels
def test_gradients_and_hooks_come_block_by_block(settings: dict[str, Any]) -> None:
    """A block's gradients are in `.grad`, its hooks have fired, before the backward of the block before it begins."""
    blocks, x = residual(), leaf(B, D)
    events: list[str] = []
    for number, block in enumerate(blocks):
        last = block.outer.weight
        last.register_hook(lambda _, k=number: events.append(f"hook {k}"))
        last.register_post_accumulate_grad_hook(lambda _, k=number: events.append(f"grad {k}"))

    class Began(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
            ctx.k = k
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            if not remat.is_recomputing():  # not when blocks are measured
                done = [k for k, block in enumerate(blocks) if all(p.grad is not None for p in block.parameters())]
                assert done == list(range(ctx.k + 1, len(blocks)))
                events.append(f"began {ctx.k}")
            return gradient, None

    watched = [lambda x, k=k, b=b: Began.apply(b(x), k) for k, b in enumerate(blocks)]
    remat.chain(watched, x, **settings).sum().backward()
    assert events == [f"{what} {k}" for k in reversed(range(8)) for what in ("began", "hook", "grad")]


@levels
def test_hooks_of_a_tied_parameter_fire_once_with_the_whole_gradient(settings: dict[str, Any]) -> None:
    def run(loop: Callable[..., Any]) -> list[Tensor]:
        made, seen = STACKS["weights-tied-between-and-within-blocks"](), []
        for weight in made.wrt.values():
            weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        seed_everything(2)
        loop(made.step, made.carry)[0].square().sum().backward()
        return seen

    got, expected = run(chained(**settings)), run(plain_chain)
    assert len(got) == len(expected) == len(STACKS["weights-tied-between-and-within-blocks"]().wrt)
    assert sorted(map(str, got)) == sorted(map(str, expected))


def test_gradient_accumulators_are_made_once_in_a_call() -> None:
    """Made by an operator that has let the GIL go, one can block another thread for good (PyTorch 2.10 and newer)."""
    blocks, seen = residual(4), SimpleQueue[tuple[str, object]]()

    def watched(x: Tensor, number: int) -> Tensor:
        for name, weight in blocks[number].named_parameters():
            seen.put((f"{number} {name}", accumulator_mark(weight)))
        return blocks[number](x)

    names = {f"{number} {name}" for number, block in enumerate(blocks) for name, _ in block.named_parameters()}
    for _ in range(2):
        remat.chain([partial(watched, number=number) for number in range(4)], leaf(B, D), **AGAIN).sum().backward()
        marks = {seen.get() for _ in range(seen.qsize())}
        assert len(marks) == len(names)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_a_hidden_tensor(at: int, first: bool) -> None:
    """Nothing leads to it but the recorded graph: used at first or last it has its gradient, else it is refused."""
    survey._known.clear()
    hidden, switch = leaf(D, D), nn.Identity()
    tensor, on = weakref.ref(hidden), weakref.ref(switch)
    inner = residual(3)

    def block(x: Tensor, number: int) -> Tensor:
        return inner[number](x @ tensor() if number == at and on().training else x)

    blocks, x = [partial(block, number=number) for number in range(3)], leaf(B, D)
    for number in range(4):  # when gradients exist, blocks are looked at anew
        switch.train(first or number > 1)
        y = remat.chain(blocks, x, **AGAIN).sum()
        if switch.training and not first and at < 2:
            with pytest.raises(remat.StepError, match=rf"uses a tensor of shape \({D}, {D}\).*shared argument"):
                y.backward()
        else:
            y.backward()
            found, hidden.grad = hidden.grad, None
            plain_chain(blocks, x)[0].sum().backward()
            assert same(found, hidden.grad)
            hidden.grad = None


@levels
def test_module_hooks_run_in_pairs_and_see_replays_marked(settings: dict[str, Any]) -> None:
    blocks, x = residual(), leaf(B, D)
    calls, firsts = [0, 0], []

    def before(*_: Any) -> None:
        calls[0] += not remat.is_recomputing()

    def after(module: nn.Module, *_: Any) -> None:
        calls[1] += not remat.is_recomputing()
        firsts.append(module)

    for block in blocks:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    remat.chain(blocks, x, **settings).sum().backward()
    assert calls == [8, 8]
    assert firsts == blocks, "what hooks note is as after the plain loop"


def test_the_optimizer_may_step_in_the_backward() -> None:
    def run(chain: Callable[..., Tensor]) -> list[Tensor]:
        def step(p: Tensor) -> None:
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None

        blocks, x = residual(), leaf(B, D, grad=False)
        for block in blocks:
            for p in block.parameters():
                p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            chain(blocks, x).square().mean().backward()
        return [p.detach() for block in blocks for p in block.parameters()]

    blocks, x = residual(), leaf(B, D, grad=False)
    budget = tight(blocks, x)
    expected = run(lambda blocks, x: plain_chain(blocks, x)[0])
    assert same(run(lambda blocks, x: remat.chain(blocks, x, budget=budget)), expected)


# ---- graphs


@levels
@pytest.mark.parametrize("name", ["batch-norm-in-training", "shared-arguments", "tied-blocks"])
def test_a_retained_graph_is_used_again(name: str, settings: dict[str, Any]) -> None:
    def run(loop: Callable[..., Any]) -> list[Any]:
        made = STACKS[name]()
        seed_everything(3)
        arguments = (made.step, made.carry, made.xs)
        total = loop(*arguments)[0].square().sum()
        wanted = list(made.wrt.values())
        parts = [wanted[-1:], wanted[: len(wanted) // 2], wanted]
        return [torch.autograd.grad(total, part, retain_graph=True, allow_unused=True) for part in parts]

    assert same(run(chained(**settings)), run(plain_chain))


@levels
def test_a_used_graph_says_so_as_autograd_does(settings: dict[str, Any]) -> None:
    blocks, x = residual(), leaf(B, D)
    total = remat.chain(blocks, x, **settings).sum()
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


@levels
def test_memory_falls_by_reference_counting(settings: dict[str, Any]) -> None:
    blocks, x = residual(), leaf(B, D)
    gradients = [torch.zeros_like(p) for block in blocks for p in block.parameters()]
    for p, gradient in zip((p for block in blocks for p in block.parameters()), gradients, strict=True):
        p.grad = gradient
    x.grad = torch.zeros_like(x)

    def forward_only() -> None:
        remat.chain(blocks, x * 2, **settings)

    def whole() -> None:
        remat.chain(blocks, x * 2, **settings).sum().backward()

    whole()
    gc.collect()
    gc.disable()
    try:
        for run in (forward_only, whole):
            assert remat.measure(run).net_bytes == 0
    finally:
        gc.enable()


def test_second_derivatives_are_refused() -> None:
    x = leaf(B, D)
    total = remat.chain(residual(2), x, **AGAIN).square().sum()
    with pytest.raises(remat.StepError, match=r"remat\.chain cannot be differentiated again"):
        torch.autograd.grad(total, x, create_graph=True)


@levels
def test_a_weight_changed_between_forward_and_backward(settings: dict[str, Any]) -> None:
    blocks, x = residual(), leaf(B, D)
    total = remat.chain(blocks, x, **settings).sum()
    with torch.no_grad():
        blocks[3].inner.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# ---- errors and refusals


def test_the_number_in_a_refusal_works() -> None:
    blocks, x = residual(), leaf(B, D)
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        remat.chain(blocks, x, budget=1000)
    smallest = refusal.value.smallest_budget_bytes
    assert remat.measure(lambda: remat.chain(blocks, x, budget=smallest).sum().backward()).peak_bytes <= smallest
    for tensor in (x, *(p for block in blocks for p in block.parameters())):
        tensor.grad = None
    with pytest.raises(remat.InfeasibleBudget):
        remat.chain(blocks, x, budget=smallest - 1)


@levels
@pytest.mark.parametrize("where", ["forward", "replay or backward"])
def test_an_error_leaves_what_the_plain_loop_leaves(settings: dict[str, Any], where: str) -> None:
    blocks, x = residual(norm=nn.BatchNorm1d), leaf(B, D)
    armed: list[str] = []

    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            if "forward" in armed and not remat.is_recomputing():
                raise KeyError("trap")
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            if "backward" in armed:
                raise KeyError("trap")
            return gradient

    blocks.insert(4, Trap.apply)
    expected = copy.deepcopy([block for block in blocks if isinstance(block, nn.Module)])
    planned(of(blocks, x), settings["budget"])
    for block, other in zip((b for b in blocks if isinstance(b, nn.Module)), expected, strict=True):
        assert same(dict(block.named_buffers()), dict(other.named_buffers())), "planning leaves no trace"
    armed.append("forward" if where == "forward" else "backward")
    stream = torch.get_rng_state()
    with pytest.raises(KeyError, match="trap"):
        remat.chain(blocks, x, **settings).sum().backward()
    armed.clear()
    assert torch.equal(stream, torch.get_rng_state())
    assert not remat.is_recomputing()
    runs = [int(block.norm.num_batches_tracked) for block in blocks if isinstance(block, nn.Module)]
    assert runs == ([1] * 4 + [0] * 4 if where == "forward" else [1] * 8)
    remat.chain(blocks, x, **settings).sum().backward()


def test_a_block_that_is_not_deterministic_is_found() -> None:
    blocks, x = residual(), leaf(B, D)
    blocks[4:4] = [lambda x: torch.sin(x + time.perf_counter() % 1)]
    budget = tight(blocks, x)
    with pytest.raises(remat.StepError, match=r"a replay of block \d gives another value"):
        remat.chain(blocks, x, budget=budget, planner="constant", check=True).sum().backward()


@levels
def test_what_was_replaced_is_let_go_with_the_graph(settings: dict[str, Any]) -> None:
    class Scaled(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((D,), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    blocks, x = [Scaled() for _ in range(4)], leaf(B, D)
    expected = torch.autograd.grad(plain_chain(blocks, x)[0].sum(), x)
    y = remat.chain(blocks, x, **settings)
    old = weakref.ref(blocks[0].scale)
    blocks[0].scale = torch.ones(D)
    assert same(torch.autograd.grad(y.sum(), x), expected)
    assert old() is None


@levels
@pytest.mark.parametrize("reads", [False, True])
def test_the_loss_of_yesterday(settings: dict[str, Any], reads: bool) -> None:
    """A block that keeps it runs as in the plain loop; one that computes with it is refused in a sentence."""

    class Keeping(Residual):
        loss: Tensor | float = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.loss if reads else 0.0)

    blocks, x = [Keeping() for _ in range(3)], leaf(B, D)
    for day in range(3):
        if reads and day:
            with pytest.raises(
                remat.StepError, match=r"block Keeping uses a result of SumBackward0 .* reset or detach"
            ):
                remat.chain(blocks, x, **settings)
            continue
        found = remat.chain(blocks, x, **settings).sum()
        expected = plain_chain(blocks, x)[0].sum()
        assert same(*(torch.autograd.grad(loss, x, retain_graph=True) for loss in (found, expected)))
        found.backward()
        blocks[1].loss = found


def test_gradients_kept_beside_the_carry_are_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(D, D), None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.linear(x)
            return torch.tanh(self.seen)

    with pytest.raises(remat.StepError, match=r"keeps a tensor with a gradient.*seen"):
        remat.chain([Keeps(), nn.Linear(D, D)], leaf(B, D), budget="1GiB")


def test_what_was_made_of_a_weight_needs_a_name() -> None:
    layer, rest = nn.Linear(D, D), nn.Linear(D, D)
    apart = layer.weight.t(), 1.0
    with pytest.raises(remat.StepError, match=r"list or tuple.*let one hold it"):
        remat.chain([lambda x: layer(x) @ apart[0], rest], leaf(B, D), budget="1GiB")


# ---- where nothing is kept anyway


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: Callable[[], Any]) -> None:
    blocks, x = residual(drop=0.5), leaf(B, D)
    with mode():
        seed_everything(1)
        got = remat.chain(blocks, x, budget=1)
        seed_everything(1)
        assert torch.equal(got, plain_chain(blocks, x)[0])


def test_nothing_needs_a_gradient() -> None:
    blocks = [block.requires_grad_(False) for block in residual()]
    x = leaf(B, D, grad=False)
    got = remat.chain(blocks, x, budget=1)
    assert not got.requires_grad
    assert torch.equal(got, plain_chain(blocks, x)[0])
    with pytest.raises(remat.StepError, match="nothing to plan"):
        remat.plan_chain(blocks, x, budget=1)
    assert remat.chain([], x) is x


def test_functional_transforms_take_the_plain_path() -> None:
    blocks, x = [nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1)], torch.randn(B, D)
    per_sample = torch.func.vmap(torch.func.grad(lambda row: remat.chain(blocks, row, budget=1).sum()))(x)
    expected = torch.func.vmap(torch.func.grad(lambda row: plain_chain(blocks, row)[0].sum()))(x)
    assert torch.equal(per_sample, expected)


@levels
def test_a_chain_in_every_block_of_a_chain(settings: dict[str, Any]) -> None:
    def run(chain: Callable[..., Tensor]) -> list[Any]:
        groups, x = [residual(3), residual(2), residual(3)], leaf(B, D)
        seed_everything(4)
        total = chain([lambda x, g=g: chain(g, x) for g in groups], x).square().sum()
        return list(torch.autograd.grad(total, [x, *(p for g in groups for b in g for p in b.parameters())]))

    expected = run(lambda blocks, x: plain_chain(blocks, x)[0])
    assert same(run(lambda blocks, x: remat.chain(blocks, x, **settings)), expected)


# ---- Sequential


def test_sequential_is_an_nn_sequential() -> None:
    named = OrderedDict(first=nn.Linear(D, D), act=nn.ReLU(), last=nn.Linear(D, 3))
    ours, theirs = remat.Sequential(named, budget="1GiB"), nn.Sequential(named)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [*map(id, ours.parameters())] == [*map(id, theirs.parameters())]
    x = leaf(B, D)
    assert torch.equal(ours(x), theirs(x))
    part = ours[1:]
    assert type(part) is remat.Sequential
    assert part.budget == "1GiB"
    assert list(part.state_dict()) == list(theirs[1:].state_dict())
    assert ours[0] is named["first"] is ours.first
    assert len(ours + nn.Sequential(nn.Tanh())) == 4
    assert len(ours * 2) == 6
    ours, theirs = (kind(*named.values()) for kind in (partial(remat.Sequential, budget="1GiB"), nn.Sequential))
    ours.append(nn.Linear(3, 3)).insert(0, nn.Identity())
    assert len(ours) == 5
    del ours[0]
    assert torch.equal(ours[:3](x), theirs(x))
    assert ours.plan(x).chain.length == 4
    copied = copy.deepcopy(ours)
    copied.load_state_dict(ours.state_dict())
    assert torch.equal(copied(x), ours(x))


def test_sequential_hands_on_exactly_what_the_module_before_returned() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * 2,)

    class Unpair(nn.Module):
        def forward(self, pair: tuple[Tensor]) -> dict[str, Tensor]:
            assert type(pair) is tuple
            return {"y": pair[0] + 1}

    assert set(remat.Sequential(Pair(), Unpair(), budget="1GiB")(leaf(B, D))) == {"y"}


@pytest.mark.parametrize("name", ["residual-blocks-with-dropout", "transformer"])
@pytest.mark.parametrize("planner", ["keep-all", "unequal"])
def test_planners_by_name(name: str, planner: str) -> None:
    make = STACKS[name]
    assert_same(observe(chained(budget="1GiB", planner=planner), make()), observe(plain_chain, make()))
