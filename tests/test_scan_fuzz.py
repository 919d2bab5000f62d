"""Random programs: Hypothesis writes the source of a step from many features, and the plain loop is the judge.

A failing program is printed as source. `make fuzz` draws anew for as long as it is told to. Left out: a leaf
of the carry that loses its need for a gradient at a later step which `scan` does not foresee.
"""

from __future__ import annotations

import random
from collections import namedtuple
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from budgets_of import AMPLE, plan_of, smallest_budget
from plain import LOSSES, Program, assert_same, observe, plain_scan, seed_everything

B, H = 6, 16

Named = namedtuple("Named", "a b t")


@dataclass
class Data:
    a: Any
    b: Any
    t: Any


class Twice(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert len(ctx.saved_tensors) == 2
        a, b = ctx.saved_tensors
        return grad * b.cos(), -grad * a * b.sin()


def clamped(z: Tensor) -> Tensor:
    """Its gradient is clipped."""
    z = z * 1.0
    if z.requires_grad:
        z.register_hook(lambda g: g.clamp(-0.3, 0.3))
    return z


def halved(z: Tensor) -> Tensor:
    """A hook without asking, on what may need no gradient."""
    z = z * 1.0
    z.register_hook(lambda g: g * 0.5)
    return z


def without_gradient(z: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(z)


def in_half_precision(layer: nn.Module, z: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = layer(z)
        with torch.autocast("cpu", enabled=False):
            return z.float() + layer.weight[0]


SCOPE = {
    f.__name__: f for f in (torch, F, random, np, checkpoint, Named, Data, Twice, clamped, halved, without_gradient)
}
SCOPE |= {"F": F, "np": np, "H": H, "B": B, "in_half_precision": in_half_precision}

# What a line of a step may compute: {p} and {q} are tensors of shape (B, H) that exist by then.
EXPRESSIONS = [
    "torch.tanh({p} @ w + {q})",
    "torch.sin({p} @ v)",
    "{p} @ effective + {q}",
    "torch.tanh({p} @ turned + {q} @ squared)",
    "halved({p} + {q})",
    "F.linear({p}, GLOBAL)",
    "layer({p}).relu()",
    "frozen({p})",
    "norm({p} + x)",
    "F.dropout({p}, 0.3)",
    "drop({p})",
    "F.layer_norm({p}, (H,))",
    "{p} + {q}",
    "{p} * {q}.sigmoid()",
    "{p}.detach() + {q}",
    "without_gradient({p}) * {q}",
    "({p} if bool({p}.sum() > {q}.sum()) else {q} * 0.5)",
    "{p} @ (w if t % 3 == 0 else v)",
    "({p} if t < 3 else {p}.detach())",
    "({p}.detach() if t < 2 else {p})",
    "({p}.detach() * (2.0 if {p}.requires_grad else 1.0))",
    "(F.dropout({p}, 0.5) if t % 4 == 1 else {p})",
    "{p}.cumsum(-1) / 4",
    "torch.cat([{p}[:, 1:], {q}[:, :1]], 1)",
    "{p}.t().contiguous().t()",
    "{p}.view(-1).view(B, H)",
    "{p}.flip(0)",
    "{p}.clone().mul_(0.5).add_({q})",
    "({p} + {q}).relu_()",
    "torch.softmax({p}, -1)",
    "{p} * random.random()",
    "{p} + float(np.random.rand())",
    "{p} + torch.randn(H, generator=own)",
    "torch.where({p} > 0, {p}, {q})",
    "Twice.apply({p}, {q})",
    "clamped({p})",
    "checkpoint(torch.tanh, {p} * 2, use_reentrant=False)",
    "in_half_precision(layer, {p})",
    "table[({p}.argmax(-1) + t) % 5]",
    "torch.einsum('bi,ij,bj->bj', {p}, v, {q}).tanh()",
    "{p} * learned",
    "{p} + xs[(t * 3 + 1) % len(xs)]",
    "{p} * xs.mean(0)",
    "sparse(({p}.argmax(-1) + t) % 7)",
]
IN_PLACE = ["a.mul_({q})", "b.add_(x)", "a.tanh_()", "b.copy_({q})", "a[:, 0] = {q}[:, 1]", "{p}.mul_(0.5)"]
NEW_CARRY = ["{p}", "learned", "({p} * learned if t % 3 else learned)"]
NEW_CARRY += ["({p} * learned if t % 4 == 1 else a)"]
NEW_CARRY += ["{p}", "torch.tanh({p})", "0.5 * {p} + 0.1 * {q}", "{p}.clone()", "{p}[:, torch.arange(H - 1, -1, -1)]"]
OUTPUTS = ["{p}", "{p}[:, :3]", "{p}.sum()", "{p}.detach()", "{p}.argmax(-1)", "None", "t", "{p}.t()", "{p} * 2"]
OUTPUTS += ["w", "learned", "xs[0]", "(w if t % 2 else v)"]
STARTS = ["zeros", "leaf", "computed", "expanded"]
CONTAINERS = {
    "tuple": ("a, b, t = carry", "({a}, {b}, {t})"),
    "list": ("a, b, t = carry", "[{a}, {b}, {t}]"),
    "nested": ("(a,), (b, t) = carry", "(({a},), ({b}, {t}))"),
    "dict": ("a, b, t = carry['a'], carry['b'], carry['t']", "{{'a': {a}, 'b': {b}, 't': {t}}}"),
    "named": ("a, b, t = carry", "Named({a}, {b}, {t})"),
    "dataclass": ("a, b, t = carry.a, carry.b, carry.t", "Data({a}, {b}, {t})"),
}
COUNTERS = {"int": ("0", "t + 1"), "tensor": ("torch.zeros((), dtype=torch.long)", "t + 1")}


@dataclass(frozen=True)
class Recipe:
    """A program as text and numbers, from which any number of equal ones can be made."""

    source: str
    starts: tuple[str, str]
    twice: bool
    counter: str
    container: str
    inputs_need: bool
    length: int
    loss: str
    place: str  # where the budget lies
    autocast: bool  # around the loop
    in_place: bool  # whether lines may change the carry

    def make(self) -> Program:
        """Fresh tensors and modules, and the step compiled."""
        seed_everything(2)
        w, v = (torch.randn(H, H).mul(0.3).requires_grad_() for _ in range(2))
        raw = torch.randn(H, H).requires_grad_()
        layer, frozen, norm = nn.Linear(H, H), nn.Linear(H, H).requires_grad_(False), nn.BatchNorm1d(H)
        table, everywhere = torch.randn(5, H).requires_grad_(), torch.randn(H, H).mul(0.3).requires_grad_()
        xs = torch.randn(self.length, B, H).requires_grad_(self.inputs_need)
        own, sparse = torch.Generator().manual_seed(3), nn.Embedding(7, H, sparse=True)
        learned = torch.randn(B, H).requires_grad_()
        a = self._start(self.starts[0])
        b = a if self.twice else self._start(self.starts[1])
        scope: dict[str, Any] = {**SCOPE, "__name__": "of the user", "GLOBAL": everywhere, "a": a, "b": b}
        exec(self.source, scope)
        effective, drop = raw / raw.norm(), nn.Dropout(0.2)
        turned, squared = w.t(), v * v
        step = scope["make"](
            w, v, turned, squared, effective, layer, frozen, norm, drop, table, own, learned, xs, sparse
        )
        start = CONTAINERS[self.container][1].format(a="a", b="b", t=COUNTERS[self.counter][0])
        carry = eval(start, scope)
        wrt = {"w": w, "v": v, "raw": raw, "table": table, "global": everywhere, "xs": xs}
        wrt |= {"learned": learned, "sparse": sparse.weight}
        wrt |= {f"layer.{name}": p for name, p in (*layer.named_parameters(), *norm.named_parameters(prefix="norm"))}
        wrt |= {name: t for name, t in (("a", a), ("b", b)) if t.is_leaf and t.requires_grad}
        return Program(step, carry, xs, wrt=wrt, modules=[norm], state=own.get_state, around=self._around)

    def _around(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    @staticmethod
    def _start(kind: str) -> Tensor:
        if kind == "expanded":
            return torch.randn(1, H).requires_grad_().expand(B, H)
        start = torch.zeros(B, H) if kind == "zeros" else torch.randn(B, H).requires_grad_()
        return start * 0.5 if kind == "computed" else start


def is_late(template: str) -> bool:
    """Whether something may first come in in a later step, or by way of the carry."""
    return (" if " in template and not asks_for_need(template)) or template == "learned"


def asks_for_need(template: str) -> bool:
    """Whether values hang on what needs a gradient."""
    return "requires_grad" in template


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    pool = ["a", "b", "x"]

    in_place, autocast, asks = (draw(st.sampled_from([False, False, False, True])) for _ in range(3))
    # What the first steps do not show, the README's limits leave out: weights that autocast casts later, and values
    # that hang on whether something needs a gradient, but not at first.
    left_out = [*([is_late] if autocast or asks else []), *([] if asks else [asks_for_need])]

    def filled(templates: list[str]) -> str:
        newest = st.sampled_from(pool[::-1])
        templates = [template for template in templates if not any(is_out(template) for is_out in left_out)]
        return draw(st.sampled_from(templates)).format(p=draw(newest), q=draw(newest))

    container, counter = draw(st.sampled_from(list(CONTAINERS))), draw(st.sampled_from(list(COUNTERS)))
    lines = [CONTAINERS[container][0]]
    for k in range(draw(st.integers(1, 6))):
        lines.append(f"z{k} = {filled(EXPRESSIONS)}")
        pool.append(f"z{k}")
        if in_place and draw(st.booleans()):
            lines.append(filled(IN_PLACE))
    new = [f"{filled(NEW_CARRY)}.float()" for _ in "ab"]  # where autocast is around
    carry = CONTAINERS[container][1].format(a=new[0], b=new[1], t=COUNTERS[counter][1])
    outputs = [filled(OUTPUTS) for _ in range(draw(st.integers(0, 3)))]
    form = draw(st.sampled_from(["({},)", "[{}]", "{{'only': ({},)}}"])) if outputs else "None"
    lines.append(f"return {carry}, {form.format(', '.join(outputs))}")
    source = "\n".join(
        (
            "def make(w, v, turned, squared, effective, layer, frozen, norm, drop, table, own, learned, xs, sparse):",
            "    def step(carry, x):",
            *(f"        {line}" for line in lines),
            "    return step",
        )
    )
    # The same holds for a leaf in the carry.
    starts = st.sampled_from([start for start in STARTS if not (autocast and start == "leaf")])
    return Recipe(
        source,
        (draw(starts), draw(starts)),
        draw(st.booleans()) and draw(st.booleans()),
        counter,
        container,
        draw(st.booleans()),
        draw(st.integers(1, 30)),
        draw(st.sampled_from(list(LOSSES))),
        draw(st.sampled_from(["ample", "smallest", "0.05", "0.2", "0.5", "constant", "recursive", "hsm"])),
        autocast,
        in_place,
    )


def settings_of(recipe: Recipe) -> dict[str, Any]:
    if recipe.place == "ample":
        return {"budget": AMPLE}
    if recipe.place in ("constant", "recursive", "hsm"):
        return {"budget": AMPLE, "planner": recipe.place}
    smallest = smallest_budget(recipe.make())
    share = 0.0 if recipe.place == "smallest" else float(recipe.place)
    return {"budget": smallest + int(share * max(plan_of(recipe.make(), AMPLE).peak_bytes - smallest, 0))}


@pytest.mark.filterwarnings("ignore:.*checkpoint.*")
@settings(max_examples=max(settings.default.max_examples // 4, 25))
@given(recipes())
def test_random_programs(recipe: Recipe) -> None:
    note(f"{recipe.source}\n{recipe}")
    try:
        # Every gradient must exist, at all of the steps that are measured.
        observe(plain_scan, replace(recipe, length=max(recipe.length, 5)).make())
        expected = observe(plain_scan, recipe.make(), LOSSES[recipe.loss])
    except RuntimeError:  # for instance a carry changed in place that something had saved
        assume(False)
    try:
        seen = observe(partial(remat.scan, **settings_of(recipe)), recipe.make(), LOSSES[recipe.loss])
    except remat.StepError as refusal:
        if "in place" not in str(refusal):
            raise
        return
    except RuntimeError as failure:
        if not (recipe.in_place and "modified by an inplace operation" in str(failure)):
            raise
        return  # as the plain loop's backward, if it went to the initial carry
    if " if " in recipe.source:
        # A final carry that needs no gradient any more may come back as one that does: see the README's limits.
        needed = {name: needs and seen.requires_grad[name] for name, needs in expected.requires_grad.items()}
        seen = replace(seen, requires_grad=needed)
        if not expected.gradients and all(g is None or not g.to_dense().any() for g in seen.gradients.values()):
            seen = replace(seen, gradients={})
    if recipe.in_place:  # what is carry and output at once: the order of its sum is in the README's limits
        seen = replace(
            seen, gradients={name: close_to(seen.gradients[name], g) for name, g in expected.gradients.items()}
        )
        if "expanded" in recipe.starts:  # and so is that of sums over a carry that was expanded, and is copied
            close = {path: close_to(seen.outputs[path], leaf) for path, leaf in expected.outputs.items()}
            seen = replace(seen, outputs=close)
    assert_same(seen, expected)


def close_to(found: Any, expected: Any) -> Any:
    """What is expected, if that is what was found but for rounding."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or not found.is_floating_point():
        return found
    return expected if torch.allclose(found.to_dense(), expected.to_dense(), rtol=1e-4, atol=1e-5) else found
