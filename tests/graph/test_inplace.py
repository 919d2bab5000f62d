"""Results that overwrite their inputs: the same bits, fewer bytes, nothing overwritten that anybody reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from graph.corpus import CASES, captured, case
from graph.running import emitted, run
from remat.graph import inplace, inplace_ops
from remat.graph.arena import load_bytes
from remat.graph.blocks import LEAVING, blocks
from remat.graph.capture import capture
from remat.graph.emission import emit
from remat.graph.liveness import liveness, without_dead
from remat.graph.lowering import straight
from remat.graph.op_costs import estimated
from remat.graph.strategies import names, strategy


@pytest.mark.parametrize("name", CASES)
def test_results_are_equal_and_bytes_as_foreseen(name: str) -> None:
    found = captured(name)
    graph = found.graph
    candidates = inplace_ops.candidates(found.nodes)
    for program in (graph.plain, *(strategy(each)(graph) for each in names())):
        program = without_dead(graph, program)
        expected = run(found, case(name), program)
        taken = inplace.plan(graph, program, candidates)
        got = emitted(found, case(name), program, taken)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[k], expected[k]) for k in expected)
        before, after = liveness(graph, program), liveness(graph, program, in_place=taken)
        assert all(a <= b for a, b in zip(after.during, before.during, strict=True))
        for in_place in ({}, taken):
            lifetimes = blocks(graph, program, in_place=in_place)
            if not in_place:
                leaving = {s for g in graph.final_gradients for s in graph.nodes[g].storages}
                expected_bytes = sum(graph.storages[s].bytes for s in leaving if not graph.storages[s].external)
                assert sum(one.bytes for one in lifetimes if one.kind == LEAVING) == expected_bytes
            assert load_bytes(lifetimes)[1].max() == liveness(graph, program, in_place=in_place).peak_bytes


def test_measured_bytes_fall_as_foreseen() -> None:
    case_ = case("sigmoids")
    args = (torch.randn(400, 32), *case_.args[1:])
    from graph.corpus import Captured, Case
    from graph.joint import joint

    found = Captured(*joint(case_.function, *args, parameters=(1, 2)))
    graph = found.graph
    program = without_dead(graph, graph.plain)
    taken = inplace.plan(graph, program, inplace_ops.candidates(found.nodes))
    for in_place in ({}, taken):
        peak = remat.measure(lambda i=in_place: emitted(found, Case(case_.function, args), program, i)).peak_bytes
        # The tangent, a number, and the generator's state are the test's own.
        assert liveness(graph, program, in_place=in_place).peak_bytes == pytest.approx(peak, rel=0.02)
    assert liveness(graph, program, in_place=taken).peak_bytes < 0.8 * liveness(graph, program).peak_bytes


def overwriting(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[str]:
    """What the emitted forward of a function overwrites something with, checked to give the same bits."""
    module = make_fx(function, tracing_mode="fake")(x)
    module.graph.output_node().args = ([module.graph.output_node().args[0]],)
    graph, nodes = capture(module, 1, costs=estimated)
    program = without_dead(graph, graph.plain)
    taken = inplace.plan(graph, program, inplace_ops.candidates(nodes))
    forward, _ = emit(module, nodes, graph, program, 1, taken)
    given = x.clone()
    (found,) = straight(forward)([given])
    assert torch.equal(found, function(x))
    assert torch.equal(given, x)
    plain = {node.target for node in nodes}
    return [str(node.target) for node in forward.graph.nodes if node.op == "call_function" and node.target not in plain]


X = torch.linspace(-2, 2, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.exp().neg(), ["aten.neg_.default"]),
        (lambda x: x.neg().exp().relu(), ["aten.exp_.default", "aten.relu_.default"]),
        (lambda x: x - x.exp(), ["aten.sub.out"]),  # the dead input comes second
        (lambda x: x.exp() * x.neg(), ["aten.mul_.Tensor"]),
        (lambda x: torch.where(x > 0, x, x.exp()), ["aten.where.self_out"]),
    ],
    ids=["first", "chain", "second", "either", "third"],
)
def test_what_is_overwritten(function: Callable[..., torch.Tensor], expected: list[str]) -> None:
    assert overwriting(function, X) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp(),
        lambda x: x.view(4, 3).exp(),
        lambda x: (lambda e: torch.stack([e.neg(), e]))(x.exp()),
        lambda x: (lambda e: torch.cat([e.neg(), e.view(3, 4)]))(x.exp()),
        lambda x: x.exp() > 1,
        lambda x: x.exp()[:2].neg(),
        lambda x: x.exp()[:, :1] * x,
        lambda x: x[:, :1].exp().expand(3, 4).neg(),
        lambda x: torch.mm(x.exp(), x.t()),
        lambda x: (lambda e: torch.add(e, e.as_strided((3, 4), (1, 3))))(x.exp()),
    ],
    ids=[
        *("the caller's", "a view of the caller's", "read later", "read later through a view", "another type"),
        *("a part", "another shape", "many elements in one place", "not elementwise", "read in another order"),
    ],
)
def test_what_is_not(function: Callable[..., torch.Tensor]) -> None:
    assert overwriting(function, X) == []
