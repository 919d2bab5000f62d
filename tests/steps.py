"""Steps as people write them, each as a factory of a fresh `Program`.

`PROGRAMS` holds them by name; a new one needs nothing but the decorator. Sizes are odd on purpose, and
just large enough that carries outweigh the state of a random stream, so that a small budget means recomputation.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from plain import Program, seed_everything

STEPS = 13
B, D, H = 12, 20, 24  # batch, input, hidden

Factory = Callable[[int], Program]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(factory: Factory) -> Factory:
    """Register a factory under its name; it is called with the number of steps, after seeding."""

    def fresh(steps: int = STEPS) -> Program:
        seed_everything(1)
        return factory(steps)

    PROGRAMS[factory.__name__.replace("_", "-")] = fresh
    return fresh


def leaf(*shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, dtype=dtype) * scale).requires_grad_(grad)


def parameters(*modules: nn.Module) -> dict[str, Tensor]:
    return {f"{k}.{name}": p for k, module in enumerate(modules) for name, p in module.named_parameters()}


# ---- recurrent cells


@program
def elman(steps: int) -> Program:
    w, u, h, xs = leaf(H, H), leaf(D, H), leaf(B, H), leaf(steps, B, D)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x @ u)
        return h, h

    return Program(step, h, xs, wrt={"w": w, "u": u, "h": h, "xs": xs})


@program
def elman_as_a_lambda(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)
    return Program(lambda h, x: ((z := torch.tanh(h @ w + x)), z), torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def gru_cell(steps: int) -> Program:
    cell, h, xs = nn.GRUCell(D, H), leaf(B, H), leaf(steps, B, D)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    return Program(step, h, xs, wrt={**parameters(cell), "h": h, "xs": xs}, modules=[cell])


@program
def lstm_cell(steps: int) -> Program:
    cell, head, xs = nn.LSTMCell(D, H), nn.Linear(H, 2), leaf(steps, B, D, grad=False)

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        state = cell(x, state)
        return state, head(state[0])

    return Program(step, (torch.zeros(B, H), torch.zeros(B, H)), xs, wrt=parameters(cell, head))


class Stacked(nn.Module):
    """Two cells with dropout between them; the step is a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(D, H), nn.GRUCell(H, H)])
        self.drop = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(H)

    def forward(self, carry: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        new = []
        for cell, h in zip(self.cells, carry, strict=True):
            x = cell(x, h)
            new.append(x)
            x = self.drop(x)
        return new, self.norm(x)


@program
def stacked_cells_with_dropout(steps: int) -> Program:
    net, xs = Stacked(), leaf(steps, B, D)
    return Program(net, [torch.zeros(B, H), torch.zeros(B, H)], xs, wrt={**parameters(net), "xs": xs}, modules=[net])


@program
def bound_method(steps: int) -> Program:
    net, h = Stacked(), [leaf(B, H), leaf(B, H)]
    return Program(
        net.forward, h, leaf(steps, B, D, grad=False), wrt={**parameters(net), "h0": h[0], "h1": h[1]}, modules=[net]
    )


@program
def fused_lstm_over_chunks(steps: int) -> Program:
    lstm, xs = nn.LSTM(D, H, num_layers=2), leaf(steps, 3, B, D)

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        y, state = lstm(x, state)
        return state, y

    start = (torch.zeros(2, B, H), torch.zeros(2, B, H))
    return Program(step, start, xs, wrt={**parameters(lstm), "xs": xs})


@program
def convolutional_lstm(steps: int) -> Program:
    conv, xs = nn.Conv2d(2 + 3, 4 * 3, 3, padding=1), leaf(steps, 2, 2, 5, 5)

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        i, f, o, g = conv(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), h.mean((2, 3))

    start = (torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 5, 5))
    return Program(step, start, xs, wrt={**parameters(conv), "xs": xs})


