"""The figures that are computed: costs in forward runs a step, memory in hidden states."""

from __future__ import annotations

from typing import Final

from ..planners import hsm, ism
from . import costs
from .drawing import COLOURS, Figure, Line, Panel

PAPER: Final = "Gruslys et al. 2016"
SLOTS: Final = (10, 50, 100, 500, 1000)
BETAS: Final = (2, 5, 10)
_RUNS: Final = "forward runs a step"
_UNITS: Final = "memory, hidden states"
_GREY: Final = "#9aa5b1"


def lengths(quick: bool) -> Figure:
    """HSM's and ISM's cost a step against length, for several numbers of slots."""
    steps = costs.lengths_up_to(1000 if quick else 10_000)
    rows, panels = [], []
    for name, cost, kept in (("HSM", hsm.cost, "hidden"), ("ISM", ism.cost, "internal")):
        values = {m: [cost(t, m) / t for t in steps] for m in SLOTS}
        rows += [(name, m, t, cost(t, m), cost(t, m) / t) for m in SLOTS for t in steps]
        lines = [Line(f"{m} slots", steps, values[m], colour) for m, colour in zip(SLOTS, COLOURS, strict=False)]
        lines.append(Line("all kept", [1, steps[-1]], [1, 1], _GREY, "--"))
        panels.append(Panel(f"{name}: slots hold {kept} states", "steps of the sequence", _RUNS, lines, log_y=False))
    headline = (ism.cost(1000, 50) / 1000 + 2) / 3
    return Figure(
        f"{PAPER}, sections 3.1 and 3.2: cost against length, theory",
        "One iteration's forward runs; a backward, 2 more a step, is not counted.",
        f"1000 steps, 50 slots of ISM: {ism.cost(1000, 50) / 1000:.3f} forward runs a step, {headline:.3f} × the time",
        ("strategy", "slots", "steps", "forward_runs", "forward_runs_a_step"),
        rows,
        panels,
    )


def memory(quick: bool) -> Figure:
    """HSM, ISM, MSM and the tight MSM against memory, with Chen's plans as points."""
    steps, most = (200, 400) if quick else (1000, 1000)
    rows: list[tuple[object, ...]] = []
    panels = []
    for beta in BETAS:
        alpha = beta + 1
        lines = []
        for (name, points, style), colour in zip(_strategies(steps, alpha, most), COLOURS, strict=True):
            rows += [(beta, alpha, name, units, runs) for units, runs in points]
            lines.append(Line(name, [units for units, _ in points], [runs for _, runs in points], colour, style))
        title = f"β = {beta}: an internal state is α = {alpha} hidden ones"
        panels.append(Panel(title, _UNITS, _RUNS, lines, most_y=20))
    paper, tight = (costs.least_memory(steps, 6, 2, tight=each) for each in (False, True))
    return Figure(
        f"{PAPER}, section 3.3: HSM, ISM and MSM against memory, {steps} steps, with Chen et al. 2016",
        "The initial hidden state is counted, the internal state being worked on is not; Chen's plans are simulated.",
        f"{steps} steps, β = 5, 2 forward runs a step: MSM takes {paper} hidden states, the tight MSM {tight}",
        ("beta", "alpha", "strategy", "hidden_states", "forward_runs_a_step"),
        rows,
        panels,
    )


