"""Plans of our own for traced loops: two ranges, each recorded in a way that the test chooses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import remat
from remat import knowledge
from remat.schedules import Advance, Backward, Load, Record
from remat.traced.fusing import compiler_at_hand

COMPILED = pytest.mark.skipif(not compiler_at_hand(), reason="there is no compiler for Inductor")
_make = knowledge.plan


def recorded_in_halves(monkeypatch: pytest.MonkeyPatch, late: str, early: str) -> list[remat.Plan]:
    """From now on plans record the late half of a loop, then the early one, with these entries of the menu by name.

    Returns:
        The plans that will have been made.
    """
    plans: list[remat.Plan] = []

    def planned(chain: remat.Chain, *more: Any) -> remat.Plan:
        half, names = chain.length // 2, [tape.name for tape in chain.stage(0).menu]
        last, first = Record(half, chain.length, names.index(late)), Record(0, half, names.index(early))
        ends = Backward(half, chain.length), Backward(0, half)
        schedule = [Advance(0, half), last, ends[0], Load(0), first, ends[1]]
        plans.append(dataclasses.replace(_make(chain, *more), schedule=schedule))
        return plans[-1]

    monkeypatch.setattr(knowledge, "plan", planned)
    return plans
