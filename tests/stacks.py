"""Layers as people stack them, each as a factory of a fresh `Program`: blocks, what goes in, what all of them share.

`STACKS` holds them by name. A program's step is the list of blocks, its carry x, its xs (shared, shared by name).
"""

from __future__ import annotations

import functools
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from plain import Loop, Program, seed_everything
from steps import leaf, parameters

STACKS: dict[str, Callable[[], Program]] = {}
B, D = 24, 20
State = namedtuple("State", "h seen")


def plain_chain(blocks: Any, x: Any, shared: Any = None, *, length: int | None = None) -> tuple[Any, None]:
    """What `remat.chain` promises to be."""
    del length
    arguments, named = shared or ((), {})
    for block in blocks:
        x = block(x, *arguments, **named)
    return x, None


def chained(**settings: Any) -> Loop:
    """`remat.chain` as a loop that `observe` takes."""

    def loop(blocks: Any, x: Any, shared: Any = None, *, length: int | None = None) -> tuple[Any, None]:
        del length
        arguments, named = shared or ((), {})
        return remat.chain(blocks, x, *arguments, **settings, **named), None

    return loop


def planned(program: Program, budget: int | str) -> remat.Plan:
    """The plan for a program."""
    arguments, named = program.xs or ((), {})
    with program.around():
        return remat.plan_chain(program.step, program.carry, *arguments, budget=budget, **named)


def budget_at(program: Program, share: float) -> int | str:
    """A budget by its share of the way from the smallest to that of keeping all."""
    if share == 1:
        return "1GiB"
    try:
        made = planned(program, 1)
    except remat.InfeasibleBudget as refusal:
        smallest = refusal.smallest_budget_bytes
    else:
        raise AssertionError(f"one byte was enough for {made}")
    return smallest + int(share * (planned(program, "1GiB").peak_bytes - smallest)) if share else smallest


def stack(factory: Callable[[], Program]) -> Callable[[], Program]:
    """Register a factory under its name; it is called after seeding."""

    def fresh() -> Program:
        seed_everything(1)
        return factory()

    STACKS[factory.__name__.replace("_", "-")] = fresh
    return fresh


def of(blocks: Any, x: Any, /, *others: nn.Module, xs: Any = None, **wrt: Tensor) -> Program:
    """A program of modules and functions: gradients of all parameters and of the tensors named."""
    modules = [block for block in dict.fromkeys([*blocks, *others]) if isinstance(block, nn.Module)]
    return Program(blocks, x, xs, wrt={**parameters(*modules), **wrt}, modules=modules)


class Residual(nn.Module):
    """Normalise, activate, transform, drop, add."""

    def __init__(self, width: int = D, drop: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.relu(self.inner(self.norm(x)))))


class Convolutions(nn.Module):
    """A pre-activation residual block with batch norm."""

    def __init__(self, entering: int, leaving: int, stride: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(entering), nn.BatchNorm2d(leaving)])
        self.first = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(entering, leaving, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](x))
        return self.second(torch.relu(self.norms[1](self.first(h)))) + self.short(h)


@stack
def multilayer_perceptron() -> Program:
    x = leaf(B, D)
    blocks = [
        nn.Linear(D, 33),
        nn.Tanh(),
        nn.Linear(33, 8),
        nn.ReLU(),
        nn.Linear(8, 50),
        nn.Sigmoid(),
        nn.Linear(50, 1),
    ]
    return of(nn.Sequential(*blocks), x, x=x)


@stack
def residual_blocks_with_dropout() -> Program:
    return of([Residual(drop=0.3) for _ in range(8)], leaf(B, D, grad=False))


@stack
def batch_norm_in_training() -> Program:
    x = leaf(B, D)
    return of([Residual(norm=nn.BatchNorm1d) for _ in range(7)], x, x=x)


@stack
def batch_norm_in_evaluation() -> Program:
    blocks = [Residual(norm=nn.BatchNorm1d).eval() for _ in range(5)]
    return of(blocks, leaf(B, D))


@stack
def convolutions_with_activations_in_place() -> Program:
    blocks = [
        *(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 9, 3, padding=1), nn.BatchNorm2d(9), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.LeakyReLU(inplace=True), nn.Linear(9, 5)),
    ]
    return of(nn.Sequential(*blocks), leaf(4, 2, 10, 10, grad=False))


@stack
def functions_and_lambdas() -> Program:
    w, x = leaf(D, D), leaf(B, D)

    def mixed(h: Tensor) -> Tensor:
        return torch.tanh(h @ w) + h

    blocks = [mixed, torch.sin, lambda h: h * w.sum(), functools.partial(torch.mul, other=2.0), mixed, F.gelu]
    return Program(blocks, x, wrt={"w": w, "x": x})


@stack
def carries_that_change_their_shape() -> Program:
    up, x = nn.Linear(D, 2 * D), leaf(B, D)
    blocks = [
        lambda x: (x, x.square()),
        lambda pair: {"sum": pair[0] + pair[1], "first": pair[0]},
        lambda parts: State(up(parts["sum"]), [parts["first"], 3]),
        lambda state: State(torch.tanh(state.h), [*state.seen, state.h.mean(0)]),
        lambda state: [state.h * state.seen[1], state.seen[0], state.seen[2].double()],
        lambda leaves: (leaves[0].sum(1), {"mean": leaves[2], "first": leaves[1]}, None, 7),
    ]
    return Program(blocks, x, wrt={"x": x, **parameters(up)})


@stack
def leaves_handed_on() -> Program:
    x, w = leaf(B, D), [leaf(D, D) for _ in range(5)]

    def layer(weight: Tensor) -> Callable[[Any], Any]:
        return lambda carry: (torch.tanh(carry[0] @ weight) * carry[1], carry[1], carry[2] + 1, carry[1])

    return Program([layer(v) for v in w], (x, x, 0, x), wrt={"x": x, **{f"w{k}": v for k, v in enumerate(w)}})


