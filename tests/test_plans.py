"""`plan`: picks a planner, is judged by the simulator, and says true things about the result."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import weakref
from importlib import import_module

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.chains import Chain, Stage, Tape
from remat.errors import InfeasibleBudget, RematError, UnsupportedChain
from remat.planners import names
from remat.plans import plan, problem_in_slots
from remat.report import measured_curve, plan_curve
from remat.schedules import Backward, Record, Schedule
from remat.simulator import simulate

STAGE = Stage(100, (Tape(300, entering_bytes=100, forward_s=1.5, backward_s=2.5, backward_workspace_bytes=100),))
CHAIN = Chain.repeat(STAGE, 60, parameter_gradient_bytes=500, output_bytes=60)
EVERYTHING = simulate(CHAIN, (Record(0, 60), Backward(0, 60))).peak_bytes


def test_everything_is_kept_when_it_fits() -> None:
    made = plan(CHAIN, EVERYTHING)
    assert made.planner == "keep-all"
    assert made.forward_runs == 60
    assert made.seconds == made.lower_bound_s == 60 * 4.0


def test_the_tight_planner_when_it_does_not() -> None:
    made = plan(CHAIN, EVERYTHING - 1)
    assert made.planner == "tight"
    assert made.forward_runs > 60
    assert made.peak_bytes <= EVERYTHING - 1


def test_auto_is_as_fast_as_any_and_mixes_tapes() -> None:
    menu = (Tape(90, entering_bytes=10, forward_s=1.0, backward_s=2.0), Tape(30, entering_bytes=10, backward_s=2.7))
    slow = tuple(msgspec.structs.replace(tape, forward_s=1.5) for tape in menu)
    for runs in (((Stage(10, menu), 12),), ((Stage(10, menu), 5), (Stage(20, slow), 7))):
        chain = Chain(runs, output_bytes=10)
        kept, mixed = simulate(chain, plan(chain, 10**6).schedule), 0
        for share in range(20, 100, 5):
            budget = kept.peak_bytes * share // 100
            made = plan(chain, budget)
            others = []
            for name in ("keep-all", "tight", "unequal"):
                with contextlib.suppress(InfeasibleBudget, UnsupportedChain):
                    others.append(plan(chain, budget, name).seconds)
            assert made.seconds == min(others)
            mixed += len({action.entry for action in made.schedule if isinstance(action, Record)}) > 1
        assert mixed > 3


def test_a_refusal_on_the_way_keeps_nobody_alive() -> None:
    """keep-all's exception must not hold the frames of the callers, and what they hold, in a circle."""

    class Witness:
        pass

    def call() -> weakref.ref[Witness]:
        witness = Witness()
        plan(CHAIN, EVERYTHING - 1)
        return weakref.ref(witness)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_budget_as_text() -> None:
    assert plan(CHAIN, "1MiB").budget_bytes == 2**20
    with pytest.raises(ValueError, match="'7 Gib please' is not a size"):
        plan(CHAIN, "7 Gib please")


def test_no_budget_is_feasible_below_the_smallest() -> None:
    with pytest.raises(InfeasibleBudget) as refusal:
        plan(CHAIN, 1)
    smallest = refusal.value.smallest_budget_bytes
    assert plan(CHAIN, smallest).peak_bytes <= smallest
    with pytest.raises(InfeasibleBudget):
        plan(CHAIN, smallest - 1)


def test_an_unknown_planner_is_told_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*tight"):
        plan(CHAIN, "1MiB", planner="nope")


@pytest.mark.parametrize("name", names())
def test_explain_says_what_the_simulator_says(name: str) -> None:
    made = plan(CHAIN, EVERYTHING, planner=name)
    text = made.explain()
    assert re.search(rf"^plan +{name}, 60 stages$", text, re.MULTILINE)
    assert f"{made.forward_runs}: " in text
    assert "the lower bound of 240 s" in text
    assert "gradients of shared parameters 500 B" in text
    assert re.search(r"^10 % more ", text, re.MULTILINE)
    assert re.search(r"^10 % less ", text, re.MULTILINE)


