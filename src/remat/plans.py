"""`plan(chain, budget)`: the best schedule within a budget, judged by the simulator, and what can be said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from os import PathLike
from typing import Final, Protocol

from . import page, report
from .chains import Chain
from .errors import InfeasibleBudget, RematError, UnsupportedChain
from .planners import names, planner
from .planners.room import in_paper_units
from .schedules import Action, Backward, Drop, Record, Schedule, Store
from .simulator import Simulation, simulate, timeline
from .sizes import format_bytes, format_seconds, parse_bytes

_AUTO: Final = ("keep-all", "tight", "unequal")  # the first that can; keeping everything takes no time to plan
_MIXED: Final = 256  # so many stages at most are also planned with tapes of different kinds: it takes half a second
_PAPERS: Final = ("hsm", "ism", "msm", "tight")  # these count in the paper's units as the paper does
_SHOWN: Final = 8  # so many stored carries or recorded ranges are listed one by one


class Timed(Protocol):
    """What was measured over time: a `remat.Measurement`."""

    @property
    def timeline(self) -> Sequence[tuple[float, int]]:
        """(seconds, bytes from then on), ascending."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for a chain within a budget, and what the simulator says of it.

    Attributes:
        chain: what is run.
        budget_bytes: what its peak had to stay within.
        schedule: the actions.
        simulation: exact peak bytes, seconds, forward runs.
        remarks: what else there is to say, as (subject, sentence) pairs.
    """

    chain: Chain
    budget_bytes: int
    schedule: Schedule
    simulation: Simulation
    remarks: tuple[tuple[str, str], ...] = ()

    @property
    def planner(self) -> str:
        """The name of the planner that made the schedule."""
        return self.schedule.planner

    @property
    def peak_bytes(self) -> int:
        """Predicted: most bytes alive at any moment, over those at the start."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward together."""
        return self.simulation.seconds

    @property
    def forward_runs(self) -> int:
        """How often a stage is run forward, in all."""
        return self.simulation.forward_runs

    @property
    def lower_bound_s(self) -> float:
        """No schedule is faster: every stage is recorded at least once, and has its backward once."""
        return sum(
            count * min(tape.forward_s + tape.backward_s for tape in stage.menu) for stage, count in self.chain.runs
        )

    def facts(self, units: Units | None = None) -> tuple[tuple[str, str], ...]:
        """What there is to say, as (subject, sentence) pairs; the subject is empty where a sentence goes on."""
        units = units or BYTES
        return (
            ("plan", f"{self.planner}, {_many(self.chain.length, 'stage')}"),
            *_memory_facts(self, units),
            *_time_facts(self, units),
            *_kept_facts(self, units),
            *_fixed_facts(self.chain, units),
            *_neighbour_facts(self, units),
            *self.remarks,
        )

    def explain(self) -> str:
        """What is kept where and why, the cost against its lower bound, and what a little more or less budget buys."""
        return "\n".join(f"{subject:<14}{sentence}" for subject, sentence in self.facts())

    def plot(self, path: str | PathLike[str], measured: Timed | None = None) -> None:
        """Draw memory over time, with the budget: a picture (.png, .svg, .pdf), or a page to explore (.html).

        The page also shows every carry and tape that is kept, from when to when, and what other budgets would buy. It
        is one file and needs no network.

        Args:
            path: the file; its ending says its kind.
            measured: what a run of the plan really took, from `remat.measure`, to be drawn beside what was foreseen.

        Raises:
            OSError: the file cannot be written.
            ValueError: its kind is not known.
        """
        real = measured.timeline if measured is not None else ()
        if str(path).endswith(".html"):
            facts = self.facts()
            page.write_page(path, self.chain, self.schedule, self.simulation, self.budget_bytes, facts, real)
            return
        curves = {f"{self.planner} plan": report.plan_curve(self.chain, self.schedule, self.simulation)}
        if real:
            curves["measured"] = report.measured_curve(real)
        report.draw_memory(path, curves, self.budget_bytes)


def plan(chain: Chain, budget: int | str, planner: str = "auto") -> Plan:
    """The named planner's best schedule for `chain` within `budget`, checked by the simulator.

    Args:
        chain: stages and what they cost, for instance from `remat.profile` or `Chain.repeat`.
        budget: bytes, as a number or as text like "512MiB".
        planner: a name from `remat.planners.names()`, or "auto": the one that suits the chain.

    Raises:
        InfeasibleBudget: there is no such schedule; says the smallest budget with which there is.
        UnsupportedChain: the planner cannot plan such a chain; names one that can.
        ValueError: no planner has that name, or the budget is not a size.
    """
    budget_bytes = parse_bytes(budget)
    schedule = _auto(chain, budget_bytes) if planner == "auto" else _named(planner, chain, budget_bytes)
    simulation = simulate(chain, schedule)
    if simulation.peak_bytes > budget_bytes:
        raise RematError(
            f"internal error: planner {schedule.planner} made a schedule that peaks at {simulation.peak_bytes} bytes "
            f"for a budget of {budget_bytes}; please report it with chain.to_json(): {chain.to_json().decode()}"
        )
    return Plan(chain, budget_bytes, schedule, simulation)


