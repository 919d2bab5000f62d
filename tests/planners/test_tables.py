"""The numbers of the reference tables, by counting the forward runs of the schedules, not by asking the planners."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from remat.planners import planner
from remat.planners.room import in_paper_units
from remat.schedules import Advance, Record
from remat.simulator import simulate

DATA = Path(__file__).parents[1] / "data"
PLANNERS = {"HSM": "hsm", "ISM": "ism", "MSM": "tight"}


def rows(name: str) -> list[dict[str, str]]:
    lines = (DATA / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def forward_runs(name: str, steps: int, slots: int, alpha: int = 2) -> int:
    chain, budget = in_paper_units(name, steps, slots, alpha)
    schedule = planner(name)(chain, budget)
    if steps > 1000:  # whether they are legal is seen in the shorter ones
        return sum(action.stop - action.start for action in schedule if isinstance(action, Advance | Record))
    found = simulate(chain, schedule)
    assert found.peak_bytes <= budget
    assert found.recorded_runs == steps
    return found.forward_runs


@pytest.mark.parametrize("kind", PLANNERS)
def test_exhaustive_search_finds_nothing_better(kind: str) -> None:
    cases = [row for row in rows("exhaustive") if row["kind"] == kind]
    assert len(cases) >= 44
    for row in cases:
        found = forward_runs(PLANNERS[kind], int(row["t"]), int(row["m"]), int(row["alpha"]) or 2)
        assert found == int(row["cost"]), row


@pytest.mark.parametrize("row", rows("hsm_ism"), ids=lambda row: f"{row['t']}-{row['m']}")
@pytest.mark.parametrize("name", ["hsm", "ism"])
def test_hsm_and_ism(row: dict[str, str], name: str) -> None:
    assert forward_runs(name, int(row["t"]), int(row["m"])) == int(row[f"{name}_cost"])


@pytest.mark.parametrize("row", rows("msm"), ids=lambda row: f"{row['t']}-{row['m']}-{row['alpha']}")
@pytest.mark.parametrize(("name", "column"), [("msm", "msm_paper_cost"), ("tight", "msm_tight_cost")])
def test_msm(row: dict[str, str], name: str, column: str) -> None:
    if not row[column]:
        assert int(row["t"]) > 1000, "the table has no value for a size where it should"
        return
    assert forward_runs(name, int(row["t"]), int(row["m"]), int(row["alpha"])) == int(row[column])


def test_the_papers_headline() -> None:
    assert forward_runs("ism", 1000, 50) == 1950


@pytest.mark.parametrize(("name", "least"), [("hsm", 1), ("ism", 1), ("msm", 1), ("tight", 1)])
def test_slots_start_at_one(name: str, least: int) -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        in_paper_units(name, 10, least - 1)
