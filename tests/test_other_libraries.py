"""Cells and layers of other libraries in `remat.scan`, as they are: bit for bit the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import remat

STEPS, BATCH, INPUT, HIDDEN = 30, 4, 5, 12
Step = Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]


class Cell(nn.LSTMCell):
    """A cell that somebody wrote: layer normalisation of the hidden state, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__(INPUT, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.skip = nn.Parameter(torch.randn(HIDDEN, INPUT) / 3)

    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        hidden, cell = super().forward(x, carry)
        return self.norm(hidden + x @ self.skip.T), cell


def plain_loop(step: Step, carry: Any, xs: torch.Tensor) -> tuple[Any, torch.Tensor]:
    outputs = []
    for x in xs:
        carry, y = step(carry, x)
        outputs.append(y)
    return carry, torch.stack(outputs)


def assert_as_the_plain_loop(
    step: Step,
    carry: Any,
    parameters: Sequence[nn.Parameter],
    *,
    share: float = 0.25,
    around: Callable[[Any], Any] = lambda loop: loop,
) -> None:
    """Results and gradients equal the plain loop's within a share of its peak."""
    torch.manual_seed(0)
    xs = torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    leaves = [xs, *parameters]

    def run(loop: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        _, outputs = around(loop)(step, carry, xs)
        gradients = torch.autograd.grad(outputs.square().sum(), leaves, allow_unused=True)
        return [outputs.detach(), *(g for g in gradients if g is not None), torch.get_rng_state()]

    wanted = run(plain_loop)
    budget = int(remat.measure(lambda: run(plain_loop)).peak_bytes * share)
    try:
        around(remat.plan_scan)(step, carry, xs, budget=budget)
    except remat.InfeasibleBudget as refused:
        budget = refused.smallest_budget_bytes
    found = run(lambda *arguments: remat.scan(*arguments, budget=budget))
    assert len(found) == len(wanted) > 2
    assert all(map(torch.equal, found, wanted))


def test_a_custom_cell() -> None:
    torch.manual_seed(0)
    cell = Cell()

    def step(carry: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        carry = cell(x, carry)
        return carry, carry[0]

    zeros = torch.zeros(BATCH, HIDDEN)
    assert_as_the_plain_loop(step, (zeros, zeros.clone()), list(cell.parameters()))


# ---- snnTorch: spiking neurons


def test_snntorch_leaky_with_a_learned_decay() -> None:
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    layer = nn.Linear(INPUT, HIDDEN)
    neuron = snn.Leaky(beta=0.9, learn_beta=True, learn_threshold=True)

    def step(membrane: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spikes, membrane = neuron(layer(x) * 3, membrane)
        return membrane, spikes + 0.1 * membrane

    assert_as_the_plain_loop(step, torch.zeros(BATCH, HIDDEN), [*layer.parameters(), *neuron.parameters()])


@pytest.mark.parametrize("mechanism", ["subtract", "zero"])
def test_snntorch_neurons_with_a_hidden_state_of_their_own(mechanism: str) -> None:
    """`init_hidden`: the state is never passed; each run of the loop begins with `reset_mem`, as their tutorials do."""
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    layer = nn.Linear(INPUT, HIDDEN)
    first = snn.Leaky(beta=0.9, learn_beta=True, init_hidden=True, reset_mechanism=mechanism)
    last = snn.Synaptic(alpha=0.8, beta=0.9, init_hidden=True, output=True)

    def step(_: None, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        spikes, _, membrane = last(first(layer(x) * 3))
        return None, spikes + membrane

    def loop(run: Callable[..., Any]) -> Callable[..., Any]:
        def resetting(*arguments: Any, **settings: Any) -> Any:
            first.reset_mem()
            last.reset_mem()
            return run(*arguments, **settings)

        return resetting

    assert_as_the_plain_loop(step, None, [*layer.parameters(), *first.parameters()], around=loop)


def test_a_state_that_was_not_reset_is_refused() -> None:
    """Plain backpropagation through it would fail too, but later and with less to say."""
    snn = pytest.importorskip("snntorch")
    neuron, weight = snn.Leaky(beta=0.9, init_hidden=True), torch.ones(INPUT, requires_grad=True)
    xs = torch.ones(STEPS, BATCH, INPUT)

    def step(_: None, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, neuron(x * weight)

    plain_loop(step, None, xs)[1].sum().backward()
    with pytest.raises(remat.StepError, match="reset or detach it"):
        remat.scan(step, None, xs, budget="1GiB")


def test_snntorch_recurrent_synaptic_neurons() -> None:
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    layer = nn.Linear(INPUT, HIDDEN)
    neuron = snn.RSynaptic(alpha=0.9, beta=0.8, linear_features=HIDDEN)

    def step(carry: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        carry = neuron(layer(x) * 3, *carry)
        return carry, carry[2]

    zeros = torch.zeros(BATCH, HIDDEN)
    assert_as_the_plain_loop(step, (zeros, zeros.clone(), zeros.clone()), [*layer.parameters(), *neuron.parameters()])


def test_snntorch_spiking_lstm() -> None:
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    neuron = snn.SLSTM(INPUT, HIDDEN, threshold=0.1)

    def step(carry: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        spikes, *carry = neuron(x, *carry)
        return tuple(carry), spikes

    assert_as_the_plain_loop(step, (torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)), list(neuron.parameters()))


# ---- ncps: liquid and closed-form continuous-time networks


@pytest.mark.parametrize("mode", ["default", "pure", "no_gate"])
def test_ncps_closed_form_cells(mode: str) -> None:
    ncps = pytest.importorskip("ncps.torch")
    torch.manual_seed(0)
    cell = ncps.CfCCell(INPUT, HIDDEN, mode=mode, backbone_dropout=0.3)

    def step(hidden: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, hidden = cell(x, hidden, 1.0)
        return hidden, output

    assert_as_the_plain_loop(step, torch.zeros(BATCH, HIDDEN), list(cell.parameters()))


def test_ncps_liquid_time_constants() -> None:
    ncps = pytest.importorskip("ncps.torch")
    wirings = pytest.importorskip("ncps.wirings")
    torch.manual_seed(0)
    wiring = wirings.AutoNCP(HIDDEN, 3)
    wiring.build(INPUT)
    cell = ncps.LTCCell(wiring, ode_unfolds=3)

    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = cell(x, state, 1.0)
        return state, output

    trained = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    assert_as_the_plain_loop(step, torch.zeros(BATCH, HIDDEN), trained)
