"""`remat.recurrent` against the plain layer: results to rounding, random stream exactly, bytes within the budget."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import remat

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

STEPS, BATCH, INPUT, HIDDEN = 20, 5, 6, 16
LENGTHS = (20, 14, 14, 9, 1)


@dataclass
class Case:
    """A layer, its input and its initial states."""

    layer: nn.RNNBase
    x: torch.Tensor | PackedSequence
    states: tuple[torch.Tensor, ...]

    def leaves(self, layer: nn.RNNBase | None = None) -> list[torch.Tensor]:
        data = self.x.data if isinstance(self.x, PackedSequence) else self.x
        return [data, *self.states, *(layer or self.layer).parameters()]

    def called(self, layer: nn.RNNBase) -> list[torch.Tensor]:
        """Output and final states."""
        states = self.states[0] if len(self.states) == 1 else self.states
        out, final = layer(self.x, states) if self.states else layer(self.x)
        data = out.data if isinstance(out, PackedSequence) else out
        return [data, *(final if isinstance(final, tuple) else [final])]

    def trained(self, layer: nn.RNNBase) -> list[torch.Tensor]:
        """Output, final states, and the gradients of all leaves, with weights that differ everywhere."""
        torch.manual_seed(1)
        results = self.called(layer)
        weights = [torch.linspace(-1, 1, r.numel(), dtype=torch.float64).to(r.dtype).view_as(r) for r in results]
        found = torch.autograd.grad(results, self.leaves(layer), weights)
        return [*(r.detach() for r in results), *found]

    def double(self) -> Case:
        """The same in float64."""
        layer = copy.deepcopy(self.layer).double()
        x = self.x
        data = (x.data if isinstance(x, PackedSequence) else x).detach().double().requires_grad_()
        x = x._replace(data=data) if isinstance(x, PackedSequence) else data
        return Case(layer, x, tuple(state.detach().double().requires_grad_() for state in self.states))


def case(
    kind: Callable[..., nn.RNNBase],
    *,
    packed: str = "",
    unbatched: bool = False,
    initial: bool = True,
    steps: int = STEPS,
    **options: Any,
) -> Case:
    torch.manual_seed(0)
    layer = kind(INPUT, HIDDEN, **options)
    batch = () if unbatched else (BATCH,)
    x: Any = torch.randn(steps, *batch, INPUT)
    if packed:
        lengths = LENGTHS if packed == "sorted" else (9, 20, 1, 14, 14)
        x = pack_padded_sequence(x, lengths, enforce_sorted=packed == "sorted")
        x = x._replace(data=x.data.requires_grad_())
    else:
        if layer.batch_first and not unbatched:
            x = x.transpose(0, 1).contiguous()
        x.requires_grad_()
    count = layer.num_layers * (1 + layer.bidirectional)
    sizes = [layer.proj_size or HIDDEN] + [HIDDEN] * isinstance(layer, nn.LSTM)
    states = [torch.randn(count, *batch, size, requires_grad=True) for size in sizes] if initial else []
    return Case(layer, x, tuple(states))


CASES = {
    "lstm": partial(case, nn.LSTM),
    "lstm 3 layers": partial(case, nn.LSTM, num_layers=3),
    "lstm no states": partial(case, nn.LSTM, initial=False),
    "lstm batch first": partial(case, nn.LSTM, num_layers=2, batch_first=True),
    "lstm no bias": partial(case, nn.LSTM, bias=False),
    "lstm bidirectional": partial(case, nn.LSTM, bidirectional=True, batch_first=True),
    "lstm dropout": partial(case, nn.LSTM, num_layers=3, dropout=0.3),
    "lstm all": partial(case, nn.LSTM, num_layers=2, bidirectional=True, dropout=0.4, batch_first=True),
    "lstm projected": partial(case, nn.LSTM, num_layers=2, proj_size=3, bidirectional=True),
    "lstm unbatched": partial(case, nn.LSTM, unbatched=True, batch_first=True),
    "lstm packed": partial(case, nn.LSTM, num_layers=2, packed="sorted"),
    "lstm packed, any order": partial(case, nn.LSTM, packed="unsorted", bidirectional=True, num_layers=2, dropout=0.2),
    "gru": partial(case, nn.GRU),
    "gru 2 layers": partial(case, nn.GRU, num_layers=2, initial=False),
    "gru all": partial(case, nn.GRU, num_layers=2, bidirectional=True, dropout=0.4, batch_first=True),
    "gru packed": partial(case, nn.GRU, packed="sorted", bidirectional=True),
    "gru unbatched": partial(case, nn.GRU, unbatched=True, bidirectional=True),
    "rnn tanh": partial(case, nn.RNN, num_layers=2),
    "rnn relu": partial(case, nn.RNN, nonlinearity="relu", bidirectional=True),
    "rnn packed": partial(case, nn.RNN, packed="unsorted", initial=False),
    "lstm one step": partial(case, nn.LSTM, bidirectional=True, steps=1),
    "gru three steps": partial(case, nn.GRU, steps=3),
    "rnn all dropped": partial(case, nn.RNN, num_layers=2, dropout=1.0),
}


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(found, exact, strict=True)]


def smallest_budget(made: Case) -> int:
    with pytest.raises(remat.InfeasibleBudget) as refused:
        made.called(remat.recurrent(made.layer, budget=1))
    return refused.value.smallest_budget_bytes


def training(made: Case, layer: nn.RNNBase) -> Callable[[], list[torch.Tensor]]:
    """A call with its backward, from nothing to all gradients."""

    def run() -> list[torch.Tensor]:
        for leaf in made.leaves(layer):
            leaf.grad = None
        results = made.called(layer)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        return results

    return run


# ---- the same results, within the budget


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_plain_layers_within_the_budget(name: str) -> None:
    made = CASES[name]()
    plain = made.trained(made.layer)
    stream = torch.get_rng_state()
    exact = made.double()
    reference = exact.trained(exact.layer)
    training(made, made.layer)()
    plain_bytes = remat.measure(training(made, made.layer)).peak_bytes
    smallest = smallest_budget(made)
    for budget in (smallest, max((2 * smallest + plain_bytes) // 3, smallest)):
        layer = remat.recurrent(made.layer, budget=budget)
        run = training(made, layer)
        assert remat.measure(run).peak_bytes <= budget  # measuring the layer's costs included
        assert remat.measure(run).peak_bytes <= budget
        found = made.trained(layer)
        assert torch.equal(torch.get_rng_state(), stream)
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in plain]
        assert found[0].stride() == plain[0].stride()
        for ours, theirs in zip(errors(found, reference), errors(plain, reference), strict=True):
            assert ours <= 2 * theirs + 4e-7


def test_a_smaller_budget_is_refused_and_says_the_smallest() -> None:
    made = case(nn.LSTM, num_layers=2, dropout=0.5)
    with pytest.raises(remat.InfeasibleBudget, match="the smallest that works is"):
        made.called(remat.recurrent(made.layer, budget=smallest_budget(made) - 1))


@pytest.mark.parametrize("name", CASES)
def test_the_plain_call_is_made_where_it_fits(name: str) -> None:
    made = CASES[name]()
    budgeted = remat.recurrent(made.layer, budget="64MiB")
    assert remat.measure(training(made, budgeted)).peak_bytes <= 2**26
    found = made.trained(budgeted)
    assert all(map(torch.equal, found, made.trained(made.layer)))


@pytest.mark.parametrize("chunk", [1, 6, 19, 20, 1000])
def test_a_given_chunk_length(chunk: int) -> None:
    made = case(nn.GRU, num_layers=2)
    found = made.trained(remat.recurrent(made.layer, budget="1MiB", chunk=chunk))
    for a, b in zip(found, made.trained(made.layer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_what_is_recomputed() -> None:
    made = case(nn.LSTM, num_layers=2)
    smallest = smallest_budget(made)
    tight, roomy = (remat.recurrent(made.layer, budget=smallest * k, chunk=4) for k in (3, 30))
    assert all(map(torch.equal, made.trained(tight), made.trained(roomy)))


def test_packed_states_of_finished_sequences_stay() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(INPUT, HIDDEN)
    sequences = [torch.randn(length, INPUT) for length in (7, 20, 1)]
    budgeted = remat.recurrent(layer, budget="1MiB", chunk=4)
    _, final = budgeted(pack_sequence(sequences, enforce_sorted=False))
    for index, sequence in enumerate(sequences):
        torch.testing.assert_close(final[0, index], layer(sequence)[1][0])


# ---- the same layer


def test_parameters_are_shared_and_the_layer_is_left_alone() -> None:
    layer = nn.LSTM(INPUT, HIDDEN, 2)
    budgeted = remat.recurrent(layer, budget="1MiB")
    assert isinstance(budgeted, nn.LSTM)
    assert type(layer) is nn.LSTM
    assert list(budgeted.state_dict()) == list(layer.state_dict())
    assert all(a is b for a, b in zip(budgeted.parameters(), layer.parameters(), strict=True))
    assert repr(budgeted) == "LSTM(6, 16, num_layers=2, budget='1MiB')"
    assert (
        repr(remat.recurrent(budgeted, budget="2MiB", chunk=8)) == "LSTM(6, 16, num_layers=2, budget='2MiB', chunk=8)"
    )
    budgeted.eval()
    assert layer.training


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(copied: Callable[[nn.RNNBase], nn.RNNBase]) -> None:
    made = case(nn.GRU, num_layers=2)
    budgeted = remat.recurrent(made.layer, budget=2 * smallest_budget(made))
    other = copied(budgeted)
    assert (type(other), other.budget) == (type(budgeted), budgeted.budget)
    assert next(other.parameters()) is not next(budgeted.parameters())
    assert all(map(torch.equal, made.trained(other), made.trained(budgeted)))


def test_to_and_load_state_dict() -> None:
    made = case(nn.LSTM).double()
    budgeted = remat.recurrent(nn.LSTM(INPUT, HIDDEN), budget=10**5, chunk=4).to(torch.float64)
    budgeted.load_state_dict(made.layer.state_dict())
    for a, b in zip(made.trained(budgeted), made.trained(made.layer), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("order", ["parametrized first", "budget first"])
def test_parametrizations(order: str) -> None:
    made = case(nn.GRU)
    layers = [copy.deepcopy(made.layer), copy.deepcopy(made.layer)]
    if order == "budget first":
        layers[1] = remat.recurrent(layers[1], budget=10**5, chunk=4)
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    if order == "parametrized first":
        layers[1] = remat.recurrent(layers[1], budget=10**5, chunk=4)
    for a, b in zip(made.trained(layers[1]), made.trained(layers[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_functional_call() -> None:
    made = case(nn.GRU)
    budgeted = remat.recurrent(made.layer, budget=10**5, chunk=4)
    weights = {name: value.detach() * 2 for name, value in made.layer.named_parameters()}
    found, wanted = (torch.func.functional_call(layer, weights, made.x)[0] for layer in (budgeted, made.layer))
    torch.testing.assert_close(found, wanted)


# ---- without autograd, in eval, with parts of it


def test_without_autograd_it_is_the_plain_layer() -> None:
    made = case(nn.LSTM, num_layers=2, dropout=0.5)
    budgeted = remat.recurrent(made.layer, budget=1)
    with torch.no_grad():
        torch.manual_seed(3)
        found = made.called(budgeted)
        torch.manual_seed(3)
        assert all(map(torch.equal, found, made.called(made.layer)))
    assert not copy.deepcopy(budgeted).requires_grad_(False)(made.x.detach())[0].requires_grad


def test_eval_draws_nothing() -> None:
    made = case(nn.GRU, num_layers=2, dropout=0.5)
    budgeted = remat.recurrent(made.layer, budget=10**5, chunk=4).eval()
    before = torch.get_rng_state()
    found = made.called(budgeted)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found[0], made.called(made.layer.eval())[0])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_some_results(which: int, bidirectional: bool) -> None:
    made = case(nn.GRU, num_layers=2, bidirectional=bidirectional)
    budgeted = remat.recurrent(made.layer, budget=10**6, chunk=5)
    found, wanted = (
        torch.autograd.grad(made.called(layer)[which].square().sum(), made.leaves(), allow_unused=True)
        for layer in (budgeted, made.layer)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("free", ["input", "states", "upper layer", "one weight"])
def test_frozen_parts(free: str) -> None:
    made = case(nn.LSTM, num_layers=2, bidirectional=True)
    named = dict(made.layer.named_parameters())
    chosen = {
        "input": [made.x],
        "states": list(made.states),
        "upper layer": [value for name, value in named.items() if "l1" in name],
        "one weight": [named["weight_hh_l0"]],
    }[free]
    for leaf in made.leaves():
        leaf.requires_grad_(any(leaf is one for one in chosen))
    budgeted = remat.recurrent(made.layer, budget=10**6, chunk=5)
    found, wanted = (torch.autograd.grad(made.called(layer)[0].sum(), chosen) for layer in (budgeted, made.layer))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hooks_see_whole_gradients_once() -> None:
    made = case(nn.GRU)
    budgeted = remat.recurrent(made.layer, budget=10**5, chunk=4)
    seen: list[torch.Tensor] = []
    weight = made.layer.weight_hh_l0
    handle = weight.register_hook(seen.append)
    training(made, budgeted)()
    handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], weight.grad)


def test_a_retained_graph_can_be_used_twice() -> None:
    made = case(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.5)
    loss = made.called(remat.recurrent(made.layer, budget=10**6, chunk=5))[0].sum()
    first = torch.autograd.grad(loss, made.leaves(), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, made.leaves(), allow_unused=True)
    assert all(map(torch.equal, first, second))


def test_second_derivatives_are_refused() -> None:
    made = case(nn.GRU)
    loss = made.called(remat.recurrent(made.layer, budget=10**5, chunk=4))[0].sum()
    with pytest.raises(remat.StepError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, [made.x], create_graph=True)


def test_inside_a_compiled_model_and_a_transform() -> None:
    made = case(nn.GRU, num_layers=2)
    budgeted = remat.recurrent(made.layer, budget=10**5, chunk=6)
    compiled = torch.compile(nn.Sequential(budgeted), backend="eager")
    found, wanted = (torch.autograd.grad(layer(made.x)[0].sum(), made.x)[0] for layer in (compiled, budgeted))
    assert torch.equal(found, wanted)
    found, wanted = (
        torch.func.grad(lambda x, layer=layer: layer(x)[0].sum())(made.x.detach()) for layer in (budgeted, made.layer)
    )
    assert torch.equal(found, wanted)


def test_nothing_is_left_behind() -> None:
    made = case(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.5)
    budgeted = remat.recurrent(made.layer, budget=10**6, chunk=6)
    gc.disable()
    try:
        for backward in (False, True):
            out = made.called(budgeted)[0]
            node = weakref.ref(out.grad_fn)
            if backward:
                out.sum().backward()
            del out
            assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_autocast(kind: type[nn.RNNBase]) -> None:
    made = case(kind, num_layers=2)
    budgeted = remat.recurrent(made.layer, budget=10**6, chunk=6)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            wanted = made.trained(made.layer)
        except RuntimeError as error:
            pytest.skip(f"the plain layer fails too: {error}")
        found = made.trained(budgeted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).float().norm() / b.float().norm()) < 0.02


# ---- what is refused


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"remat\.scan"):
        remat.recurrent(nn.LSTMCell(2, 3))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="at least one step"):
        remat.recurrent(nn.GRU(2, 3), chunk=0)
    with pytest.raises(ValueError, match="not a size"):
        remat.recurrent(nn.GRU(2, 3), budget="a lot")(torch.zeros(4, 1, 2))
    with pytest.raises(RuntimeError, match=r"input\.size\(-1\) must be equal to input_size"):
        remat.recurrent(nn.GRU(2, 3))(torch.zeros(4, 1, 5))
