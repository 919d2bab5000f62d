"""`remat.profile`: measured against the meter, worked out on paper against measured, equal blocks once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import remat
from nets import Decoder, Residual
from remat.blocks import costs as blockcosts
from remat.blocks import survey
from remat.chains import Tape
from remat.profiler import Costs
from remat.ranges import SELECTIVE
from remat.schedules import Record
from stacks import STACKS

RATES = remat.Rates(flops_per_s=2e10, bytes_per_s=5e9)
Blocks = list[Any]


def residual(channels: int = 16) -> tuple[Blocks, Tensor]:
    return [Residual(channels) for _ in range(5)], torch.randn(4, channels, 16, 16)


def narrowing() -> tuple[Blocks, Tensor]:
    blocks = [
        Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        Residual(32),
        Residual(32),
        nn.Flatten(),
        nn.Linear(2048, 10),
    ]
    return blocks, torch.randn(4, 16, 16, 16)


def decoders() -> tuple[Blocks, Tensor]:
    return [Decoder(), Decoder(), nn.LayerNorm(32)], torch.randn(8, 32, 32)


CHAINS: dict[str, Callable[[], tuple[Blocks, Tensor]]] = {f.__name__: f for f in (residual, narrowing, decoders)}


def made(name: str) -> tuple[Blocks, Tensor]:
    torch.manual_seed(8)
    return CHAINS[name]()


def plain_peak(blocks: Blocks, x: Tensor) -> int:
    def train() -> None:
        y = x
        for block in blocks:
            y = block(y)
        y.backward(torch.ones_like(y))

    train()
    return remat.measure(train).peak_bytes  # gradients are there already


def close(a: int, b: int, scale: int, share: float = 0.03) -> bool:
    return abs(a - b) <= share * scale


def assert_close(paper: remat.Chain, measured: remat.Chain, share: float = 0.03, over_bytes: int = 0) -> None:
    """Every size within a share of what the stage needs in all, backward's workspace not more than so much above."""
    assert paper.length == measured.length
    for k in range(paper.length):
        ours, theirs = paper.stage(k), measured.stage(k)
        scale = theirs.carry_bytes + theirs.menu[0].tape_bytes + theirs.menu[0].backward_workspace_bytes
        for name in ("carry_bytes", "workspace_bytes", "gradient_bytes"):
            assert close(getattr(ours, name), getattr(theirs, name), scale, share), (k, name, ours, theirs)
        for a, b in zip(ours.menu, theirs.menu, strict=False):
            over = a.backward_workspace_bytes - b.backward_workspace_bytes
            assert -share * scale <= over <= share * scale + over_bytes
            for name in Tape.__struct_fields__:
                if name.endswith("bytes") and name != "backward_workspace_bytes":
                    assert close(getattr(a, name), getattr(b, name), scale, share), (k, name, a, b)
    for name in remat.Chain.__struct_fields__:
        if name.endswith("bytes"):
            assert close(getattr(paper, name), getattr(measured, name), measured.final_carry_bytes + 10_000), name


@pytest.mark.parametrize("name", CHAINS)
def test_the_plain_peak_is_that_of_keeping_everything(name: str) -> None:
    """A profile, worked out or measured, predicts what the plain loop was measured to take."""
    peak = plain_peak(*made(name))
    blocks, x = made(name)
    for block in blocks:
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
    measured = remat.profile(blocks, x, progress=False)
    paper = remat.profile(blocks, x, device="meta", rates=RATES)
    for chain in (measured, paper):
        predicted = remat.plan(chain, "1GiB").peak_bytes
        assert close(predicted, peak, peak), (predicted, peak)


@pytest.mark.parametrize("name", CHAINS)
def test_paper_is_close_to_measured(name: str) -> None:
    blocks, x = made(name)
    share = 0.06 if name == "narrowing" else 0.03  # what a convolution of stride 2 holds inside its backward
    assert_close(remat.profile(blocks, x, device="meta", rates=RATES), remat.profile(blocks, x, progress=False), share)


def lstm() -> tuple[Any, Any, Tensor]:
    cell, start = nn.LSTMCell(32, 128), (torch.zeros(16, 128), torch.zeros(16, 128))

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        carry = cell(x, carry)
        return carry, carry[0].square().mean()

    return step, start, torch.randn(40, 16, 32)


def test_a_step_on_paper() -> None:
    torch.manual_seed(8)
    step, carry, xs = lstm()
    measured = remat.profile(step, carry=carry, xs=xs)
    paper = remat.profile(step, carry=carry, xs=xs, device="meta", rates=RATES)
    assert_close(paper, measured, over_bytes=measured.parameter_gradient_bytes)  # fake gradients add up out of place


# What paper does not see: streams of random numbers other than PyTorch's; what a fused kernel allocates for itself;
# values of tensors, which are refused.
UNSEEN = {"noise-from-everywhere", "recurrent-layers", "counters-and-lists"}