def _strategies(steps: int, alpha: int, most: int) -> list[tuple[str, list[tuple[int, float]], str]]:
    """(name, (units, forward runs a step), style), in units of mixed memorization."""
    units = range(1, most + 1)
    # ISM counts the internal state being worked on, and not the initial hidden one.
    internal = [(1 + (m - 1) * alpha, ism.cost(steps, m) / steps) for m in range(1, (most - 1) // alpha + 2)]

    def mixed(tight: bool) -> list[tuple[int, float]]:
        return [(m, cost / steps) for m, cost in enumerate(costs.mixed(steps, alpha, most, tight=tight), 1)]

    return [
        ("HSM", [(m, hsm.cost(steps, m) / steps) for m in units], "-"),
        ("ISM", internal, "-"),
        ("MSM, the paper's", mixed(False), "-"),
        ("MSM, tight", mixed(True), ":"),
        ("Chen √t", costs.by_rule("sqrt", steps, alpha), "o"),
        ("Chen recursive", costs.by_rule("recursive", steps, alpha), "s"),
    ]


def tight(quick: bool) -> Figure:
    """How much the tight MSM saves over the paper's, in runs at equal memory."""
    steps, most = (200, 200) if quick else (1000, 600)
    rows, lines, curves, best = [], [], [], (0.0, 0, 0)
    for alpha, colour in zip((2, 3, 6, 11), COLOURS, strict=False):
        paper, ours = (costs.mixed(steps, alpha, most, tight=each) for each in (False, True))
        saved = [100 * (1 - b / a) for a, b in zip(paper, ours, strict=True)]
        rows += [(alpha, m, a, b, s) for m, (a, b, s) in enumerate(zip(paper, ours, saved, strict=True), 1)]
        units = range(1, most + 1)
        lines.append(Line(f"α = {alpha}", units, saved, colour, "."))
        curves += [
            Line(f"α = {alpha}", units, [cost / steps for cost in paper], colour),
            Line("", units, [cost / steps for cost in ours], colour, ":"),
        ]
        best = max(best, max((s, alpha, m) for m, s in enumerate(saved, 1)))
    return Figure(
        f"{PAPER}, section 3.3: the paper's MSM and the tight one, {steps} steps",
        "Both in the paper's accounting; the tight one gives up a carry's slot once an internal state holds it.",
        f"the tight MSM saves up to {best[0]:.2f} % of the forward runs (α = {best[1]}, {best[2]} hidden states)",
        ("alpha", "hidden_states", "paper_forward_runs", "tight_forward_runs", "saved_percent"),
        rows,
        [
            Panel("The paper's (lines) and the tight one (dotted)", _UNITS, _RUNS, curves, most_y=20),
            Panel("What the tight one saves", _UNITS, "forward runs saved, %", lines, log_y=False),
        ],
    )


def against_chen(quick: bool) -> Figure:
    """Memory at 2 forward runs a step, and speed at Chen's memory."""
    steps = (10, 30, 100, 200) if quick else (10, 30, 100, 200, 300, 500, 1000, 2000)
    rows: list[tuple[object, ...]] = []
    shares, speeds = [], []
    for beta, colour in zip(BETAS, COLOURS, strict=False):
        found = [_at_chen(t, beta) for t in steps]
        rows += [(beta, beta + 1, t, *numbers) for t, numbers in zip(steps, found, strict=True)]
        for label, column, style in (("MSM", 0, "o-"), ("Chen √t", 2, "s--"), ("Chen tuned", 3, "^:")):
            values = [float(numbers[column]) / (t * (1 + beta)) for t, numbers in zip(steps, found, strict=True)]
            shares.append(Line(f"{label}, β = {beta}", steps, values, colour, style))
        speeds.append(Line(f"MSM, β = {beta}", steps, [numbers[4] for numbers in found], colour, "o-"))
    speeds.append(Line("Chen √t, every β", steps, [float(str(row[-1])) for row in rows[: len(steps)]], _GREY, "s--"))
    last = {beta: rows[k * len(steps) + len(steps) - 1] for k, beta in enumerate(BETAS)}
    times = ", ".join(f"{float(str(row[5])) / float(str(row[3])):.2f}" for row in last.values())
    return Figure(
        f"{PAPER}, Figure 7: MSM against Chen et al. 2016",
        "Memory in hidden states, the initial state and the internal state being worked on counted; α = 1 + β.",
        f"{steps[-1]} steps at 2 forward runs a step: Chen √t takes {times} × MSM's memory for β = 2, 5, 10",
        (
            *("beta", "alpha", "steps", "msm_memory", "tight_memory", "chen_sqrt_memory", "chen_tuned_memory"),
            *("msm_runs_a_step_at_chen_sqrt", "chen_sqrt_runs_a_step"),
        ),
        rows,
        [
            Panel("Memory at 2 forward runs a step", "steps of the sequence", "memory / (t(1 + β))", shares),
            Panel("Speed at the memory of Chen √t", "steps of the sequence", _RUNS, speeds, log_y=False),
        ],
    )


def _at_chen(steps: int, beta: int) -> tuple[int, int, int, int, float, float]:
    """(MSM, tight MSM, Chen √t, Chen tuned: memory; MSM's and Chen's runs a step at the memory of Chen √t)."""
    alpha = beta + 1
    paper, ours = (alpha + costs.least_memory(steps, alpha, 2, tight=each) for each in (False, True))
    sqrt, tuned = costs.chen_sqrt(steps, alpha), costs.chen_tuned(steps, alpha)
    runs = costs.mixed(steps, alpha, max(1, sqrt - alpha), tight=False)[-1] / steps
    # Chen runs all but the last segment twice.
    segment = round(steps**0.5)
    twice = (steps - 1) // segment * segment
    return paper, ours, sqrt, tuned, runs, (steps + twice) / steps


def bounds(quick: bool) -> Figure:
    """The analytical upper bounds over the exact costs."""
    longest = 1000 if quick else 10_000
    steps, slots = costs.lengths_up_to(longest), (2, 5, 10, 50)
    compared = costs.check_bounds(range(1, longest + 1, 7 if quick else 1), (1, 2, 3, 4, 5, 7, 10, 20, 50, 100))
    rows, panels = [], []
    for name, cost, internal in (("HSM", hsm.cost, False), ("ISM", ism.cost, True)):
        lines = []
        for m, colour in zip(slots, COLOURS, strict=False):
            exact = [cost(t, m) / t for t in steps]
            general = [costs.general_bound(t, m) / t for t in steps]
            binomial = [costs.binomial_bound(t, m, internal=internal) / t for t in steps]
            rows += [(name, m, *numbers) for numbers in zip(steps, exact, general, binomial, strict=True)]
            lines += [
                Line(f"{m} slots", steps, exact, colour),
                Line("", steps, general, colour, ":"),
                Line("", steps, binomial, colour, "--"),
            ]
        lines += [Line("m·t^(1+1/m)", [], [], _GREY, ":"), Line("a·t" if internal else "(a+1)·t", [], [], _GREY, "--")]
        panels.append(Panel(f"{name}: exact costs and their bounds", "steps of the sequence", _RUNS, lines))
    return Figure(
        f"{PAPER}, Appendix B: upper bounds over the exact costs",
        "a is the least number for which t ≤ binom(m+a, a), for ISM one less; bounds and costs a step.",
        f"none of {compared} exact costs, checked in whole numbers, crosses its bounds",
        ("strategy", "slots", "steps", "exact", "general_bound", "binomial_bound"),
        rows,
        panels,
    )
