"""Paces: what a step takes in ranges of any length, read off ranges of a few, and what a schedule takes then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import remat
from plain import plain_scan, same
from remat.paces import Pace, Paces, joined, paces_of, timed_ranges, timed_schedule
from remat.schedules import Action, Advance, Backward, Record, Store
from remat.simulator import simulate

ONCE, STEP = {Advance: 3.0, Record: 20.0, Backward: 10.0}, {Advance: 5.0, Record: 6.0, Backward: 11.0}


def seconds_of(action: Action) -> float:
    """What an action takes that costs something once and something a step."""
    if not isinstance(action, Advance | Record | Backward):
        return 0.5
    return ONCE[type(action)] + STEP[type(action)] * (action.stop - action.start)


def timed(longest: int, more_s: float = 0.0) -> list[tuple[Action, float]]:
    actions = timed_schedule(longest)
    return [(a, seconds_of(a) + (more_s * (a.stop - a.start) if isinstance(a, Advance) else 0)) for a in actions]


@given(longest=st.integers(1, 200))
def test_the_timed_schedule_is_legal_and_ends_before_its_trial_does(longest: int) -> None:
    stage = remat.Stage(1, (remat.Tape(1),))
    length = sum(timed_ranges(longest))
    found = simulate(remat.Chain.repeat(stage, length), timed_schedule(longest))
    assert found.recorded_runs == length
    assert max(timed_ranges(longest)) == longest


@given(longest=st.integers(3, 200), length=st.integers(1, 200))
def test_what_costs_once_and_by_the_step_is_known_for_every_length_between(longest: int, length: int) -> None:
    paces = paces_of([timed(longest, more_s=2.0)], [timed(longest), timed(longest)])
    length = min(length, longest)
    for pace, kind in ((paces.advance, Advance), (paces.record[0], Record), (paces.backward[0], Backward)):
        assert pace.at(length) * length == pytest.approx(ONCE[kind] + STEP[kind] * length)
        assert pace.at(10 * longest) == pytest.approx(pace.at(longest)), "beyond the longest, nothing is known"
    assert paces.first_s == pytest.approx(2.0)


@given(lengths=st.lists(st.integers(1, 60), min_size=1))
def test_an_average_is_over_steps(lengths: list[int]) -> None:
    pace = paces_of([timed(64)], [timed(64)]).record[0]
    wanted = sum(pace.at(length) * length for length in lengths) / sum(lengths)
    assert pace.over(Counter(lengths)) == pytest.approx(wanted)
    assert pace.over(Counter()) == pace.at(64)


def brute_force(paces: Paces, chain: remat.Chain, schedule: Iterable[Action]) -> float:
    """Seconds of a schedule, action by action, and step by step what first runs take more."""
    total, reached = 0.0, 0
    entries: dict[int, int] = {}
    for action in schedule:
        if isinstance(action, Store) and reached < chain.length:
            total += paces.keeping_s
        if isinstance(action, Backward):
            total += paces.backward[entries[action.stop]].at(action.stop - action.start) * (action.stop - action.start)
        if not isinstance(action, Advance | Record):
            continue
        is_record = isinstance(action, Record)
        pace = paces.record[action.entry] if isinstance(action, Record) else paces.advance
        total += pace.at(action.stop - action.start) * (action.stop - action.start)
        new = [k for k in range(action.start, action.stop) if k >= reached]
        reached = max(reached, action.stop)
        total += paces.first_s * len(new)
        if isinstance(action, Record):
            entries[action.stop] = action.entry
            tape = chain.stage(0).menu[action.entry]
            total += paces.page_s * (tape.tape_bytes + tape.entering_bytes) * len(new)
            total += paces.keeping_s if new and is_record else 0
    return total


@pytest.mark.parametrize("budget", [60, 90, 200, 10_000])
def test_a_chain_at_a_schedules_paces_takes_what_its_actions_take(budget: int) -> None:
    one = paces_of([timed(16, more_s=2.0)], [timed(16)])
    lean = Pace((1, 8), (50.0, 40.0))
    other = Paces(one.advance, (lean,), (one.backward[0],))
    both = joined([one, other])
    assert both is not None
    assert joined([one, None]) is None
    both = Paces(both.advance, both.record, both.backward, both.first_s, keeping_s=0.25, page_s=0.01)
    stage = remat.Stage(4, (remat.Tape(20, entering_bytes=4), remat.Tape(9, entering_bytes=4, name="lean")))
    chain = remat.Chain.repeat(stage, 30)
    made = remat.plan(chain, budget)
    assert simulate(both.on(chain, made.schedule), made.schedule).seconds == pytest.approx(
        brute_force(both, chain, made.schedule)
    )


def test_a_plan_for_a_loop_knows_ranges_of_several_lengths() -> None:
    """Where there is room, and one step takes little; a call of a different length is judged by its own ranges."""
    torch.manual_seed(0)
    cell, start = torch.nn.RNNCell(4, 8), torch.zeros(2, 8)

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = cell(x, h)
        return h, h.square().mean()

    def made(length: int) -> remat.Plan:
        return remat.plan_scan(step, start, torch.randn(length, 2, 4), budget="1GiB")

    tapes = [made(length).chain.stage(0).menu[0] for length in (50, 1, 1)]
    assert tapes[1] == tapes[2], "measured once"
    assert len({tape.forward_s for tape in tapes}) == 2, "one step alone takes another time than one of fifty"


@pytest.mark.parametrize("kind", ["list", "attribute"])
def test_steps_that_are_only_timed_change_nothing(kind: str) -> None:
    """They go further than the first few, which tell what a step changes."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count, self.seen = nn.Linear(4, 4), 0, list[int]()

        def forward(self, carry: tuple[Tensor, int], x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
            h, t = carry
            h = torch.tanh(self.linear(h) + x + self.count + len(self.seen))
            if t >= 6 and kind == "list":
                self.seen.append(t)
            elif t >= 6:
                self.count += 1
            return (h, t + 1), h

    def trained(loop: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        net, results = Late(), list[Any]()
        for _ in range(2):
            ys = loop(net, (torch.zeros(3, 4), 0), torch.randn(40, 3, 4))[1]
            ys.sum().backward()
            results += [ys.detach(), net.linear.weight.grad.clone(), net.count, list(net.seen)]
        return results

    assert same(trained(partial(remat.scan, budget="1GiB")), trained(plain_scan))