@pytest.mark.parametrize("name", sorted(STACKS.keys() - UNSEEN))
def test_stacks_of_layers_on_paper(name: str) -> None:
    program = STACKS[name]()
    arguments, named = program.xs or ((), {})
    with program.around():
        measured = remat.profile(program.step, program.carry, *arguments, progress=False, **named)
        paper = remat.profile(program.step, program.carry, *arguments, device="meta", rates=RATES, **named)
    assert paper.length == measured.length
    slack = torch.get_rng_state().nbytes  # a stream that was drawn from
    for k in range(paper.length):
        ours, theirs = paper.stage(k), measured.stage(k)
        assert abs(ours.carry_bytes - theirs.carry_bytes) <= slack
        assert close(ours.menu[0].tape_bytes, theirs.menu[0].tape_bytes, theirs.menu[0].tape_bytes + slack, 0.05)
        assert ours.gradient_bytes == theirs.gradient_bytes


def test_nothing_is_allocated_on_paper_and_nothing_runs() -> None:
    """A network of 64 GiB of weights, on the device "meta"; a real one, whose blocks count their calls with values."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(2**16, 2**16), nn.Tanh()) for _ in range(4)]
        x = torch.empty(2**14, 2**16)
    measured = remat.measure(lambda: remat.profile(blocks, x, rates=RATES))
    chain = measured.value
    assert measured.peak_bytes < 2**16
    assert chain.length == 4
    assert chain.stage(1).gradient_bytes == 4 * (2**32 + 2**16)
    assert chain.stage(1).carry_bytes == 4 * 2**30
    assert chain.stage(1).menu[0].tape_bytes == 0  # tanh keeps its result, which is the next carry
    assert chain.stage(1).menu[0].leaving_bytes == 4 * 2**30
    assert chain.stage(1).forward_s == pytest.approx(2 * 2**46 / RATES.flops_per_s, rel=0.2)


def test_equal_blocks_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def counting(*arguments: Any) -> Any:
        calls[0] += 1
        return blockcosts.measured(*arguments)

    def count(length: int, rows: int) -> int:
        calls[0] = 0
        blocks = [nn.Sequential(nn.Linear(25, 25), nn.Tanh()) for _ in range(length)]
        assert remat.profile(blocks, torch.randn(rows, 25, requires_grad=True), progress=False).length == length
        return calls[0]

    monkeypatch.setattr(survey, "measured", counting)
    assert count(9, 7) == 1
    assert count(40, 7) == 0  # none is new, however many there are
    assert count(40, 8) == 1  # on another carry they are


def test_a_chain_is_saved_and_loaded() -> None:
    chain = remat.profile(*made("residual"), progress=False)
    assert remat.Chain.from_json(chain.to_json()) == chain


def test_selective_tapes_come_onto_the_menu_and_into_plans() -> None:
    """On paper seconds are not disturbed: a block of convolutions is worth it, one of a single product is not."""
    chain = remat.profile(*made("residual"), rates=RATES, device="meta")
    whole, selective = chain.stage(0).menu
    assert selective.name == "selective"
    assert selective.tape_bytes == 4 * 16 * 16 * 16 * 4  # the first convolution's result
    assert whole.backward_s < selective.backward_s < whole.backward_s + chain.stage(0).forward_s
    assert len(remat.profile([nn.Linear(8, 8)], torch.randn(4, 8), rates=RATES, device="meta").stage(0).menu) == 1
    everything = remat.plan(chain, "1GiB")
    most = everything.peak_bytes
    entries = {
        action.entry
        for share in (0.5, 0.7, 0.8)
        for action in remat.plan(chain, int(share * most)).schedule
        if isinstance(action, Record)
    }
    assert SELECTIVE in entries


def test_refusals_say_what_to_do() -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match="carry= and xs="):
        remat.profile(lambda carry, x: (carry, x), x)
    with pytest.raises(ValueError, match='device="meta"'):
        remat.profile([net], x, device="cuda")
    with pytest.raises(remat.StepError, match="nothing to plan"):
        remat.profile([nn.Tanh()], x)
    with pytest.raises(remat.StepError, match="asks for values of tensors"):
        remat.profile([net, lambda y: y * y.sum().item()], x, device="meta", rates=RATES)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from([8, 16, 24]), min_size=2, max_size=5), st.sampled_from(["relu", "gelu", "dropout"]))
def test_random_perceptrons_on_paper(widths: list[int], kind: str) -> None:
    activation: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "dropout": lambda y: F.dropout(y, 0.3),
    }
    function = activation[kind]
    linears = [nn.Linear(8 * a, 8 * b) for a, b in zip([8, *widths], widths, strict=False)]
    blocks = [lambda y, linear=linear: function(linear(y)) for linear in linears]
    x = torch.randn(40, 64)
    measured = remat.profile(blocks, x, progress=False)
    paper = remat.profile(blocks, x, device="meta", rates=RATES)
    assert_close(paper, measured)


@pytest.mark.parametrize(
    ("held", "workspace", "room"), [(0, 900, 0), (50, 900, 50), (50, 130, 30), (50, 20, 0)], ids=str
)
def test_room_for_what_a_first_pass_holds_is_no_more_than_that(held: int, workspace: int, room: int) -> None:
    """A step of 10 bytes of carry and of outputs, whose backward takes 100 and whose forward takes more or less."""
    stage = remat.Stage(10, (remat.Tape(30, backward_workspace_bytes=100),), workspace_bytes=workspace)
    costs = Costs(stage, 10, 10, 10, 0, state_bytes=7, first_pass_bytes=held)
    assert costs.chain(5, 0).output_bytes == 5 * 10 + 7 + room
