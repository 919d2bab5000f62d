"""Selective tapes inside `remat.scan`: every program that can have them, bit for bit the plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

import remat
from budgets_of import settings_at
from plain import assert_same, observe, plain_scan
from remat import knowledge
from remat.chains import Chain
from remat.plans import Plan, plan
from remat.ranges import SELECTIVE
from remat.schedules import Action, Record, Schedule
from steps import PROGRAMS

# Their stages change the carry in place, transform functions, or run a backward of their own.
WHOLE_ONLY = {"carry-changed-in-place", "fast-weights-learned-inside", "nested-gradient-transform"}


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
    monkeypatch.setattr(knowledge, "plan", selective_plan)
    monkeypatch.setattr(knowledge, "_plans", knowledge._Memory())
    assert_same(observe(partial(remat.scan, **settings_at(make(), "half")), make()), expected)


@pytest.mark.parametrize("name", ["fast-weights-learned-inside", "nested-gradient-transform"])
def test_stages_that_cannot_have_one_have_none_on_the_menu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[remat.Chain] = []

    def noted(chain: Chain, budget_bytes: int, planner: str) -> Plan:
        found.append(chain)
        return plan(chain, budget_bytes, planner)

    monkeypatch.setattr(knowledge, "profile", partial(knowledge.profile, selective=True))
    monkeypatch.setattr(knowledge, "plan", noted)
    for memory in ("_plans", "_costs"):
        monkeypatch.setattr(knowledge, memory, knowledge._Memory())
    make = PROGRAMS[name]
    expected = observe(plain_scan, make())
    assert_same(observe(partial(remat.scan, budget="1GiB"), make()), expected)
    assert {len(chain.runs[0][0].menu) for chain in found} == {1}
