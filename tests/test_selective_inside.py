"""Selective tapes inside `remat.scan` and `remat.chain`: all programs that can have them, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
import pytest

import remat
from budgets_of import settings_at
from plain import assert_same, observe, plain_scan
from remat import knowledge, trials
from remat.blocks import calls as blockcalls
from remat.blocks import costs as blockcosts
from remat.blocks import survey
from remat.chains import Chain, Tape
from remat.plans import Plan, plan
from remat.ranges import SELECTIVE
from remat.recent import Recent
from remat.schedules import Action, Backward, Record, Schedule
from stacks import STACKS, budget_at, chained, plain_chain
from steps import PROGRAMS

# Their stages change the carry in place, transform functions, or run a backward of their own.
WHOLE_ONLY = {
    "carry-changed-in-place",
    "carry-changed-in-place-after-a-hook",
    "fast-weights-learned-inside",
    "nested-gradient-transform",
}


def selective_where_possible(chain: Chain, budget_bytes: int, planner: str) -> Plan:
    """The plan with every stage recorded selectively whose menu says so; ranges are cut for it."""
    made = plan(chain, budget_bytes, planner)
    entries = [len(chain.stage(k).menu) - 1 for k in range(chain.length)]

    def actions() -> Iterator[Action]:
        for action in made.schedule:
            if isinstance(action, Record | Backward):
                stages = range(action.start, action.stop)
                for k in stages if isinstance(action, Record) else reversed(stages):
                    yield Record(k, k + 1, entries[k]) if isinstance(action, Record) else Backward(k, k + 1)
            else:
                yield action

    return dataclasses.replace(made, schedule=Schedule(chain.length, made.planner, actions))


def everything_on_the_menu(whole: Tape, others: Iterable[Tape], _advance_s: float) -> tuple[Tape, ...]:
    return (whole, *others)


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_of_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = STACKS[name]
    expected = observe(plain_chain, make())
    monkeypatch.setattr(blockcosts, "menu_of", everything_on_the_menu)
    monkeypatch.setattr(blockcosts, "keeps_less", lambda *_: True)
    monkeypatch.setattr(survey, "_known", Recent(9))
    budget = budget_at(make(), 0.6)
    monkeypatch.setattr(blockcalls, "plan", selective_where_possible)
    monkeypatch.setattr(blockcalls, "_plans", Recent(9))
    assert_same(observe(chained(budget=budget), make()), expected)


def selective_plan(chain: Chain, budget_bytes: int, planner: str) -> Plan:
    """The plan with every stage recorded selectively, whatever is on the menu."""
    made = plan(chain, budget_bytes, planner)

    def actions() -> Iterator[Action]:
        for action in made.schedule:
            yield msgspec.structs.replace(action, entry=SELECTIVE) if isinstance(action, Record) else action

    return dataclasses.replace(made, schedule=Schedule(chain.length, made.planner, actions))


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - WHOLE_ONLY))
def test_every_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = PROGRAMS[name]
    expected = observe(plain_scan, make())
    monkeypatch.setattr(knowledge, "_paced", lambda _, chain, __, *rest: selective_plan(chain, *rest))
    for memory in ("_plans", "_arrived"):  # a chain has no seconds and bytes of that entry
        monkeypatch.setattr(knowledge, memory, Recent(9))
    assert_same(observe(partial(remat.scan, **settings_at(make(), "half")), make()), expected)


@pytest.mark.parametrize("name", ["fast-weights-learned-inside", "nested-gradient-transform"])
def test_stages_that_cannot_have_one_have_none_on_the_menu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[remat.Chain] = []

    def noted(chain: Chain, budget_bytes: int, planner: str) -> Plan:
        found.append(chain)
        return plan(chain, budget_bytes, planner)

    monkeypatch.setattr(trials, "profile", partial(trials.profile, selective=True))
    monkeypatch.setattr(knowledge, "plan", noted)
    for memory in ("_plans", "_costs"):
        monkeypatch.setattr(knowledge, memory, Recent(9))
    make = PROGRAMS[name]
    expected = observe(plain_scan, make())
    assert_same(observe(partial(remat.scan, budget="1GiB"), make()), expected)
    assert {len(chain.runs[0][0].menu) for chain in found} == {1}
