"""The plain loop, and everything about a run that can be seen from outside.

`observe` runs a program with a loop, plain or within a budget, and takes down outputs, types, gradients, buffers,
random states and warnings; `assert_same` compares two such records bit for bit. Nothing here uses remat: the judge
must not share the defect.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Step = Callable[[Any, Any], tuple[Any, Any]]
Loop = Callable[..., tuple[Any, Any]]


@dataclass
class Program:
    """A loop that somebody wrote, with fresh tensors and modules.

    Attributes:
        step, carry, xs, length: what `remat.scan` takes.
        wrt: the tensors whose gradients count, by name.
        modules: whose buffers count.
        around: the surroundings of the forward.
        state: whatever else the step changes, in comparable form.
    """

    step: Step
    carry: Any
    xs: Any = None
    length: int | None = None
    wrt: dict[str, Tensor] = field(default_factory=dict)
    modules: Sequence[nn.Module] = ()
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    state: Callable[[], Any] = lambda: None


# ---- pytrees, plainly


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container, None for a leaf."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, tuple | list):
        return [(f"[{k}]", part) for k, part in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path."""
    parts = parts_of(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from leaves_of(part, path + name)


def types_of(value: Any) -> Any:
    """The structure as nested types."""
    parts = parts_of(value)
    return type(value) if parts is None else (type(value), *((name, types_of(part)) for name, part in parts))


def mapped(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """The structure of `first` with `function` applied to corresponding leaves."""
    parts = parts_of(first)
    if parts is None:
        return function(first, *others)
    columns = zip(*([part for _, part in parts_of(value) or ()] for value in (first, *others)), strict=True)
    made = [mapped(function, *column) for column in columns]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*made)
    if isinstance(first, tuple | list):
        return type(first)(made)
    if isinstance(first, dict):
        return type(first)(zip(first, made, strict=True))
    new = copy.copy(first)
    for (name, _), part in zip(parts, made, strict=True):
        object.__setattr__(new, name[1:], part)
    return new


# ---- the plain loop


class Rows:
    """A tensor's rows, as one leaf."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows = rows


def plain_scan(step: Step, carry: Any, xs: Any = None, *, length: int | None = None) -> tuple[Any, Any]:
    """What `remat.scan` promises to be."""
    if length is None:
        length = next(leaf.shape[0] for _, leaf in leaves_of(xs) if isinstance(leaf, Tensor))
    ys = []
    # As `for x in xs` does: all at once, so that in a backward what flows into xs this way comes after all else.
    columns = mapped(lambda leaf: Rows(leaf.unbind()) if isinstance(leaf, Tensor) else leaf, xs)
    for index in range(length):
        x = mapped(lambda leaf, t=index: leaf.rows[t] if isinstance(leaf, Rows) else leaf, columns)
        carry, y = step(carry, x)
        ys.append(y)
    return carry, mapped(_stacked, *ys)


def _stacked(*leaves: Any) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.stack(leaves)
    return None if leaves[0] is None else list(leaves)


# ---- losses: what is differentiated


def weighted_sum(leaves: Sequence[Tensor]) -> Tensor | None:
    """Every element of every differentiable leaf with a weight of its own; None if there is none."""
    terms = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.3 + number, 1.7 + number, leaf.numel(), dtype=torch.float64).cos()
            weights = weights.reshape(leaf.shape).to(leaf.dtype)
            product = leaf * weights
            terms.append(torch.view_as_real(product).sum() if product.is_complex() else product.sum())
    if not terms:
        return None
    total = terms[0].double()
    for term in terms[1:]:
        total = total + term.double()
    return total


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


Loss = Callable[[Any, Any], Tensor | None]
LOSSES: dict[str, Loss] = {
    "everything": lambda carry, ys: weighted_sum([*_tensors(carry), *_tensors(ys)]),
    "final carry": lambda carry, _ys: weighted_sum(_tensors(carry)),
    "outputs": lambda _carry, ys: weighted_sum(_tensors(ys)),
    "one step": lambda _carry, ys: weighted_sum([leaf[len(leaf) // 2] for leaf in _tensors(ys)]),
    "one leaf": lambda carry, ys: weighted_sum([*_tensors(carry)[:1], *_tensors(ys)[-1:]]),
}


# ---- observations


@dataclass
class Observation:
    """All that can be seen of a run."""

    types: Any = None
    outputs: dict[str, Any] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: Any = None
    random_states: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    later: dict[str, Any] = field(default_factory=dict)  # buffers, state and random states after the backward


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states() -> dict[str, Any]:
    """The ambient streams of random numbers."""
    name, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": (name, keys.tolist(), *rest)}


def buffers_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """All buffers by value."""
    return {
        f"{k}.{name}": buffer.detach().clone()
        for k, module in enumerate(modules)
        for name, buffer in module.named_buffers()
    }


def observe(
    loop: Loop, program: Program, loss: Loss = LOSSES["everything"], *, wrt: Sequence[str] | None = None
) -> Observation:
    """Run the program with a loop, take gradients, and write down what can be seen."""
    seen = Observation()
    seed_everything(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with program.around():
            carry, ys = loop(program.step, program.carry, program.xs, length=program.length)
        seen.types = types_of((carry, ys))
        named = list(leaves_of({"carry": carry, "ys": ys}))
        tensors = [(path, leaf) for path, leaf in named if isinstance(leaf, Tensor)]
        seen.outputs = {path: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for path, leaf in named}
        seen.requires_grad = {path: leaf.requires_grad for path, leaf in tensors}
        seen.aliases = [(a, b) for k, (a, one) in enumerate(tensors) for b, other in tensors[:k] if one is other]
        seen.buffers, seen.state = buffers_of(program.modules), copy.deepcopy(program.state())
        seen.random_states = random_states()
        total = loss(carry, ys)
        names = [n for n in (wrt or program.wrt) if program.wrt[n].requires_grad]
        if total is not None and names:
            found = torch.autograd.grad(total, [program.wrt[name] for name in names], allow_unused=True)
            seen.gradients = dict(zip(names, found, strict=True))
    seen.warnings = [str(warning.message) for warning in caught]
    seen.later = {"buffers": buffers_of(program.modules), "state": program.state(), "random": random_states()}
    return seen


def same(a: Any, b: Any) -> bool:
    """Equality bit for bit, to the sign of a zero; NaN equals NaN."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        if a.layout is torch.sparse_coo:
            a, b = a.coalesce(), b.coalesce()
            return torch.equal(a.indices(), b.indices()) and torch.equal(a.values(), b.values())
        return torch.equal(a, b) or (
            a.is_floating_point() and bool(torch.eq(a.isnan(), b.isnan()).all()) and torch.equal(*_numbers(a, b))
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _numbers(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.nan_to_num(), b.nan_to_num()


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} {value.detach().to_dense().flatten()[:6].tolist()}"
    return repr(value)


def assert_same(got: Observation, expected: Observation) -> None:
    """Fail with the name of the first thing that differs."""
    for item in dataclasses.fields(Observation):
        have, want = getattr(got, item.name), getattr(expected, item.name)
        if item.name == "random_states":
            assert same(have, want), "the random streams after the forward differ"
        elif isinstance(want, dict):
            assert have.keys() == want.keys(), f"{item.name}: {have.keys()} instead of {want.keys()}"
            for key in want:
                if key == "random":
                    assert same(have[key], want[key]), "the random streams after the backward differ"
                    continue
                assert same(have[key], want[key]), (
                    f"{item.name} {key} differs: {_difference(have[key], want[key])}\n"
                    f"  got      {described(have[key])}\n  expected {described(want[key])}"
                )
        else:
            assert same(have, want), f"{item.name}: {have!r} instead of {want!r}"


def _difference(have: Any, want: Any) -> str:
    if isinstance(have, Tensor) and isinstance(want, Tensor) and have.shape == want.shape:
        return f"by up to {(have.to_dense() - want.to_dense()).abs().max().item():.3g}" if have.numel() else "nothing"
    return "not comparable"


def accumulator_mark(weight: Tensor) -> object:
    """An object that is the same for as long as a leaf's gradient accumulator lives."""
    with torch.enable_grad():
        node = weight.view_as(weight).grad_fn
    assert node is not None
    return node.next_functions[0][0].metadata.setdefault("mark", object())
