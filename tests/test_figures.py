"""The papers' figures: their numbers are those of the reference tables, and every file is written."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from remat.figures import costs, reproduce, theory
from remat.planners import hsm, ism

DATA = Path(__file__).parent / "data"


def rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("row", rows(DATA / "chen_comparison.csv"), ids=lambda row: " ".join(list(row.values())[:3]))
def test_against_chen_as_in_the_reference(row: dict[str, str]) -> None:
    steps, beta = int(row["t"]), int(row["beta"])
    alpha = beta + (row["alpha"] == "alpha=1+beta")
    if steps <= 1000:
        assert alpha + costs.least_memory(steps, alpha, 2, tight=False) == int(row["msm_mem"])
    assert costs.chen_sqrt(steps, alpha) == int(row["chen_sqrt_mem"])
    assert costs.chen_tuned(steps, alpha) == int(row["chen_tuned_mem"])


def test_all_memories_at_once_as_in_the_reference() -> None:
    for row in rows(DATA / "msm.csv"):
        steps, units, alpha = int(row["t"]), int(row["m"]), int(row["alpha"])
        if steps <= 200:
            for tight, name in ((False, "msm_paper_cost"), (True, "msm_tight_cost")):
                found = costs.mixed(steps, alpha, 300, tight=tight)
                assert found[min(units, len(found)) - 1] == int(row[name])


def test_the_bounds_hold_and_a_crossed_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert costs.check_bounds(range(1, 400), range(1, 40)) == 2 * 399 * 39
    assert not list(costs.crossed(1, 1))
    real = hsm.cost
    monkeypatch.setattr(hsm, "cost", lambda t, m: 2 * real(t, m))
    assert list(costs.crossed(100, 5))


def test_chens_own_plans_are_never_better_than_mixed_memorization() -> None:
    exact = costs.mixed(100, 3, 300, tight=True)
    for name in ("sqrt", "recursive"):
        points = costs.by_rule(name, 100, 3)
        assert len(points) > 2
        for units, runs in points:
            assert runs * 100 >= exact[min(units, len(exact)) - 1]


def test_every_figure_is_written(tmp_path: Path) -> None:
    found = dict(reproduce(tmp_path, quick=True, measured=False))
    assert "1.950 forward runs a step, 1.317 × the time" in found["hsm_ism_theory"]
    assert found["chen"].startswith("200 steps at 2 forward runs a step: Chen √t takes 1.58, 1.90, 2.35 ×")
    for name in found:
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (tmp_path / f"{name}.csv").read_text(encoding="utf-8").startswith("# Gruslys et al. 2016, ")
        assert len(rows(tmp_path / f"{name}.csv")) > 5
    first = rows(tmp_path / "hsm_ism_theory.csv")[-1]
    assert int(first["forward_runs"]) == ism.cost(int(first["steps"]), int(first["slots"]))


def test_measured_on_a_real_cell() -> None:
    from remat.figures.measured import lengths

    figure = lengths(quick=True)
    assert all(float(str(row[3])) > 0 for row in figure.rows)
    assert len(figure.rows) == 14


def test_only_the_measured_figure_needs_torch() -> None:
    code = "import sys, remat.figures.theory as t; t.bounds(True); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert theory.BETAS == (2, 5, 10)
