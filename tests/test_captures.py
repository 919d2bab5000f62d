"""What a step can reach is found, wherever it is kept."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import remat
from remat.captures import reach

EVERYWHERE = torch.ones(2).requires_grad_()
IN_A_DICT = {"deep": [torch.ones(2).requires_grad_()]}


def tensor() -> Tensor:
    return torch.ones(2).requires_grad_()


def finds(step: Callable[..., Any], *wanted: Tensor) -> bool:
    found = {id(t) for t in reach(step).differentiable()}
    return all(id(t) in found for t in wanted)


def test_closures_defaults_and_globals() -> None:
    a, b, c = tensor(), tensor(), tensor()

    def step(h: Tensor, x: Tensor, b: Tensor = b, *, c: Tensor = c) -> Tensor:
        return h + x + a + b + c + EVERYWHERE + IN_A_DICT["deep"][0]

    assert finds(step, a, b, c, EVERYWHERE, IN_A_DICT["deep"][0])


def test_an_attribute_is_no_global_of_its_name() -> None:
    def step(carry: Any, x: Tensor) -> Tensor:
        return carry.EVERYWHERE + x

    assert not reach(step).differentiable()


def test_functions_called_by_functions() -> None:
    a = tensor()

    def innermost() -> Tensor:
        return a

    def inner() -> Tensor:
        return innermost()

    assert finds(lambda h, x: inner() + h + x, a)
    assert finds(lambda h, x: [(lambda: inner())() + h + x], a)


def test_partials_and_bound_methods() -> None:
    a, b, c = tensor(), tensor(), tensor()

    class Holder:
        def __init__(self) -> None:
            self.a = a

        def step(self, h: Tensor, _x: Tensor) -> Tensor:
            return h + self.a

    def three(a: Tensor, h: Tensor, x: Tensor, c: Tensor) -> Tensor:
        return a + h + x + c

    assert finds(Holder().step, a)
    assert finds(functools.partial(three, b, c=c), b, c)
    assert finds(functools.partial(Holder.step, Holder()), a)


def test_objects_slots_properties_and_class_attributes() -> None:
    a, b, c, d = (tensor() for _ in range(4))

    class Base:
        shared = d

    class Slotted(Base):
        __slots__ = ("a", "bag")

        def __init__(self) -> None:
            self.a, self.bag = a, {"b": deque([b])}

        @property
        def c(self) -> Tensor:
            return c

        def __call__(self, h: Tensor, _x: Tensor) -> Tensor:
            return h + self.a + self.bag["b"][0] + self.c + self.shared

    assert finds(Slotted(), a, b, c, d)


def test_modules_with_all_that_is_theirs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.loose = tensor()
            self.register_buffer("buffer", torch.ones(2))
            self.hidden = {"list": [nn.Linear(2, 2)]}

        def forward(self, h: Tensor, _x: Tensor) -> Tensor:
            return self.lin(h) + self.loose

    net = Net()
    assert finds(net, *net.parameters(), net.loose, net.hidden["list"][0].weight)
    assert any(t is net.buffer for t in reach(net).tensors)
    assert any(m is net for m in reach(net).modules)


def test_wrapped_functions() -> None:
    a = tensor()

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @decorated
    def step(h: Tensor, x: Tensor) -> Tensor:
        return h + x + a

    assert finds(step, a)
    assert finds(torch.no_grad()(lambda h, x: h + x + a), a)


def test_generators_of_random_numbers() -> None:
    own, mine, numbers = torch.Generator(), random.Random(1), np.random.default_rng(1)

    def step(h: Tensor, _x: Tensor) -> Tensor:
        return h + torch.rand(2, generator=own) + mine.random() + numbers.random()

    found = reach(step).generators
    assert all(any(generator is one for one in found) for generator in (own, mine, numbers))


def test_things_that_refer_to_themselves() -> None:
    a = tensor()
    ring: list[Any] = [a]
    ring.append(ring)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return h + x + ring[0] if len(ring) else step(h, x)

    assert finds(step, a)


def test_what_is_not_reached_is_found_when_recorded() -> None:
    """A weight behind an iterator, or made by a factory that hides it, still gets its gradient, or is refused."""
    a = torch.full((3, 3), 0.3).requires_grad_()

    class Hidden:
        def __init__(self, value: Tensor) -> None:
            self.get = iter([value] * 10_000).__next__

    hidden = Hidden(a)
    xs = torch.ones(5, 2, 3)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ hidden.get() + x)
        return h, h

    try:
        _, ys = remat.scan(step, torch.zeros(2, 3), xs, budget="1MiB", planner="constant")
        (got,) = torch.autograd.grad(ys.sum(), [a])
    except remat.StepError as refusal:
        message = str(refusal)
    else:
        message = ""
    if message:
        assert "iterator" in message
        return
    h, total = torch.zeros(2, 3), torch.zeros(())
    for x in xs:
        h = torch.tanh(h @ a + x)
        total = total + h.sum()
    assert torch.allclose(got, torch.autograd.grad(total, [a])[0])


def test_a_result_from_outside_that_cannot_be_seen_is_refused() -> None:
    raw = torch.full((3, 3), 0.3).requires_grad_()
    key = object()
    table = {id(key): raw * 2}

    class Opaque:
        __slots__ = ()

        def __getattr__(self, _name: str) -> Tensor:
            import gc

            return next(t for t in gc.get_objects() if isinstance(t, Tensor) and t is table_of()[id(key)])

    def table_of() -> dict[int, Tensor]:
        return table

    assert finds(lambda h, x: h + x + table_of()[id(key)], table[id(key)])