@dataclass(frozen=True, slots=True)
class Units:
    """How to write what a plan takes: in bytes, or in the papers' slots.

    Attributes:
        name: "bytes" or "slots".
        size: what something takes, as text.
        count: a budget, as a number of these units.
        peak: what a plan takes at its fullest, as a number of these units.
        text: such a number, as text.
        time: seconds, as text.
    """

    name: str
    size: Callable[[int], str]
    count: Callable[[int], int]
    peak: Callable[[Plan], int]
    text: Callable[[int], str]
    time: Callable[[float], str]


BYTES: Final = Units("bytes", format_bytes, int, lambda made: made.peak_bytes, format_bytes, format_seconds)


def problem_in_slots(planner: str, steps: int, slots: int, alpha: int = 2) -> tuple[Chain, int, Units]:
    """A problem of Gruslys et al. 2016 as chain and budget for `plan`, and the units in which the paper counts.

    Slots are internal states for "ism", the one being worked on included; for all others hidden states, the initial one
    included, of which an internal state takes `alpha`.
    """
    chain, budget_bytes = in_paper_units(planner, steps, slots, alpha)
    unit = alpha if planner == "ism" else 1

    def count(size: int) -> int:
        return max(1, slots - (budget_bytes - size) // unit)

    def peak(made: Plan) -> int:
        if made.planner in _PAPERS:
            return _peak_slots(made.schedule, None if made.planner == "ism" else alpha)
        return count(made.peak_bytes)  # others do not tell the stage being worked on from those that are kept

    units = Units(
        "slots",
        size="{} × hidden".format,
        count=count,
        peak=peak,
        text=lambda number: _many(number, "slot"),
        time="{:.10g} × forward".format,
    )
    return chain, budget_bytes, units


def _peak_slots(schedule: Schedule, alpha: int | None) -> int:
    """Most units in the paper's sense while stages run: recorded stages (ISM, alpha None), else carries and tapes.

    A recorded stage then costs `alpha`, but for the one being worked on. It is the newest one, and whenever there is
    most of anything there is one.
    """
    stored = recorded = 0
    peak = 1  # the paper counts the initial carry, or the one stage being worked on, at least
    for action in schedule:
        match action:
            case Store():
                stored += 1
            case Drop():
                stored -= 1
            case Backward():
                recorded -= action.stop - action.start
            case Record():
                recorded += action.stop - action.start
                peak = max(peak, recorded if alpha is None else stored + alpha * (recorded - 1))
    return peak


def _named(name: str, chain: Chain, budget_bytes: int) -> Schedule:
    return planner(name)(chain, budget_bytes)


def _auto(chain: Chain, budget_bytes: int) -> Schedule:
    found = _first(chain, budget_bytes)
    if found.planner == _AUTO[-1] or _is_fastest(chain, found):
        return found
    # Running stages again may take less time than keeping everything by tapes that are slow to consume; and the others
    # record all stages alike: some of them with a faster tape may fit as well.
    options = [found]
    others = _AUTO[_AUTO.index(found.planner) + 1 :]
    for name in others if chain.length <= _MIXED else others[:-1]:
        try:
            options.append(_named(name, chain, budget_bytes))
        except (InfeasibleBudget, UnsupportedChain):  # its sizes are rounded up, or its stages are alike
            continue
    return min(options, key=lambda schedule: simulate(chain, schedule).seconds)


def _is_fastest(chain: Chain, found: Schedule) -> bool:
    """Whether all menus leave no choice, or everything is kept and no stage has a faster tape."""
    if all(len(stage.menu) == 1 for stage, _ in chain.runs):
        return True
    fastest = sum(count * min(tape.forward_s + tape.backward_s for tape in stage.menu) for stage, count in chain.runs)
    return found.planner == "keep-all" and simulate(chain, found).seconds <= fastest * (1 + 1e-9)


def _first(chain: Chain, budget_bytes: int) -> Schedule:
    candidates = [name for name in _AUTO if name in names()]
    for name in candidates[:-1]:
        try:
            return _named(name, chain, budget_bytes)
        except UnsupportedChain:
            continue
        except InfeasibleBudget:  # keeping everything is one way of many; the other planners' word is final
            if name != "keep-all":
                raise
    return _named(candidates[-1], chain, budget_bytes)


# ---- facts


def _many(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "–"


def _memory_facts(of: Plan, units: Units) -> tuple[tuple[str, str], ...]:
    position = of.simulation.peak_position
    moment = next(islice(of.schedule, position, None), None)
    length = of.chain.length
    all_kept = Schedule(length, of.planner, (Record(0, length), Backward(0, length)))
    everything = Plan(of.chain, of.budget_bytes, all_kept, simulate(of.chain, all_kept))
    peak = units.peak(of)
    budget = units.count(of.budget_bytes)
    share = _share(peak, budget)
    return (
        ("budget", units.text(budget)),
        ("peak", f"{units.text(peak)} ({share} of the budget), first at action {position}: {moment}"),
        ("", f"keeping everything would take {units.text(units.peak(everything))}"),
    )


def _time_facts(of: Plan, units: Units) -> tuple[tuple[str, str], ...]:
    bound, runs, length = of.lower_bound_s, of.forward_runs, of.chain.length
    ratio = f"{of.seconds / bound:.4g} × " if bound else ""
    return (
        ("time", f"{units.time(of.seconds)}: {ratio}the lower bound of {units.time(bound)}"),
        ("", "(every stage once forward with its tape kept, once backward)"),
        ("forward runs", f"{runs}: {runs / length:.4g} a stage, {runs - length} of them repeat one"),
    )


def _kept_facts(of: Plan, units: Units) -> tuple[tuple[str, str], ...]:
    """What stands when the first backward begins: slots to run again from, tapes that spare a run."""
    chain = of.chain
    slots, ranges, alive = _at_first_backward(of)
    slot_bytes = sum(chain.carry_bytes(k) for k in slots if not (k == 0 and chain.caller_keeps_carry))
    tape_bytes = alive - slot_bytes - chain.output_bytes - chain.final_carry_bytes
    recorded = sum(stop - start for start, stop in ranges)
    facts = []
    if slots:
        carries = _many(len(slots), "carry", "carries")
        facts.append(f"{carries} ({units.size(slot_bytes)}) to run again from: {_listed(map(str, slots))}")
    elif recorded < chain.length:
        facts.append("no carry in a slot: runs begin again where a recorded range ends, or at carry 0")
    where = _listed(f"{start} → {stop}" for start, stop in ranges)
    facts.append(f"tapes of {_many(recorded, 'stage')} ({units.size(tape_bytes)}) that need no second run: {where}")
    return tuple(("" if k else "kept", fact) for k, fact in enumerate(facts))


def _at_first_backward(of: Plan) -> tuple[list[int], list[tuple[int, int]], int]:
    """Stored carries, recorded ranges (neighbours joined) and bytes alive just before the first backward."""
    slots: set[int] = set()
    ranges: list[tuple[int, int]] = []
    alive = 0
    for moment in timeline(of.chain, of.schedule):
        action: Action = moment.action
        if isinstance(action, Backward):
            break
        alive = moment.bytes
        if isinstance(action, Store):
            slots.add(action.at)
        elif isinstance(action, Drop):
            slots.discard(action.at)
        elif isinstance(action, Record):
            ranges.append((action.start, action.stop))
    ranges.sort()
    starts = [ranges[0][0]] + [b[0] for a, b in pairwise(ranges) if a[1] != b[0]]
    stops = [a[1] for a, b in pairwise(ranges) if a[1] != b[0]] + [ranges[-1][1]]
    return sorted(slots), list(zip(starts, stops, strict=True)), alive


def _listed(items: Iterable[str]) -> str:
    shown = list(items)
    if len(shown) > _SHOWN:
        shown[_SHOWN - 2 : -1] = ["…"]
    return ", ".join(shown)


def _fixed_facts(chain: Chain, units: Units) -> tuple[tuple[str, str], ...]:
    """What no schedule can save, by name."""
    parts = {
        "outputs": chain.output_bytes,
        "final carry": chain.final_carry_bytes,
        "gradients of outputs": chain.output_gradient_bytes,
        "gradients of inputs": chain.input_gradient_bytes,
        "gradients of shared parameters": chain.parameter_gradient_bytes,
        "gradients of the stages' own parameters": sum(count * stage.gradient_bytes for stage, count in chain.runs),
    }
    named = [f"{name} {units.size(part)}" for name, part in parts.items() if part]
    return (("fixed", ", ".join(named) or "nothing"),)


def _neighbour_facts(of: Plan, units: Units) -> tuple[tuple[str, str], ...]:
    """What a tenth more or less budget would buy."""
    if of.seconds <= of.lower_bound_s * (1 + 1e-12):
        more = "nothing: no plan is faster"
    else:
        more = _neighbour(of, of.budget_bytes + of.budget_bytes // 10, units)
    return (
        ("10 % more", more),
        ("10 % less", _neighbour(of, max(1, of.budget_bytes - of.budget_bytes // 10), units)),
    )


def _neighbour(of: Plan, budget_bytes: int, units: Units) -> str:
    name = "auto" if of.planner in _AUTO else of.planner
    try:
        other = plan(of.chain, budget_bytes, name)
    except InfeasibleBudget as error:
        return f"cannot be done: the smallest budget is {units.text(units.count(error.smallest_budget_bytes))}"
    change = f"{100 * (other.seconds / of.seconds - 1):+.3g} %" if of.seconds else "–"
    seconds, runs = units.time(other.seconds), _many(other.forward_runs, "forward run")
    return f"{units.text(units.count(budget_bytes))}: {seconds} ({change}), {runs}"
