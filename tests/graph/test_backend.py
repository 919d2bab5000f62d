"""Training inside a budget: eager's bits, the measured peak, the predicted one."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import remat
from graph.joint import within
from graph.networks import Decoder, functional, networks, step
from remat.graph.backend import last_plan
from remat.graph.compilation import Compilation, Options


def prepared(name: str) -> tuple[Any, list[torch.Tensor]]:
    model, example = networks()[name]
    function, tensors = functional(copy.deepcopy(model))
    return function, [*tensors, example]


def measured_peak(function: Any, tensors: list[torch.Tensor], *, gradients_exist: bool) -> int:
    def run() -> None:
        function(*tensors).backward()

    run()
    if not gradients_exist:
        for tensor in tensors:
            tensor.grad = None
    return remat.measure(run).peak_bytes


@cache
def range_of(name: str, gradients_exist: bool) -> tuple[int, int]:
    """The smallest budget, and what a step takes without recomputation."""
    function, tensors = prepared(name)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        within(function, tensors, budget=1, gradients_exist=gradients_exist)[0](*tensors)
    function, tensors = prepared(name)
    call, compilation = within(function, tensors, gradients_exist=gradients_exist)
    call(*tensors)
    assert compilation.plan is not None
    return caught.value.smallest_budget_bytes, compilation.plan.budget_bytes


def planned(compilation: Compilation) -> int:
    assert compilation.plan is not None
    return compilation.plan.peak_bytes


@pytest.mark.parametrize(
    ("name", "gradients_exist", "share"),
    [
        ("decoder", True, 1.0),
        ("decoder", True, 0.4),
        ("decoder", True, 0.0),
        ("residual", False, 0.5),
        ("residual", False, 0.0),
        ("lstm", True, 0.0),
    ],
)
def test_a_step_is_eagers_within_every_budget(name: str, gradients_exist: bool, share: float) -> None:
    smallest, plain = range_of(name, gradients_exist)
    budget = round(smallest + share * (plain - smallest))
    reference = step(*prepared(name))
    function, tensors = prepared(name)
    call, compilation = within(function, tensors, budget=budget, gradients_exist=gradients_exist)
    found = step(call, tensors)
    assert found.keys() == reference.keys()
    for key, value in reference.items():
        assert torch.equal(found[key], value), key
    peak = measured_peak(call, tensors, gradients_exist=gradients_exist)
    assert peak <= budget
    assert planned(compilation) == pytest.approx(peak, rel=0.02)
    assert compilation.plan is not None
    assert compilation.plan.in_place


@pytest.fixture(scope="module")
def tight() -> tuple[Any, list[torch.Tensor], Any, list[torch.Tensor]]:
    """The decoder at its smallest budget, and eager, with tensors of their own."""
    smallest, _ = range_of("decoder", True)
    function, tensors = prepared("decoder")
    return within(function, tensors, budget=smallest, gradients_exist=True)[0], tensors, *prepared("decoder")


def test_gradients_asked_for_by_name_leave_the_others_alone(tight: Any) -> None:
    call, tensors, plain, plain_tensors = tight
    for chosen in ([3], [0, 5]):
        wanted = _grad(plain, plain_tensors, chosen)
        found = _grad(call, tensors, chosen)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(tensor.grad is None for tensor in tensors)


def _grad(function: Any, tensors: list[torch.Tensor], chosen: list[int]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.autograd.grad(function(*tensors), [tensors[k] for k in chosen])


def test_a_retained_graph_is_run_backward_twice(tight: Any) -> None:
    call, tensors, *_ = tight
    loss = call(*tensors)
    state = torch.get_rng_state()
    first = torch.autograd.grad(loss, tensors[:-1], retain_graph=True)
    second = torch.autograd.grad(loss, tensors[:-1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_hooks_see_each_gradient_once_and_as_early_as_it_exists(tight: Any) -> None:
    call, tensors, *_ = tight
    fired: list[int] = []
    parameters = tensors[:-1]
    handles = [p.register_post_accumulate_grad_hook(lambda _, k=k: fired.append(k)) for k, p in enumerate(parameters)]
    alive: list[int] = []
    head, embed = len(parameters) - 1, 0
    handles.append(parameters[head].register_hook(lambda _: alive.append(len(fired))))
    call(*tensors).backward()
    for handle in handles:
        handle.remove()
    for parameter in parameters:
        parameter.grad = None
    assert sorted(fired) == list(range(len(parameters)))
    assert alive == [0]
    assert fired.index(head) < fired.index(embed)


def test_without_gradients_it_is_the_plain_function(tight: Any) -> None:
    call, tensors, plain, plain_tensors = tight
    with torch.no_grad():
        torch.manual_seed(0)
        found = call(*tensors)
        torch.manual_seed(0)
        assert torch.equal(found, plain(*plain_tensors))


def test_what_is_changed_afterwards_is_not_read_again() -> None:
    def scaled(weight: torch.Tensor, buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        factor = buffer * 2  # the backward needs it, and must not make it again from the changed buffer
        h = torch.tanh(x @ weight) * factor
        with torch.no_grad():
            buffer += 1
        return (h * torch.tanh(h)).sum()

    def tensors() -> list[torch.Tensor]:
        torch.manual_seed(2)
        return [torch.randn(8, 8, requires_grad=True), torch.ones(32, 8), torch.randn(32, 8)]

    wanted = step(scaled, tensors())
    mine = tensors()
    with pytest.raises(remat.InfeasibleBudget) as caught:
        within(scaled, mine, budget=1)[0](*mine)
    mine = tensors()
    found = step(within(scaled, mine, budget=caught.value.smallest_budget_bytes)[0], mine)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


class Small(torch.nn.Module):
    """Two layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return torch.nn.functional.dropout(self.second(x), 0.5).sum()


def test_every_size_has_a_plan_of_its_own() -> None:
    torch._dynamo.reset()
    model = Small()
    compiled = torch.compile(model, backend="remat", options={"budget": "100KiB"}, dynamic=True)
    peaks = []
    for rows in (64, 96):
        example = torch.randn(rows, 16)
        eager = copy.deepcopy(model)
        wanted = step(lambda x, *_, e=eager: e(x), [example, *eager.parameters()])
        found = step(lambda x, *_: compiled(x), [example, *model.parameters()])
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        model.zero_grad()
        plan = last_plan()
        assert plan is not None
        peaks.append(plan.peak_bytes)
    assert peaks[0] < peaks[1]
    torch._dynamo.reset()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="budget, gradients_exist, lowering, not bugdet"):
        Options.from_mapping({"bugdet": 5})
    with pytest.raises(ValueError, match="a size must be"):
        Options.from_mapping({"budget": -5})


def test_torch_compile_takes_it_by_name() -> None:
    torch._dynamo.reset()
    model = Decoder(blocks=1)
    tokens = torch.randint(0, 50, (2, 12))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="remat", options={"budget": "1MiB"})
    wanted = step(lambda t, *_: eager(t), [tokens, *eager.parameters()])
    found = step(lambda t, *_: compiled(t), [tokens, *model.parameters()])
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    plan = last_plan()
    assert plan is not None
    assert plan.peak_bytes <= 2**20
    loss = compiled(tokens)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch._dynamo.reset()