def test_explain_adds_up() -> None:
    """Slots, tapes and fixed parts at the first backward are all that is alive then."""
    made = plan(CHAIN, 6000, planner="tight")
    slots = re.search(r"(\d+) carries \(([\d.]+) (B|KiB)\)", made.explain())
    assert slots is not None
    assert int(slots[1]) > 1
    tapes = re.search(r"tapes of (\d+) stages", made.explain())
    assert tapes is not None
    recorded = [action for action in made.schedule if isinstance(action, Record)]
    assert 1 <= int(tapes[1]) <= sum(action.stop - action.start for action in recorded)


def test_the_smallest_budget_buys_less_with_a_reason() -> None:
    with pytest.raises(InfeasibleBudget) as refusal:
        plan(CHAIN, 1)
    assert "10 % less     cannot be done: the smallest budget is" in (
        plan(CHAIN, refusal.value.smallest_budget_bytes).explain()
    )


def test_a_planner_that_overruns_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def overrun(chain: Chain, _budget_bytes: int) -> Schedule:
        return Schedule(chain.length, "tight", (Record(0, chain.length), Backward(0, chain.length)))

    monkeypatch.setattr("remat.plans.planner", lambda _name: overrun)
    with pytest.raises(RematError, match="internal error: planner tight"):
        plan(CHAIN, EVERYTHING - 1, planner="tight")


@pytest.mark.parametrize(
    ("name", "steps", "slots", "alpha", "runs"),
    [
        ("ism", 1000, 50, 2, 1950),  # the paper's headline
        ("ism", 100, 2, 2, 858),
        ("hsm", 100, 5, 2, 416),
        ("msm", 100, 10, 2, 267),
        ("tight", 100, 10, 2, 263),
        ("constant", 100, 5, 2, 5050),
        ("keep-all", 10, 20, 2, 10),
    ],
)
def test_the_papers_units(name: str, steps: int, slots: int, alpha: int, runs: int) -> None:
    chain, budget_bytes, units = problem_in_slots(name, steps, slots, alpha)
    made = plan(chain, budget_bytes, name)
    assert made.forward_runs == runs
    assert units.count(budget_bytes) == slots
    assert 0 <= units.peak(made) <= slots


@given(st.sampled_from(names()), st.integers(1, 30), st.integers(1, 60), st.integers(1, 9))
def test_slots_are_counted_as_the_paper_counts(name: str, steps: int, slots: int, alpha: int) -> None:
    """Never more than there are, and all that help; HSM may find its last slot's carry still live."""
    chain, budget_bytes, units = problem_in_slots(name, steps, slots, alpha)
    try:
        peak = units.peak(plan(chain, budget_bytes, name))
    except InfeasibleBudget:
        assert name in {"keep-all", "sqrt", "recursive"}  # all others can do with constant memory
        return
    least = {"ism": min(steps, slots), "hsm": min(steps, slots) - 1}.get(name, 1)
    assert least <= peak <= slots


@pytest.mark.parametrize("planner", ["tight", "keep-all"])
def test_the_curve_keeps_the_peak(planner: str) -> None:
    made = plan(CHAIN, EVERYTHING if planner == "keep-all" else 6000, planner=planner)
    for buckets in (1, 7, 66, 2000):
        curve = plan_curve(made.chain, made.schedule, made.simulation, buckets)
        assert curve.bytes.max() == made.peak_bytes
        assert curve.seconds[-1] == pytest.approx(made.seconds)


def test_a_measured_curve_keeps_its_peak_and_what_was_alive_before() -> None:
    curve = measured_curve([(0.0, 5), (0.25, 9), (0.26, 7), (1.0, 0)], buckets=10)
    assert list(curve.bytes) == [5, 5, 9, 7, 7, 7, 7, 7, 7, 7]
    assert measured_curve([]).bytes.max() == 0


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot_writes_a_picture(tmp_path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    plan(CHAIN, 6000).plot(path)
    assert path.stat().st_size > 1000


def test_planning_needs_no_torch() -> None:
    code = "import sys, remat; remat.plan(remat.Chain.repeat(remat.Stage(1, (remat.Tape(3),)), 9), 20); " + (
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there() -> None:
    import_module("remat.scan")  # the module must not take the function's place
    for name in remat.__all__:
        assert not isinstance(getattr(remat, name), type(remat)), f"remat.{name} is a module"
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = remat.nope
