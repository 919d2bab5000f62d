"""Bad input gets one sentence that names the values and the way out, and nothing half-done remains."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from budgets_of import plan_of, settings_at, smallest_budget
from plain import assert_same, buffers_of, observe, plain_scan, random_states, same
from steps import PROGRAMS

W = torch.eye(3).requires_grad_()
H = torch.ones(2, 3)
XS = torch.ones(5, 2, 3)
Pair = namedtuple("Pair", "a b")


def elman(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h @ W + x)
    return h, h


def at_step(index: int, otherwise: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A step that counts in its carry and does something else at one of the steps."""

    def step(carry: tuple[Tensor, int], x: Tensor) -> Any:
        h, t = carry
        h, y = elman(h, x)
        return otherwise(h, y) if t == index else ((h, t + 1), y)

    return step


def refuses(*words: str, step: Any = elman, carry: Any = H, xs: Any = XS, **kwargs: Any) -> None:
    """`scan` refuses with a sentence that holds all the words, at every budget."""
    with pytest.raises(remat.StepError) as refusal:
        remat.scan(step, carry, xs, **{"budget": "1MiB", **kwargs})
    message = str(refusal.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# ---- inputs


def test_no_steps() -> None:
    refuses("0 steps", "at least one", xs=torch.ones(0, 2, 3))


def test_inputs_of_unequal_length() -> None:
    refuses("xs['a'] 5", "xs['b'] 4", "time", xs={"a": XS, "b": XS[:4]})


def test_length_that_contradicts_the_inputs() -> None:
    refuses("5", "7", "length", length=7)


def test_length_missing() -> None:
    refuses("length=", xs=None)
    refuses("length=", xs={"name": "a"})


@pytest.mark.parametrize("length", [True, 2.0, "5", [3]])
def test_length_that_is_no_number(length: Any) -> None:
    refuses(repr(length), "length", xs=None, length=length)


@pytest.mark.parametrize("length", [0, -3])
def test_length_below_one(length: int) -> None:
    refuses(str(length), "at least one", xs=None, length=length)


def test_inputs_without_a_time_dimension() -> None:
    refuses("xs['rate']", "time", xs={"x": XS, "rate": torch.tensor(0.1)})


# ---- the carry


def test_carry_of_another_shape() -> None:
    refuses(
        "step 0",
        "float32[2, 3]",
        "float32[1, 3]",
        step=lambda h, _x: (h.sum(0, keepdim=True), None),
    )
    refuses("step 2", "float32[2, 3]", "float32[3]", "[0]", step=at_step(2, lambda h, y: ((h[0], 3), y)), carry=(H, 0))


def test_carry_of_another_dtype() -> None:
    refuses("step 0", "float64", "float32", "dtypes", step=lambda h, _x: (h.double(), h))
    refuses("step 3", "float64", "float32", step=at_step(3, lambda h, y: ((h.double(), 4), y)), carry=(H, 0))


def test_carry_of_another_structure() -> None:
    refuses("step 0", "structure", "tuple", step=lambda h, _x: ((h, h), None))
    refuses("step 0", "structure", "tuple of 2", "tuple of 3", step=lambda c, x: ((*c, x), None), carry=(H, H))
    refuses("step 0", "structure", "keys", "'b'", step=lambda c, _x: ({"b": c["a"]}, None), carry={"a": H})
    refuses("step 0", "structure", "Pair", "tuple", step=lambda c, _x: ((c.a, c.b), None), carry=Pair(H, H))
    refuses("step 1", "structure", step=at_step(1, lambda h, y: ((h, (2,)), y)), carry=(H, 0))


def test_a_tensor_becomes_a_number_or_none() -> None:
    refuses("step 0", "no tensor", "float32", step=lambda h, _x: (None, h))
    refuses("step 0", "no tensor", "float32", step=lambda h, _x: (h.sum().item(), h))
    refuses("step 0", "no tensor", "float32", step=lambda c, _x: ((c[0], H), None), carry=(H, None))


# ---- what the step returns


@pytest.mark.parametrize(
    "result", [None, H, (H,), (H, None, H), [H, H]], ids=["None", "tensor", "one", "three", "list"]
)
def test_step_that_returns_something_else(result: Any) -> None:
    refuses("step 0", "(carry, y)", "returned", step=lambda _h, _x: result)


def test_step_that_forgets_to_return_later_on() -> None:
    refuses("step 3", "(carry, y)", "NoneType", step=at_step(3, lambda _h, _y: None), carry=(H, 0))


def test_outputs_that_change() -> None:
    refuses("step 2", "outputs", "structure", step=at_step(2, lambda h, y: ((h, 3), (y, y))), carry=(H, 0))
    refuses(
        "step 2",
        "outputs",
        "float32[2]",
        "float32[2, 3]",
        step=at_step(2, lambda h, y: ((h, 3), y[:, 0])),
        carry=(H, 0),
    )
    refuses("step 2", "outputs", "float64", step=at_step(2, lambda h, y: ((h, 3), y.double())), carry=(H, 0))
    refuses("step 2", "outputs", step=at_step(2, lambda h, _y: ((h, 3), None)), carry=(H, 0))


def test_step_that_cannot_be_called() -> None:
    with pytest.raises(TypeError):
        remat.scan(3, H, XS, budget="1MiB")


# ---- budgets


@pytest.mark.parametrize("budget", [0, -1, "0", "7 Gib please", "lots", "", "-5MiB", "nan"])
def test_budgets_that_are_no_sizes(budget: Any) -> None:
    with pytest.raises(ValueError, match="512MiB") as refusal:
        remat.scan(elman, H, XS, budget=budget)
    assert repr(budget) in str(refusal.value)


@pytest.mark.parametrize("budget", [True, False, 0.5, 1e9, [1], H])
def test_budgets_of_another_type(budget: Any) -> None:
    with pytest.raises(TypeError, match=r"512MiB.*" + type(budget).__name__):
        remat.scan(elman, H, XS, budget=budget)


@pytest.mark.parametrize("budget", [1, "1B", "100", "0.5KiB", 2**12])
def test_the_number_in_a_refusal_works(budget: int | str) -> None:
    make = PROGRAMS["gru-cell"]
    program = make()
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        remat.scan(program.step, program.carry, program.xs, budget=budget)
    smallest = refusal.value.smallest_budget_bytes
    message = str(refusal.value)
    assert str(smallest) in message
    assert all(part in message for part in ("outputs", "gradients of parameters", "tape", "workspace"))
    with pytest.raises(remat.InfeasibleBudget):
        plan_of(make(), smallest - 1)
    assert_same(observe(partial(remat.scan, budget=smallest), make()), observe(plain_scan, make()))


def test_a_refusal_says_what_it_is_made_of() -> None:
    try:
        plan_of(PROGRAMS["gru-cell"](), 1)
    except remat.InfeasibleBudget as refusal:
        parts, smallest = refusal.parts_bytes, refusal.smallest_budget_bytes
    assert sum(parts.values()) == smallest
    assert parts["outputs"] == 13 * 12 * 24 * 4
    copied = pickle.loads(pickle.dumps(refusal_of("gru-cell")))
    assert (copied.smallest_budget_bytes, copied.parts_bytes) == (smallest, parts)


def refusal_of(name: str) -> remat.InfeasibleBudget:
    with pytest.raises(remat.InfeasibleBudget) as refusal:
        plan_of(PROGRAMS[name](), 1)
    return refusal.value


def test_no_budget_means_what_is_free() -> None:
    program = PROGRAMS["gru-cell"]()
    made = remat.plan_scan(program.step, program.carry, program.xs)
    assert made.forward_runs == 13
    assert made.budget_bytes > 2**26


def test_an_unknown_planner_is_told_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'best'.*tight"):
        remat.scan(elman, H, XS, budget="1MiB", planner="best")


# ---- nothing half-done remains


class Failing(nn.Module):
    """Batch normalisation, dropout and a weight; raises in the forward of a step, or in its backward."""

    in_replays = False

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Dropout(0.2)
        self.where = ""
        self.at = 0

    def forward(self, carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        h = self.drop(torch.tanh(self.norm(self.lin(h) + x)))
        if t == self.at and (self.where == "forward" or (self.in_replays and remat.is_recomputing())):
            raise ZeroDivisionError("on purpose")
        if t == self.at and self.where == "backward":
            h = Explosive.apply(h)
        if t == self.at and self.where == "interrupt":
            raise KeyboardInterrupt
        return (h, t + 1), h


class Explosive(torch.autograd.Function):
    """Raises in its backward once it is armed."""

    armed = False

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        if Explosive.armed:
            raise ZeroDivisionError("on purpose")
        return grad


def failing() -> tuple[Failing, tuple[Tensor, int], Tensor]:
    torch.manual_seed(0)
    return Failing(), (torch.zeros(12, 24), 0), torch.randn(13, 12, 24)


def trained(net: Failing, carry: Any, xs: Tensor, **kwargs: Any) -> list[Any]:
    """Outputs, gradients, buffers and random states of one iteration."""
    torch.manual_seed(5)
    net.zero_grad()
    loop = partial(remat.scan, **kwargs) if kwargs else plain_scan
    (h, _), ys = loop(net, carry, xs)
    (ys.square().sum() + h.sum()).backward()
    return [ys.detach(), *(p.grad for p in net.parameters()), buffers_of([net]), random_states()]


@pytest.mark.parametrize("budget", ["1GiB", "115KiB"])
@pytest.mark.parametrize("at", [0, 1, 12])
@pytest.mark.parametrize("where", ["forward", "interrupt"])
def test_an_exception_in_the_forward_leaves_the_module_as_the_plain_loop_does(where: str, at: int, budget: str) -> None:
    error: type[BaseException] = KeyboardInterrupt if where == "interrupt" else ZeroDivisionError
    net, carry, xs = failing()
    reference, *_ = failing()
    for module, loop in ((net, partial(remat.scan, budget=budget)), (reference, plain_scan)):
        module.where, module.at = where, at
        torch.manual_seed(1)
        with pytest.raises(error):
            loop(module, carry, xs)
        assert all(p.grad is None for p in module.parameters())
        module.where = ""
    assert same(trained(net, carry, xs, budget=budget)[1:-2], trained(reference, carry, xs)[1:-2])


def test_an_exception_in_a_step_that_has_only_been_timed() -> None:
    norm = nn.BatchNorm1d(8)

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        if t == 5:
            raise ZeroDivisionError
        return (norm(h + x), t + 1), h

    with pytest.raises(ZeroDivisionError):
        remat.scan(step, (torch.zeros(4, 8), 0), torch.randn(12, 4, 8), budget="1GiB")
    assert norm.num_batches_tracked == 5


@pytest.mark.parametrize("budget", ["1GiB", "115KiB"])
@pytest.mark.parametrize("at", [0, 1, 6, 12])
def test_an_exception_in_the_backward_changes_nothing(at: int, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, carry, xs = failing()
    net.where, net.at = "backward", at
    (h, _), ys = remat.scan(net, carry, xs, budget=budget)
    before = random_states(), buffers_of([net])
    monkeypatch.setattr(Explosive, "armed", True)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        (ys.square().sum() + h.sum()).backward()
    assert same((random_states(), buffers_of([net])), before)
    assert all(p.grad is None for p in net.parameters())
    assert not remat.is_recomputing()
    net.where = ""
    reference, *_ = failing()
    reference.load_state_dict(net.state_dict())
    assert same(trained(net, carry, xs, budget=budget), trained(reference, carry, xs))


def test_an_exception_in_a_replay_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, carry, xs = failing()
    (h, _), ys = remat.scan(net, carry, xs, budget="1GiB", planner="constant")
    before = random_states(), buffers_of([net])
    monkeypatch.setattr(Failing, "in_replays", True)  # what an object holds is in replays as it was
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        (ys.square().sum() + h.sum()).backward()
    assert same((random_states(), buffers_of([net])), before)
    assert all(p.grad is None for p in net.parameters())
    assert not remat.is_recomputing()


def test_a_refusal_changes_nothing() -> None:
    """Not the random streams, the buffers, the gradients, nor what the step counts."""
    net, carry, xs = failing()
    calls: list[int] = []

    def step(carry: tuple[Tensor, int], x: Tensor) -> Any:
        (h, t), y = net(carry, x)
        return ((h[:6], t), y) if t == 4 else ((h, t), y)

    torch.manual_seed(1)
    before = random_states(), buffers_of([net]), calls
    with pytest.raises(remat.InfeasibleBudget):
        remat.scan(net, carry, xs, budget=100)
    assert same((random_states(), buffers_of([net]), calls), before)
    with pytest.raises(ValueError, match="size"):
        remat.scan(net, carry, xs, budget="much")
    assert same((random_states(), buffers_of([net]), calls), before)
    assert all(p.grad is None for p in net.parameters())


def test_planning_leaves_no_trace() -> None:
    net, carry, xs = failing()
    torch.manual_seed(1)
    before = random_states(), buffers_of([net])
    made = remat.plan_scan(net, carry, xs, budget="115KiB")
    assert same((random_states(), buffers_of([net])), before)
    assert all(p.grad is None for p in net.parameters())
    assert made.forward_runs > 13


def test_second_derivatives_are_refused_in_one_sentence() -> None:
    program = PROGRAMS["elman"]()
    _, ys = remat.scan(program.step, program.carry, program.xs, **settings_at(PROGRAMS["elman"](), "tight"))
    with pytest.raises(remat.StepError, match=r"create_graph.*plain loop"):
        torch.autograd.grad(ys.square().sum(), [program.wrt["w"]], create_graph=True)


def test_a_weight_changed_between_forward_and_backward() -> None:
    program = PROGRAMS["elman"]()
    _, ys = remat.scan(program.step, program.carry, program.xs, **settings_at(PROGRAMS["elman"](), "tight"))
    with torch.no_grad():
        program.wrt["w"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()


def test_inputs_changed_between_forward_and_backward() -> None:
    program = PROGRAMS["elman"]()
    xs = program.xs.detach().clone()
    _, ys = remat.scan(program.step, program.carry, xs, **settings_at(PROGRAMS["elman"](), "tight"))
    xs.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()


def test_a_second_backward_without_a_retained_graph() -> None:
    program = PROGRAMS["elman"]()
    _, ys = remat.scan(program.step, program.carry, program.xs, budget="1GiB")
    ys.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        ys.sum().backward()
    gc.collect()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_no_step_is_looked_at_that_would_not_come(steps: int, shared: bool) -> None:
    """Looking at a step takes more runs than there may be steps: this one has no weight for more."""
    weights = [torch.full((3,), 0.5 + k).requires_grad_() for k in range(steps)]

    def step(carry: tuple[Tensor, Tensor, int], x: Tensor) -> tuple[tuple[Tensor, Tensor, int], Tensor]:
        h, c, t = carry
        h = torch.tanh(h * weights[t] + x)
        return (h, c * 0.5, t + 1), h

    first, xs = torch.ones(3), torch.randn(steps, 3)
    start = first, first if shared else torch.ones(3), 0
    found = remat.scan(step, start, xs, budget="1MiB", planner="constant")[1]
    expected = plain_scan(step, start, xs)[1]
    assert torch.equal(found, expected)
    assert all(map(torch.equal, *(torch.autograd.grad(ys.sum(), weights) for ys in (found, expected))))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_check_of_a_few_steps_compares_each_with_itself(steps: int) -> None:
    w, xs = torch.randn(3, 3, dtype=torch.complex64).requires_grad_(), torch.randn(steps, 3).to(torch.complex64)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h @ w + x).conj(), None  # bits of a conjugate that is only marked as one

    after, _ = remat.scan(
        step, torch.zeros(3, dtype=torch.complex64), xs, budget="1MiB", planner="constant", check=True
    )
    after.abs().sum().backward()


def test_a_step_with_parameters_to_come_is_refused() -> None:
    layer = nn.LazyLinear(3)
    with pytest.raises(remat.StepError, match=r"parameters without a shape.*call it once"):
        remat.scan(lambda h, x: (layer(h) + x, None), torch.zeros(2, 3), torch.zeros(4, 2, 3), budget="1MiB")
    with pytest.raises(remat.StepError, match=r"parameters without a shape.*call it once"):
        remat.chain([layer, nn.Tanh()], torch.zeros(2, 3).requires_grad_(), budget="1MiB")


def test_the_smallest_budget_is_below_that_of_keeping_all() -> None:
    make = partial(PROGRAMS["transformer-block"], 39)
    assert smallest_budget(make()) < plan_of(make(), "1GiB").peak_bytes / 3  # random states weigh at this size


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_hidden_tensor(at: int) -> None:
    """Nothing leads to it but the recorded graph: used at first or last it has its gradient, used between it cannot."""
    hidden = torch.full((3, 3), 0.3).requires_grad_()
    reference = weakref.ref(hidden)

    def step(carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
        h, t = carry
        h = torch.tanh(h @ reference() if t == at else h @ W + x)
        return (h, t + 1), h

    xs = torch.ones(9, 2, 3).requires_grad_()
    for _ in range(2):
        ys = remat.scan(step, (H, 0), xs, budget="1MiB", planner="constant")[1]
        if at == 4:
            with pytest.raises(
                remat.StepError,
                match=r"the step uses a tensor of shape \(3, 3\).* when it was first looked at.* close over it",
            ):
                ys.sum().backward()
            assert xs.grad is None
        else:
            expected = torch.autograd.grad(plain_scan(step, (H, 0), xs)[1].sum(), hidden)
            assert same(torch.autograd.grad(ys.sum(), hidden), expected)


@pytest.mark.parametrize("view", [False, True])
def test_an_output_that_the_next_step_would_change(view: bool) -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h.mul_(0.5).add_(x)
        return h, h[:1] if view else h

    with pytest.raises(remat.StepError, match="return a clone"):
        remat.scan(step, torch.randn(3, 4, requires_grad=True).clone(), torch.randn(5, 3, 4), budget="1GiB")


def test_an_output_that_the_next_step_would_change_in_a_carry_that_begins_as_one_tensor_twice() -> None:
    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        changed = carry[1].add_(x)
        return (torch.tanh(x), changed), changed

    start = torch.zeros(3, 4)
    with pytest.raises(remat.StepError, match="return a clone"):
        remat.scan(step, (start, start), torch.randn(5, 3, 4), budget="1GiB")


def test_an_output_that_the_next_step_would_change_by_another_name() -> None:
    """What is changed as the first leaf is returned as the second, which is the same tensor before the first step."""

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        changed, same_at_first = carry
        changed.mul_(x)
        return (same_at_first, torch.tanh(x)), changed

    start = torch.randn(3, 4).requires_grad_() * 0.5
    with pytest.raises(remat.StepError, match="return a clone"):
        remat.scan(step, (start, start), torch.randn(5, 3, 4), budget="1GiB")


def test_a_step_that_needs_a_gradient_only_where_it_is_measured() -> None:
    """One step is all there is, and measuring goes on from what it returned."""
    w = torch.eye(4).requires_grad_()

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        chosen = carry[0] if bool(carry[0].mean() > 2.5) else x * 0.5
        return (carry[0] + x @ w, chosen), None

    start, xs = (torch.zeros(3, 4), torch.zeros(3, 4)), torch.ones(1, 3, 4)
    found = remat.scan(step, start, xs, budget="1GiB")[0]
    assert same(found, plain_scan(step, start, xs)[0])
    assert not found[1].requires_grad
