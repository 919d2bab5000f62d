"""The nodes at both ends of recorded graphs: applied in either way, and run first in whatever thread a backward comes.

Sums over ranges begin with what newer ranges left, so bits tell whether the node that hands that in has run first.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import remat
from plain import plain_scan
from remat import boundary_nodes as nodes
from remat import ranges
from remat.ambient import States
from remat.calls import Call
from remat.inputs import Inputs
from remat.knowledge import nature_of
from remat.loops import Outputs
from remat.recorded import sequence_number
from remat.schedules import Action, Advance, Backward, Drop, Load, Record, Store
from steps import PROGRAMS, Program

STEPS = 9
FIRST = [Record(0, 2), Record(2, 4), Store(4), Advance(4, 7), Record(7, 9)]
THEN = [Backward(7, 9), Load(4), Record(4, 7), Drop(4), Backward(4, 7), Backward(2, 4), Backward(0, 2)]


def wanted_of(program: Program) -> list[Tensor]:
    carry, _ = plain_scan(program.step, program.carry, program.xs)
    return list(torch.autograd.grad(carry.sum(), list(program.wrt.values())))


@pytest.mark.parametrize("ahead", ["the forward's", "the backward's"])
def test_sums_go_on_where_newer_ranges_left_them_in_any_thread(ahead: str) -> None:
    """Threads count their nodes apart: what is recorded in the backward may have smaller numbers or larger ones."""
    program = PROGRAMS["elman"](STEPS)
    call = Call(program.step, program.carry, Inputs(program.xs, None))
    loop = call.loop(Outputs(STEPS), call.carry, call.inputs.leaves)
    run = call.interpreter(loop, nature_of(call), iter(()), call.carry, States(call.sources), STEPS)
    found: dict[int, Tensor | None] = {}

    def do(actions: list[Action], numbered_from: int) -> None:
        while sequence_number() < numbered_from:
            call.captured[0].sum()
        for action in actions:
            run.do(action)

    def backward() -> None:
        run.start_backward([torch.ones_like(program.carry)], [None])
        do(THEN, 0 if ahead == "the forward's" else forwards)
        found.update(zip(map(id, call.captured), run.captured.gradients, strict=True))

    do(FIRST, 1000)
    forwards = sequence_number()
    run.settle()
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    names = [name for name, tensor in program.wrt.items() if id(tensor) in found]
    assert len(names) == 2
    for name, wanted in zip(program.wrt, wanted_of(program), strict=True):
        if name in names:
            assert torch.equal(wanted, found[id(program.wrt[name])])  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["_are_functorch_transforms_active", None])
def test_nodes_are_applied_in_the_public_way_where_the_private_one_is_missing(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        if missing is not None:
            patched.delattr(torch._C, missing)
        taken = nodes.applied(nodes.Enter), nodes.applied(nodes.Resume)
    publicly = [way == function.apply for way, function in zip(taken, (nodes.Enter, nodes.Resume), strict=True)]
    assert publicly == [missing is not None] * 2
    monkeypatch.setattr(ranges, "enter", taken[0])
    monkeypatch.setattr(nodes, "_resume", taken[1])
    program = PROGRAMS["elman"](STEPS)
    carry, _ = remat.scan(program.step, program.carry, program.xs, budget="1GiB", planner="constant")
    found = torch.autograd.grad(carry.sum(), list(program.wrt.values()))
    assert all(map(torch.equal, wanted_of(PROGRAMS["elman"](STEPS)), found))
