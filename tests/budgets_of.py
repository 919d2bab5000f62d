"""Budgets for a program: from one in which everything fits to the smallest that works."""

from __future__ import annotations

from typing import Any

import torch

import remat
from plain import Program

AMPLE = "1GiB"
# Shares of the way from the smallest budget to that of keeping all; or a planner that recomputes at any budget.
LEVELS: dict[str, float | str] = {"ample": 1.0, "half": 0.5, "tight": 0.1, "smallest": 0.0, "constant": "constant"}


def plan_of(program: Program, budget: int | str, planner: str = "auto") -> remat.Plan:
    with program.around(), torch.enable_grad():
        return remat.plan_scan(
            program.step, program.carry, program.xs, length=program.length, budget=budget, planner=planner
        )


def smallest_budget(program: Program) -> int:
    """What a refusal says."""
    try:
        made = plan_of(program, 1)
    except remat.InfeasibleBudget as refusal:
        return refusal.smallest_budget_bytes
    raise AssertionError(f"a budget of one byte was enough for {made}")


def settings_at(program: Program, level: str) -> dict[str, Any]:
    """What to give `remat.scan`, by the name of a level; the program is used up by it."""
    share = LEVELS[level]
    if isinstance(share, str):
        return {"budget": AMPLE, "planner": share}
    if share == 1.0:
        return {"budget": AMPLE}
    smallest = smallest_budget(program)
    if not share:
        return {"budget": smallest}
    # The peak is that of the gradients that have arrived so far; a budget has room for more.
    return {"budget": smallest + int(share * max(plan_of(program, AMPLE).peak_bytes - smallest, 0))}