@program
def scalar_recurrence(steps: int) -> Program:
    a, xs = torch.tensor(0.9, requires_grad=True), leaf(steps)

    def step(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c = a * c + x
        return c, c

    return Program(step, torch.zeros(()), xs, wrt={"a": a, "xs": xs})


@program
def complex_diagonal(steps: int) -> Program:
    decay = torch.randn(H, dtype=torch.complex64).mul(0.3).requires_grad_()
    b, xs = leaf(D, H), leaf(steps, B, D)

    def step(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        s = s * decay + (x @ b).to(torch.complex64)
        return s, s.real

    return Program(step, torch.zeros(B, H, dtype=torch.complex64), xs, wrt={"decay": decay, "b": b, "xs": xs})


@program
def double_precision(steps: int) -> Program:
    w, h = leaf(H, H, dtype=torch.float64), leaf(B, H, dtype=torch.float64)
    return Program(
        lambda h, x: ((z := torch.sin(h @ w + x)), z), h, torch.randn(steps, B, H).double(), wrt={"w": w, "h": h}
    )


@program
def bfloat16_state_and_float32_sum(steps: int) -> Program:
    w, h, total = leaf(H, H, dtype=torch.bfloat16), leaf(B, H, dtype=torch.bfloat16), torch.zeros(B)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, total = carry
        h = torch.tanh(h @ w + x)
        total = total + h.float().sum(1)
        return (h, total), total

    return Program(step, (h, total), torch.randn(steps, B, H).bfloat16(), wrt={"w": w, "h": h})


# ---- other loops than recurrent cells


@program
def runge_kutta(steps: int) -> Program:
    net, z = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), leaf(B, 2)
    dt = torch.linspace(0.05, 0.2, steps)

    def step(z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        k1 = net(z)
        k2 = net(z + h / 2 * k1)
        k3 = net(z + h / 2 * k2)
        k4 = net(z + h * k3)
        z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return z, z

    return Program(step, z, dt, wrt={**parameters(net), "z": z})


@program
def loss_in_the_carry(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        h, loss = carry
        h = torch.tanh(h @ w + x)
        return (h, loss + F.mse_loss(h, x)), None

    return Program(step, (torch.zeros(B, H), torch.zeros(())), xs, wrt={"w": w, "xs": xs})


@program
def tied_embedding(steps: int) -> Program:
    table, cell = nn.Embedding(7, H), nn.GRUCell(H, H)
    out = nn.Linear(H, 7, bias=False)
    out.weight = table.weight
    xs = torch.randint(7, (steps, B))

    def step(h: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(table(token), h)
        return h, out(h)

    return Program(step, torch.zeros(B, H), xs, wrt=parameters(table, cell))


@program
def greedy_decoding_feeds_back_integers(steps: int) -> Program:
    table, cell, out = nn.Embedding(7, D), nn.GRUCell(D, H), nn.Linear(H, 7)

    def step(carry: tuple[Tensor, Tensor], _x: None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        h, token = carry
        h = cell(table(token), h)
        scores = out(h)
        token = scores.argmax(-1)
        return (h, token), (scores, token)

    start = (torch.zeros(B, H), torch.zeros(B, dtype=torch.long))
    return Program(step, start, length=steps, wrt=parameters(table, cell, out))


@program
def attention_over_a_window(steps: int) -> Program:
    q, xs = nn.Linear(H, H), leaf(steps, B, H)

    def step(carry: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        window = torch.cat([carry["window"][:, 1:], x[:, None]], 1)
        h = F.scaled_dot_product_attention(q(carry["h"])[:, None], window, window)[:, 0]
        return {"window": window, "h": h}, h

    return Program(step, {"window": torch.zeros(B, 4, H), "h": leaf(B, H)}, xs, wrt={**parameters(q), "xs": xs})


@program
def key_value_cache_of_fixed_size(steps: int) -> Program:
    kv, xs = nn.Linear(H, 2 * H), leaf(steps, B, H)

    def step(carry: tuple[Tensor, Tensor, int], x: Tensor) -> tuple[tuple[Tensor, Tensor, int], Tensor]:
        keys, values, t = carry
        k, v = kv(x).chunk(2, -1)
        at = torch.tensor([t % keys.shape[1]])
        keys, values = keys.index_copy(1, at, k[:, None]), values.index_copy(1, at, v[:, None])
        y = torch.einsum("bs,bsh->bh", torch.softmax(torch.einsum("bh,bsh->bs", x, keys), -1), values)
        return (keys, values, t + 1), y

    return Program(step, (torch.zeros(B, 6, H), torch.zeros(B, 6, H), 0), xs, wrt={**parameters(kv), "xs": xs})


@program
def memory_with_addressing(steps: int) -> Program:
    controller = nn.Linear(D + 3, 2 * 3 + 4 + 1)
    xs = leaf(steps, B, D)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        memory, read = carry
        key, erase, scores, gate = controller(torch.cat([x, read], -1)).split([3, 3, 4, 1], -1)
        where = torch.softmax(scores + gate * F.cosine_similarity(memory, key[:, None], -1), -1)
        memory = memory * (1 - where[..., None] * erase.sigmoid()[:, None]) + where[..., None] * key[:, None]
        read = torch.einsum("bn,bnk->bk", where, memory)
        return (memory, read), read

    return Program(step, (leaf(B, 4, 3, grad=False), torch.zeros(B, 3)), xs, wrt={**parameters(controller), "xs": xs})


class Spike(torch.autograd.Function):
    """A step function with a surrogate gradient, as spiking networks have."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


@program
def spiking(steps: int) -> Program:
    w, beta, xs = leaf(D, H), torch.tensor(0.8, requires_grad=True), leaf(steps, B, D)

    def step(v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        v = beta * v + x @ w
        spikes = Spike.apply(v - 1)
        return v - spikes.detach(), spikes

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "beta": beta, "xs": xs})


@program
def transformer_block(steps: int) -> Program:
    block, xs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), leaf(steps, 2, 3, 8)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = block(h + x)
        return h, h[:, 0]

    return Program(step, torch.zeros(2, 3, 8), xs, wrt={**parameters(block), "xs": xs})


@program
def fourier_and_sorting(steps: int) -> Program:
    w, h = leaf(H), leaf(B, H)

    def step(h: Tensor, _x: None) -> tuple[Tensor, Tensor]:
        h = torch.fft.irfft(torch.fft.rfft(h) * w[: H // 2 + 1], n=H).sort(-1).values.cumsum(-1).tanh()
        return h, h.flip(-1)

    return Program(step, h, length=steps, wrt={"w": w, "h": h})


@program
def map_without_carry(steps: int) -> Program:
    net, xs = nn.Linear(D, H), leaf(steps, B, D)
    return Program(lambda carry, x: (carry, net(x).relu()), None, xs, wrt={**parameters(net), "xs": xs})


@program
def nested_gradient_transform(steps: int) -> Program:
    w, z = leaf(3, 3), leaf(3)

    def energy(z: Tensor) -> Tensor:
        return torch.tanh(w @ z).square().sum()

    def step(z: Tensor, _x: None) -> tuple[Tensor, Tensor]:
        z = z - 0.1 * torch.func.grad(energy)(z)
        return z, z

    return Program(step, z, length=steps, wrt={"w": w, "z": z})


# ---- how a step reaches its tensors

_GLOBAL = nn.Linear(H, H)
_GLOBAL_WEIGHT = torch.eye(H).mul(0.7).requires_grad_()


@program
def globals_of_a_module(steps: int) -> Program:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(_GLOBAL(h) + x @ _GLOBAL_WEIGHT)
        return h, h

    return Program(
        step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt={**parameters(_GLOBAL), "w": _GLOBAL_WEIGHT}
    )


@program
def default_and_keyword_arguments(steps: int) -> Program:
    w, u, v, xs = leaf(H, H), leaf(H, H), leaf(H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor, w: Tensor = w, *, u: Tensor = u, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x @ u + v)
        return h, h

    step = functools.partial(step, v=v)
    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "u": u, "v": v, "xs": xs})


@program
def positional_partial(steps: int) -> Program:
    cell, xs = nn.GRUCell(D, H), leaf(steps, B, D)

    def step(cell: nn.Module, scale: float, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x * scale, h)
        return h, h

    return Program(functools.partial(step, cell, 0.5), torch.zeros(B, H), xs, wrt={**parameters(cell), "xs": xs})


class Holder:
    """An object with weights in attributes, slots and containers, and a helper behind a property."""

    __slots__ = ("bag", "w")

    def __init__(self) -> None:
        self.w = leaf(H, H)
        self.bag = {"v": [leaf(H), (leaf(H),)]}

    @property
    def shift(self) -> Tensor:
        return self.bag["v"][0] + self.bag["v"][1][0]

    def __call__(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ self.w + x + self.shift)
        return h, h


@program
def callable_object(steps: int) -> Program:
    step = Holder()
    first, (second,) = step.bag["v"]
    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt={"w": step.w, "v0": first, "v1": second})


@program
def nested_functions(steps: int) -> Program:
    w, v = leaf(H, H), leaf(H)

    def outer() -> Callable[[Tensor], Tensor]:
        def inner(h: Tensor) -> Tensor:
            def innermost() -> Tensor:
                return h @ w

            return innermost() + v

        return inner

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(outer()(h) + x)
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt={"w": w, "v": v})


@program
def effective_weight_made_once(steps: int) -> Program:
    raw, scale, xs = leaf(H, H), leaf(H), leaf(steps, B, H, grad=False)
    w = raw / raw.norm(dim=1, keepdim=True) * scale[:, None]

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    return Program(step, torch.zeros(B, H) @ w, xs, wrt={"raw": raw, "scale": scale})


@program
def encoder_context(steps: int) -> Program:
    encoder, w = nn.Linear(D, H), leaf(H, H)
    context = encoder(torch.randn(B, D))
    memory = torch.stack([context, 2 * context], 1)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(torch.einsum("bh,bsh->bs", h, memory), -1)
        h = torch.tanh(h @ w + x + torch.einsum("bs,bsh->bh", weights, memory))
        return h, h

    return Program(step, context, leaf(steps, B, H, grad=False), wrt={**parameters(encoder), "w": w})


@program
def view_of_a_parameter_captured(steps: int) -> Program:
    packed = leaf(H, 2 * H)
    w, u = packed[:, :H], packed[:, H:].t()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x @ u)
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt={"packed": packed})


@program
def weights_and_what_was_made_of_them(steps: int) -> Program:
    """Each used as it is too, so that gradients come in by both ways."""
    w, loss_of_yesterday, xs = leaf(H, H), leaf(H, H), leaf(steps, B, H)
    made = {"transposed": w.t(), "normed": w / w.norm(), "unused": loss_of_yesterday.square().sum()}

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ made["transposed"] + x @ made["normed"] + loss_of_yesterday.mean())
        return h, h @ w

    return Program(step, leaf(B, H), xs, wrt={"w": w, "other": loss_of_yesterday, "xs": xs})


@program
def weights_and_what_was_made_of_them_under_autocast(steps: int) -> Program:
    """Autocast keeps one copy of a weight, and none of what was made of it."""
    w, xs = leaf(H, H), leaf(steps, B, H, grad=False)
    turned = w.t()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x @ turned).float()
        return h, h

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w}, around=in_bfloat16)


@program
def weights_cached_for_all_steps(steps: int) -> Program:
    layer, xs = parametrizations.weight_norm(nn.Linear(H, H)), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(layer(h) + x)
        return h, h * 2

    return Program(step, leaf(B, H), xs, wrt={"xs": xs, **parameters(layer)}, around=parametrize.cached)


@program
def parameter_containers(steps: int) -> Program:
    weights = nn.ParameterList([leaf(H, H), leaf(H, H)])
    named = nn.ParameterDict({"b": nn.Parameter(torch.randn(H))})

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for w in weights:
            h = torch.tanh(h @ w + named["b"] + x)
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt=parameters(weights, named))


@program
def frozen_and_unused_parameters(steps: int) -> Program:
    used, frozen, unused = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)
    frozen.requires_grad_(False)
    used.bias.requires_grad_(False)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(used(frozen(h)) + x)
        if h.shape[0] == 0:
            h = unused(h)
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt=parameters(used, frozen, unused))


@program
def nothing_trainable(steps: int) -> Program:
    w = leaf(H, H, grad=False)
    return Program(lambda h, x: ((z := torch.tanh(h @ w + x)), z), torch.zeros(B, H), torch.randn(steps, B, H))


@program
def parametrized_weight(steps: int) -> Program:
    lin = nn.utils.parametrizations.weight_norm(nn.Linear(H, H))

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(lin(h) + x)
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt=parameters(lin))


@program
def initial_carry_is_a_parameter_used_inside_too(steps: int) -> Program:
    w, start = leaf(H, H), leaf(B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x + start)
        return h, h

    return Program(step, start, leaf(steps, B, H, grad=False), wrt={"w": w, "start": start})


@program
def weights_as_outputs(steps: int) -> Program:
    w, v = leaf(H, H), leaf(H, H)

    def step(c: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], tuple[Tensor, ...]]:
        h, t = c
        h = torch.tanh(h @ w + x @ v)
        return (h, t + 1), (w, h, v if t % 3 else w, w)

    return Program(step, (torch.zeros(B, H), 0), leaf(steps, B, H, grad=False), wrt={"w": w, "v": v})


@program
def weights_in_the_carry(steps: int) -> Program:
    """A learned start to which the state falls back now and then, and a weight that is handed on."""
    w, start = leaf(H, H), leaf(B, H)

    def step(c: tuple[Tensor, Tensor, int], x: Tensor) -> tuple[tuple[Tensor, Tensor, int], Tensor]:
        h, u, t = c
        h = torch.tanh(h @ u + start * x)
        return (start if t % 5 == 2 else h, w if t > 3 else u, t + 1), h

    return Program(step, (start, w, 0), leaf(steps, B, H, grad=False), wrt={"w": w, "start": start})


@program
def inputs_closed_over_too(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(c: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = c
        h = torch.tanh(h @ w + x * xs[(t + 3) % steps] + xs.mean(0))
        return (h, t + 1), h * x

    return Program(step, (torch.zeros(B, H), 0), xs, wrt={"w": w, "xs": xs})


# ---- state outside the carry


@program
def batch_norm(steps: int) -> Program:
    lin, norm, xs = nn.Linear(D + H, H), nn.BatchNorm1d(H), leaf(steps, B, D)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(norm(lin(torch.cat([x, h], -1))))
        return h, h

    return Program(step, torch.zeros(B, H), xs, wrt={**parameters(lin, norm), "xs": xs}, modules=[lin, norm])


@program
def spectral_norm(steps: int) -> Program:
    lin = nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(lin(h) + x)
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, H, grad=False), wrt=parameters(lin), modules=[lin])


# ---- randomness


@program
def dropout(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)
    return Program(
        lambda h, x: ((z := F.dropout(torch.tanh(h @ w + x), 0.5)), z), torch.zeros(B, H), xs, wrt={"w": w, "xs": xs}
    )


@program
def dropout_now_and_then(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        h = torch.tanh(h @ w + x)
        if t % 3 == 2:
            h = F.dropout(h, 0.5)
        return (h, t + 1), h

    return Program(step, (torch.zeros(B, H), 0), xs, wrt={"w": w, "xs": xs})


@program
def noise_from_everywhere(steps: int) -> Program:
    w, own = leaf(H, H), torch.Generator().manual_seed(5)
    mine, numbers = random.Random(3), np.random.default_rng(4)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = random.random() + mine.gauss(0, 1) + np.random.rand() + numbers.standard_normal()
        h = torch.tanh(h @ w + x + noise + torch.randn(H, generator=own) + torch.rand(H))
        return h, h

    return Program(
        step,
        torch.zeros(B, H),
        leaf(steps, B, H, grad=False),
        wrt={"w": w},
        state=lambda: (own.get_state(), mine.getstate(), repr(numbers.bit_generator.state)),
    )


@program
def sampling_with_teacher_forcing(steps: int) -> Program:
    table, cell, out = nn.Embedding(5, D), nn.GRUCell(D, H), nn.Linear(H, 5)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, token = carry
        h = cell(table(token if random.random() < 0.5 else x), h)
        scores = out(h)
        return (h, torch.multinomial(scores.softmax(-1), 1)[:, 0]), scores.log_softmax(-1)

    xs = torch.randint(5, (steps, B))
    return Program(step, (torch.zeros(B, H), torch.zeros(B, dtype=torch.long)), xs, wrt=parameters(table, cell, out))


# ---- pytrees

State = namedtuple("State", "h c")


@program
def named_tuple_and_dict(steps: int) -> Program:
    w, xs, h = leaf(H, H), leaf(steps, B, H), leaf(B, H)

    def step(s: State, x: dict[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        s = State(torch.tanh(s.h @ w + x["a"]), s.c + 1)
        return s, {"y": s.h, "c": s.c}

    return Program(step, State(h, torch.zeros(())), {"a": xs}, wrt={"w": w, "xs": xs, "h": h})


@dataclass(frozen=True)
class Particle:
    position: Tensor
    momentum: Tensor
    mass: float
    label: str | None = None


@program
def frozen_dataclass(steps: int) -> Program:
    k, q, p = torch.tensor(0.4, requires_grad=True), leaf(B), leaf(B)

    def step(s: Particle, _x: None) -> tuple[Particle, dict[str, Any]]:
        momentum = s.momentum - 0.1 * k * s.position.sin()
        position = s.position + 0.1 * momentum / s.mass
        return Particle(position, momentum, s.mass, s.label), {"energy": (momentum**2).sum() - k * position.cos().sum()}

    return Program(step, Particle(q, p, 2.0, "pendulum"), length=steps, wrt={"k": k, "q": q, "p": p})


@program
def plain_values_among_the_leaves(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(carry: dict[str, Any], x: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        h = torch.tanh(carry["h"] @ w + x["x"]) * carry["scale"]
        if carry["flip"]:
            h = -h
        new = {"h": h, "t": carry["t"] + 1, "flip": not carry["flip"], "scale": carry["scale"] * 0.99, "none": None}
        return new, (h, carry["t"], carry["flip"], None, x["name"])

    start = {"h": torch.zeros(B, H), "t": 0, "flip": False, "scale": 1.5, "none": None}
    return Program(step, start, {"x": xs, "name": "a", "n": None}, wrt={"w": w, "xs": xs})


@program
def ordered_dict_of_lists(steps: int) -> Program:
    w, h = leaf(H, H), leaf(B, H)

    def step(c: OrderedDict[str, Any], x: tuple[Any, list[Any]]) -> tuple[OrderedDict[str, Any], list[Tensor]]:
        h = torch.tanh(c["layers"][0] @ w + x[0] + x[1][0])
        g = torch.tanh(c["layers"][1] @ w + h)
        return OrderedDict(layers=[h, g], count=c["count"] + 1), [g, h]

    start = OrderedDict(layers=[h, torch.zeros(B, H)], count=torch.zeros((), dtype=torch.int32))
    xs = (leaf(steps, B, H, grad=False), [leaf(steps, H, grad=False)])  # a list on top would be one entry a step
    return Program(step, start, xs, wrt={"w": w, "h": h})


@program
def integer_and_boolean_tensors(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(carry: tuple[Tensor, ...], x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        h, count, alive = carry
        h = torch.where(alive[:, None], torch.tanh(h @ w + x), h)
        alive = alive & (h.sum(-1) < 3)
        count = count + alive.long()
        return (h, count, alive), (h, count, alive)

    start = (torch.zeros(B, H), torch.zeros(B, dtype=torch.long), torch.ones(B, dtype=torch.bool))
    return Program(step, start, xs, wrt={"w": w, "xs": xs})


@program
def same_tensor_twice_in_the_carry(steps: int) -> Program:
    w, h = leaf(H, H), leaf(B, H)

    def step(c: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        z = torch.tanh(c[0] @ w + c[1] * x)
        return (z, z), z.sum(-1)

    return Program(step, (h, h), leaf(steps, B, H, grad=False), wrt={"w": w, "h": h})


@program
def same_tensor_twice_at_first_only(steps: int) -> Program:
    w, h = leaf(H, H), leaf(B, H)

    def step(c: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        a = torch.tanh(c[0] @ w + x)
        return (a, c[1] * 0.9 + a), a

    return Program(step, (h, h), leaf(steps, B, H, grad=False), wrt={"w": w, "h": h})


@program
def a_carry_asked_whether_it_needs_a_gradient(steps: int) -> Program:
    """At first it does not; later it does, though none flows into it."""
    w = leaf(D, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ w + h.detach() * (2.0 if h.requires_grad else 1.0))
        return h, h

    return Program(step, torch.zeros(B, H), leaf(steps, B, D, grad=False), wrt={"w": w})


@program
def statistics_of_what_depends_on_who_needs_a_gradient(steps: int) -> Program:
    """The results do not."""
    w, norm, xs = leaf(D, H), nn.BatchNorm1d(D), leaf(steps, B, D)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        norm(x.detach() * (2.0 if x.requires_grad else 1.0))
        h = torch.tanh(x @ w + h)
        return h, h

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs}, modules=[norm])


@program
def carries_that_swap_places(steps: int) -> Program:
    w, h, g = leaf(H, H), leaf(B, H), leaf(B, H, grad=False)
    return Program(
        lambda c, x: ((c[1], torch.tanh(c[0] @ w + x)), c[0]),
        (h, g),
        leaf(steps, B, H, grad=False),
        wrt={"w": w, "h": h},
    )


@program
def input_becomes_the_carry(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)
    return Program(lambda h, x: (x, torch.tanh(h @ w)), leaf(B, H), xs, wrt={"w": w, "xs": xs})


@program
def outputs_without_gradient(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        h = torch.tanh(h @ w + x)
        return h, (h.detach(), h.argmax(-1), h.mean(-1), torch.ones(2))

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def no_outputs(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)
    return Program(lambda h, x: (torch.tanh(h @ w + x), None), torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def empty_containers_and_tensors(steps: int) -> Program:
    w = leaf(H, H)
    return Program(
        lambda c, x: ((torch.tanh(c[0] @ w + x), (), {}, c[3].clone()), ((), {"z": c[3]}, c[0].sum())),
        (torch.zeros(B, H), (), {}, torch.zeros(0, 3)),
        leaf(steps, B, H, grad=False),
        wrt={"w": w},
    )


# ---- views and in-place changes


@program
def results_changed_in_place(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (h @ w + x).tanh_()
        y = h.clone().mul_(2)
        y[:, 0] = 0.3
        h = h * 3
        return h.add_(x[0, 0]), y

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def carry_is_a_view(steps: int) -> Program:
    w = leaf(H, 2 * H)
    start = leaf(2, B, H)
    carry = (start[0], start[1].t())

    def step(c: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        both = torch.tanh(c[0] @ w + x.repeat(1, 2) + c[1].t().sum())
        return (both[:, :H], both[:, H:].t()), both

    return Program(step, carry, leaf(steps, B, H, grad=False), wrt={"w": w, "start": start})


@program
def expanded_initial_carry(steps: int) -> Program:
    w, start = leaf(H, H), leaf(1, H)
    return Program(
        lambda h, x: ((z := torch.tanh(h @ w + x)), z.expand(2, B, H)),
        start.expand(B, H),
        leaf(steps, B, H, grad=False),
        wrt={"w": w, "start": start},
    )


@program
def inputs_that_are_views(steps: int) -> Program:
    w, base = leaf(H, H), leaf(B, H, steps)

    def step(h: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x[0] + x[1])
        return h, h

    xs = (base.permute(2, 0, 1), torch.randn(H).expand(steps, B, H))
    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "base": base})


@program
def layouts_of_the_carry(steps: int) -> Program:
    conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
    start = torch.randn(2, 2, 4, 4).to(memory_format=torch.channels_last).requires_grad_()

    def step(h: Tensor, _x: None) -> tuple[Tensor, Tensor]:
        h = torch.tanh(conv(h))
        return h, h

    return Program(step, start, length=steps, wrt={**parameters(conv), "start": start})


# ---- where gradients stop


@program
def carry_partly_without_gradient(steps: int) -> Program:
    w, h = leaf(H, H), leaf(B, H)

    def step(c: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        a = torch.tanh(c[0] @ w + x)
        return (a, c[1] * 0.9 + x), a + c[1]

    return Program(step, (h, torch.zeros(B, H)), leaf(steps, B, H, grad=False), wrt={"w": w, "h": h})


@program
def truncated_every_fourth_step(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(c: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = c
        if t % 4 == 3:
            h = h.detach()
        h = torch.tanh(h @ w + x)
        return (h, t + 1), h

    return Program(step, (leaf(B, H), 0), xs, wrt={"w": w, "xs": xs})


@program
def always_detached(steps: int) -> Program:
    w, h, xs = leaf(H, H), leaf(B, H), leaf(steps, B, H)
    return Program(lambda h, x: ((z := torch.tanh(h.detach() @ w + x)), z), h, xs, wrt={"w": w, "h": h, "xs": xs})


@program
def parts_without_gradient(steps: int) -> Program:
    w, target, xs = leaf(H, H), leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            goal = torch.tanh(h @ target)
        h = torch.tanh(h @ w + x)
        return h, (h - goal).square().mean()

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "target": target, "xs": xs})


@program
def looks_at_the_gradient_mode(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = h @ w + x
        h = torch.tanh(z) if torch.is_grad_enabled() and z.requires_grad else torch.sin(z)
        return h, h

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def data_dependent_branches(steps: int) -> Program:
    w, v, xs = leaf(H, H), leaf(H, H), leaf(steps, B, H).detach().round().requires_grad_()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ (w if bool((h.sum() + x.sum()) > 0) else v))
        for _ in range(int(h.abs().sum().item()) % 3):
            h = torch.sin(h) + x
        return h, h

    return Program(step, torch.ones(B, H), xs, wrt={"w": w, "v": v, "xs": xs})


@program
def weights_used_at_some_steps_only(steps: int) -> Program:
    weights = [leaf(H, H) for _ in range(3)]

    def step(c: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = c
        h = torch.tanh(h @ weights[t % 3 if t < 5 else 0] + x)
        return (h, t + 1), h

    return Program(
        step,
        (torch.zeros(B, H), 0),
        leaf(steps, B, H, grad=False),
        wrt={f"w{k}": w for k, w in enumerate(weights)},
    )


@program
def gradients_clipped_on_the_way(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.5, 0.5))
        return h, h * 2

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def gradients_clipped_without_asking(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        h.register_hook(lambda g: g.clamp(-0.5, 0.5))  # refused by tensors that need no gradient
        return h, h * 2

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def carry_changed_in_place_after_a_hook(steps: int) -> Program:
    """What is changed shows only with autograd: without it, the step does not come so far."""
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, total = carry
        h = torch.tanh(h @ w + x)
        h.register_hook(lambda g: g * 0.5)
        return (h, total.add_(h.detach())), h * 2

    return Program(step, (torch.zeros(B, H), torch.zeros(B, H)), xs, wrt={"w": w, "xs": xs})


@program
def gradients_clipped_on_entry(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.5, 0.5))
        h = torch.tanh(h @ w + x)
        return h, h

    return Program(step, torch.zeros(B, H), xs, wrt={"w": w, "xs": xs})


@program
def gradients_from_the_sixth_step_on(steps: int) -> Program:
    """Neither the carry nor the outputs need one before, and the step looks at it."""
    w, v = leaf(H, H), leaf(H, grad=False)

    def step(c: tuple[Tensor, Tensor, int], x: Tensor) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
        h, late, t = c
        h = h.sin() + x * v
        if t >= 5:
            h = torch.tanh(h @ w)
        late = late * 0.9 + (h if t % 4 == 3 else h.detach())
        seen = torch.full((2,), float(h.requires_grad) + 2 * float(late.requires_grad))
        return (h, late, t + 1), (h, late[:, :3], seen)

    return Program(step, (torch.zeros(B, H), torch.zeros(B, H), 0), leaf(steps, B, H, grad=False), wrt={"w": w})


@program
def gradients_until_the_third_step(steps: int) -> Program:
    """Nothing needs one at the end."""
    w = leaf(H, H)

    def step(c: tuple[Tensor, int], x: Tensor) -> tuple[Any, Tensor]:
        h, t = c
        h = torch.tanh(h @ w + x) if t < 3 else x.sin()
        return (h, t + 1), h.mean(-1)

    return Program(step, (torch.zeros(B, H), 0), leaf(steps, B, H, grad=False), wrt={"w": w})


@program
def gradients_that_move_along_the_carry(steps: int) -> Program:
    """A delay line: what needs one comes out at its end after as many steps as it is long, or never."""
    w, h = leaf(H, H), leaf(B, H)

    def step(c: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [torch.tanh(x @ w), *c[:-1]], c[-1] * 2

    start = [torch.zeros(B, H), torch.zeros(B, H), h, torch.zeros(B, H)]
    return Program(step, start, leaf(steps, B, H, grad=False), wrt={"w": w, "h": h})


@program
def the_same_tensor_twice_of_which_one_stays(steps: int) -> Program:
    w, start = leaf(H, H), torch.zeros(B, H)
    return Program(
        lambda c, x: ((torch.tanh(c[0] @ w + x), c[1]), c[0] + c[1]),
        (start, start),
        leaf(steps, B, H, grad=False),
        wrt={"w": w},
    )


@program
def inputs_that_become_the_carry_now_and_then(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(c: tuple[Tensor, Tensor, int], x: Tensor) -> tuple[Any, Tensor]:
        h, kept, t = c
        h = torch.tanh(h @ w + kept)
        return (h, x if t % 5 == 3 else x.detach(), t + 1), kept * 2

    return Program(step, (torch.zeros(B, H), torch.zeros(B, H), 0), xs, wrt={"w": w, "xs": xs})


@program
def a_gradient_that_goes_round(steps: int) -> Program:
    h = leaf(B, H)

    def step(c: list[Tensor], _x: None) -> tuple[list[Tensor], Tensor]:
        return [c[-1].sin(), *c[:-1]], c[0] * 2

    return Program(step, [h, torch.zeros(B, H), torch.zeros(B, H)], length=steps, wrt={"h": h})


# ---- surroundings


@program
def autocast_inside_with_a_disabled_part(steps: int) -> Program:
    lin, xs = nn.Linear(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            z = lin(h)
            with torch.autocast("cpu", enabled=False):
                z = z.float() @ lin.weight
            z = z + lin(x)
        h = torch.tanh(z.float())
        return h, h

    return Program(step, torch.zeros(B, H), xs, wrt={**parameters(lin), "xs": xs})


def in_bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@program
def autocast_around(steps: int) -> Program:
    """Weights used as autocast casts them, as they are, and both; an input and the start several times in a step."""
    lin, w, conv, start = nn.Linear(H, H), leaf(H, H), nn.Conv1d(1, 1, 3, padding=1), leaf(B, H)
    xs = leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = conv(lin(h)[:, None])[:, 0] + lin(x) + h @ w + x @ w
        with torch.autocast("cpu", enabled=False):
            z = z.float() + lin.weight[0] + x @ w.bfloat16().float()
        h = torch.tanh(lin(torch.tanh(z)).float() * w.sum())
        return h, h

    wrt = {"w": w, "start": start, "xs": xs, **parameters(lin, conv)}
    return Program(step, start, xs, wrt=wrt, around=in_bfloat16)


@program
def checkpoint_inside(steps: int) -> Program:
    net, xs = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Dropout(0.2), nn.Linear(H, H)), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.utils.checkpoint.checkpoint(net, h + x, use_reentrant=False)
        return h.tanh(), h

    return Program(step, torch.zeros(B, H), xs, wrt={**parameters(net), "xs": xs})


# ---- hard ones


class Averaging(nn.Module):
    """Keeps a running mean in a buffer that is replaced, not changed in place, and counts in another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H))
        self.register_buffer("mean", torch.zeros(H))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ self.weight + x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.count += 1
        return h, h / self.count.clone()


@program
def buffers_that_are_replaced(steps: int) -> Program:
    net, xs = Averaging(), leaf(steps, B, H)
    return Program(net, torch.zeros(B, H), xs, wrt={**parameters(net), "xs": xs}, modules=[net])


@program
def carry_as_output_in_pieces(steps: int) -> Program:
    w, h = leaf(H, H), leaf(B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        h = torch.tanh(h @ w + x)
        return h, (h, h[:, :2], h.t(), h.view(-1), h)

    return Program(step, h, leaf(steps, B, H, grad=False), wrt={"w": w, "h": h})


@program
def leaves_handed_on_and_returned(steps: int) -> Program:
    """One leaf stays for the whole loop, one for some steps; both are outputs, and so are the new state and the old."""
    w, a, b = leaf(H, H), leaf(B, H), leaf(B, H)

    def step(c: tuple[Tensor, ...], x: Tensor) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        h, stays, held, t = c
        new = torch.tanh(h @ w + x * stays + held)
        held_next = new + x if t % 4 == 0 else held
        return (new, stays, held_next, t + 1), (stays, held, new, h, held_next, stays)

    return Program(step, (a, a * 2, b, 0), leaf(steps, B, H, grad=False), wrt={"w": w, "a": a, "b": b})


@program
def carry_changed_in_place(steps: int) -> Program:
    w, xs = leaf(H, H), leaf(steps, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(h.cumsum(-1) + x @ w)
        h.mul_(0.5).add_(z)
        return h, z

    return Program(step, leaf(B, H).clone(), xs, wrt={"w": w, "xs": xs})


@program
def fast_weights_learned_inside(steps: int) -> Program:
    rate, xs = torch.tensor(0.1, requires_grad=True), leaf(steps, B, D)
    start = leaf(D, D)

    def step(fast: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        error = (torch.tanh(x @ fast) - x.roll(1, -1)).square().mean()
        (slope,) = torch.autograd.grad(error, fast, create_graph=True)
        return fast - rate * slope, error

    return Program(step, start, xs, wrt={"rate": rate, "xs": xs, "start": start})


@program
def tokens_and_sparse_embedding(steps: int) -> Program:
    table, cell, out = nn.Embedding(7, D, sparse=True), nn.GRUCell(D, H), nn.Linear(H, 7)
    xs = (torch.randint(7, (steps, B)), torch.randint(7, (steps, B)))

    def step(h: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        token, target = x
        h = cell(table(token), h)
        return h, F.cross_entropy(out(h), target)

    return Program(step, torch.zeros(B, H), xs, wrt=parameters(table, cell, out))