@stack
def shared_arguments() -> Program:
    context, scale, x = leaf(B, D), leaf(D), leaf(B, D)

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor, context: Tensor, mask: Tensor, *, scale: Tensor, power: int) -> Tensor:
            return x + torch.where(mask, self.linear(x * scale) * context, context) ** power * scale

    blocks = [Conditioned() for _ in range(6)]
    shared = (torch.tanh(context), torch.rand(B, D) > 0.5), {"scale": scale, "power": 2}
    return of(blocks, x, xs=shared, context=context, scale=scale, x=x)


@stack
def result_of_something_outside() -> Program:
    outside = nn.Linear(D, D)
    context = outside(torch.randn(B, D))
    inner = [nn.Linear(D, D) for _ in range(4)]

    def block(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(linear(x) + context)

    return Program([*map(block, inner)], torch.zeros(B, D), wrt=parameters(outside, *inner))


@stack
def weights_and_what_was_made_of_them() -> Program:
    """In attributes, around functions and as a shared argument, each used as it is too."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.transposed, self.normed = self.linear.weight.t(), self.linear.weight / self.linear.weight.norm()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) @ self.transposed) @ self.normed * scale

    blocks, x = [Twice() for _ in range(5)], leaf(B, D)
    around = blocks[2].linear.weight.exp()
    program = of([*blocks, lambda x, scale: x @ around * scale], x, xs=((blocks[1].linear.bias.exp(),), {}), x=x)
    program.wrt |= parameters(*blocks)
    return program


@stack
def changed_in_place_after_a_hook() -> Program:
    """Without autograd, blocks do not come so far; and they count, beside what they change."""

    def block(linear: nn.Linear) -> Callable[[Any], Any]:
        def run(carry: Any) -> Any:
            h, total, count = carry
            h = torch.tanh(linear(h))
            h.register_hook(lambda g: g * 0.5)
            return h, total.add_(h.detach()), count + 1

        return run

    linears = [nn.Linear(D, D) for _ in range(5)]
    return Program([*map(block, linears)], (torch.randn(B, D), torch.zeros(B, D), 0), wrt=parameters(*linears))


@stack
def tied_blocks() -> Program:
    one, other, x = Residual(), Residual(drop=0.2), leaf(B, D)
    return of([one, other, one, one, other], x, x=x)


@stack
def weights_tied_between_and_within_blocks() -> Program:
    linear, x = nn.Linear(D, D), leaf(B, D)
    last = nn.Linear(D, D)
    last.weight = linear.weight
    twice = nn.Sequential(linear, nn.Tanh(), linear)
    return of([twice, nn.Linear(D, D), last, nn.Sequential(nn.Tanh(), linear)], x, linear, x=x)


@stack
def frozen_front_and_adapters() -> Program:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(D, D).requires_grad_(False)
            self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.base(x) + self.up(self.down(x)))

    front = [nn.Linear(D, D).requires_grad_(False), nn.Dropout(0.2), nn.BatchNorm1d(D, affine=False)]
    middle = nn.Linear(D, D).requires_grad_(False)
    return of([*front, Adapted(), middle, Adapted(), nn.Tanh(), middle], leaf(B, D, grad=False))


@stack
def token_ids() -> Program:
    table = nn.Embedding(11, D)
    blocks = [table, *(Residual(drop=0.1) for _ in range(4)), lambda h: h @ table.weight.T]
    return of(blocks, torch.randint(11, (B,)))


@stack
def transformer() -> Program:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(4)]
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return of(layers, leaf(3, 5, 8), xs=((), {"src_mask": mask, "is_causal": True}))


@stack
def under_autocast() -> Program:
    made = of([Residual(drop=0.2) for _ in range(5)], leaf(B, D))
    made.around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    return made


@stack
def recurrent_layers() -> Program:
    layers = [nn.LSTM(D, D, batch_first=True) for _ in range(3)]
    return of([block for layer in layers for block in (layer, lambda result: result[0])], leaf(4, 6, D))


@stack
def noise_from_everywhere() -> Program:
    own, w = torch.Generator().manual_seed(5), leaf(D, D)

    def noisy(x: Tensor) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(B, D) + torch.rand(B, D, generator=own)
        return torch.tanh(x @ w + noise)

    return Program([noisy] * 5, torch.zeros(B, D), wrt={"w": w}, state=lambda: own.get_state())


@stack
def counters_and_lists() -> Program:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.means = nn.Linear(D, D), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.means.append(float(x.detach().mean()))
            return torch.tanh(self.linear(x)) * self.calls

    blocks = [Counting() for _ in range(3)] * 2
    made = of(blocks, leaf(B, D))
    made.state = lambda: [(block.calls, block.means) for block in blocks]
    return made


@stack
def integers_between_blocks() -> Program:
    tables = [nn.Embedding(7, D) for _ in range(3)]

    def block(table: nn.Embedding) -> Callable[[Any], Any]:
        return lambda carry: (carry[0] + table(carry[1]), (carry[0] + table(carry[1]))[:, :7].argmax(-1))

    return Program([*map(block, tables)], (torch.randn(B, D), torch.randint(7, (B,))), wrt=parameters(*tables))


@stack
def gradients_end_in_the_middle() -> Program:
    blocks = [nn.Linear(D, D), torch.Tensor.detach, nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)]
    x = leaf(B, D)
    return of(blocks, x, x=x)


@stack
def one_block() -> Program:
    x = leaf(B, D)
    return of([Residual(drop=0.5)], x, x=x)
