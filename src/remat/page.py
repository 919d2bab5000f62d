"""One self-contained HTML page about a plan: memory over time, what is kept when, and what other budgets would buy.

It needs no network and nothing beside it. Its tables are written here, its pictures are drawn by the script in
`page.html` from the figures embedded in it. However long the chain, the page stays small: curves come in buckets, the
largest of the kept carries and tapes are shown one by one, and the rest is counted in the cells of a grid.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from typing import Final

import msgspec

from .chains import Chain
from .report import Curve, Highs, Step, measured_curve, span, steps
from .schedules import Backward, Drop, Record, Schedule, Store
from .simulator import Simulation
from .sizes import format_bytes, format_seconds
from .tradeoff import Tradeoff, tradeoff

_BUCKETS: Final = 800  # of a curve: about a page's columns
_BARS: Final = 400  # shown one by one
_ROWS, _COLUMNS = 24, 48  # of the grid that the others are counted in
_POINTS: Final = 500  # of the trade-off
_UNITS: Final = 100  # budgets that its table tells apart where sizes have no common unit; more would take seconds
_LONG: Final = 2000  # stages from which on the whole trade-off would take longer than anyone waits for a page


class Bar(msgspec.Struct, frozen=True):
    """Something kept, or a cell of short-lived ones.

    Attributes:
        kind: "carry", "tape", or "crowd" for a cell.
        name: what it is, for people.
        first: its stage, or the first of its range.
        last: the stage after its range; for a carry the same as `first`.
        start: when it began to be kept, on the time axis.
        end: when it was let go.
        bytes: how large it is; of a crowd the largest.
    """

    kind: str
    name: str
    first: float
    last: float
    start: float
    end: float
    bytes: int


def write_page(
    path: str | PathLike[str],
    chain: Chain,
    schedule: Schedule,
    simulation: Simulation,
    budget_bytes: int,
    facts: Iterable[tuple[str, str]],
    measured: Sequence[tuple[float, int]] = (),
) -> None:
    """Write the page about a schedule that the simulator has accepted.

    Args:
        path: where to; the file is HTML.
        chain, schedule, simulation: what is run, how, and what that costs.
        budget_bytes: drawn as a line.
        facts: (subject, sentence) pairs, shown as a table.
        measured: (seconds, bytes from then on) of a real run, drawn beside what was foreseen.

    Raises:
        OSError: the file cannot be written.
    """
    curve, actions, bars = _walked(chain, schedule, simulation)
    choices = tradeoff(chain, units=_UNITS, quick=chain.length > _LONG)
    chosen = budget_bytes, simulation.seconds
    figures = {
        "stages": chain.length,
        "timed": simulation.seconds > 0,
        "budget_bytes": budget_bytes,
        "curve": _plotted(curve),
        "peak_bucket": int(curve.bytes.argmax()),
        "actions": actions,
        "measured": _plotted(measured_curve(measured, _BUCKETS)) if measured else None,
        "bars": bars,
        "tradeoff": _drawn(choices, chosen) if choices.seconds[-1] > 0 else None,
    }
    parts = {
        "title": escape(f"{chain.length:,} stages within {format_bytes(budget_bytes)}"),
        "subtitle": escape(f"A plan of remat, made by the planner {schedule.planner}."),
        "figures": "".join(
            f"<li><b>{escape(number)}</b><span>{escape(name)}</span></li>"
            for number, name in _headlines(chain, simulation, budget_bytes, choices)
        ),
        "tradeoff_note": escape(_note(choices)),
        "budget_rows": "".join(_budget_rows(choices, chosen)),
        "fact_rows": "".join(_row([subject, sentence]) for subject, sentence in facts),
        "bar_rows": "".join(_bar_rows(bars, timed=simulation.seconds > 0)),
        # The script's element must not end within the data, whatever the names in it.
        "data": msgspec.json.encode(figures).decode().replace("<", "\\u003c"),
    }
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


# ---- what the pictures are drawn from


def _walked(chain: Chain, schedule: Schedule, simulation: Simulation) -> tuple[Curve, list[str], list[Bar]]:
    """One pass over the schedule: the curve, what is done at each bucket's highest moment, and what is kept."""
    highs = Highs(_BUCKETS, span(simulation))
    tallest, actions = [-1] * _BUCKETS, [""] * _BUCKETS
    kept = _Kept(chain, span(simulation))
    for step in steps(chain, schedule, simulation):
        for bucket in highs.add(step):
            if step.peak > tallest[bucket]:
                tallest[bucket], actions[bucket] = step.peak, str(step.action)
        kept.add(step)
    return highs.curve(), actions, kept.bars()


class _Kept:
    """Carries in slots and tapes of ranges with their times: the largest one by one, the others counted in a grid."""

    def __init__(self, chain: Chain, end: float) -> None:
        self.chain, self.end = chain, end
        self.stored: dict[int, float] = {}  # a carry in a slot: since when
        self.recorded: dict[int, tuple[float, Record]] = {}  # a range by its first stage
        self.largest: list[tuple[float, int, Bar]] = []  # a heap by bytes × seconds
        self.grid: dict[tuple[int, int], list[int]] = {}  # carries, tapes and the largest bytes of a cell
        self.met = 0

    def add(self, step: Step) -> None:
        match step.action:
            case Store(at):
                self.stored[at] = step.start
            case Drop(at):
                self._carry(at, step.end)
            case Record() as action:
                self.recorded[action.start] = step.start, action
            case Backward() as action:
                self._tapes(*self.recorded.pop(action.start), step.end)

    def bars(self) -> list[Bar]:
        for at in list(self.stored):
            self._carry(at, self.end)
        rows, columns = self.chain.length / _ROWS, self.end / _COLUMNS
        crowds = [
            Bar(
                "crowd",
                f"{carries} carries and {tapes} ranges of tapes, stages {int(row * rows)} to {int((row + 1) * rows)}",
                row * rows,
                (row + 1) * rows,
                column * columns,
                (column + 1) * columns,
                most,
            )
            for (row, column), (carries, tapes, most) in sorted(self.grid.items())
        ]
        return crowds + [bar for _, _, bar in sorted(self.largest, key=lambda each: each[2].start)]

    def _carry(self, at: int, end: float) -> None:
        whose = " (the caller's, kept anyway)" if at == 0 and self.chain.caller_keeps_carry else ""
        size = 0 if whose else self.chain.carry_bytes(at)
        self._keep(Bar("carry", f"carry {at}{whose}", at, at, self.stored.pop(at), end, size))

    def _tapes(self, start: float, action: Record, end: float) -> None:
        many = action.stop - action.start > 1
        name = f"tapes of stages {action.start} to {action.stop - 1}" if many else f"tape of stage {action.start}"
        entries = {stage.menu[action.entry].name for stage, _, _ in self.chain.pieces(action.start, action.stop)}
        name += "" if entries == {"whole"} else f", {' and '.join(sorted(entries))}"
        self._keep(Bar("tape", name, action.start, action.stop, start, end, _tapes_bytes(self.chain, action)))

    def _keep(self, bar: Bar) -> None:
        self.met += 1
        heapq.heappush(self.largest, (bar.bytes * (bar.end - bar.start), self.met, bar))
        if len(self.largest) > _BARS:
            self._count(heapq.heappop(self.largest)[2])

    def _count(self, bar: Bar) -> None:
        row = min(int((bar.first + bar.last) / 2 / self.chain.length * _ROWS), _ROWS - 1)
        column = min(int((bar.start + bar.end) / 2 / self.end * _COLUMNS), _COLUMNS - 1)
        cell = self.grid.setdefault((row, column), [0, 0, 0])
        cell[bar.kind == "tape"] += 1
        cell[2] = max(cell[2], bar.bytes)


def _tapes_bytes(chain: Chain, action: Record) -> int:
    """What the tapes of a range hold by themselves, with what they keep of the carries at their ends and between."""
    total = leaving = 0
    for stage, start, stop in chain.pieces(action.start, action.stop):
        tape = stage.menu[action.entry]
        total += max(leaving, tape.entering_bytes) + (stop - start) * tape.tape_bytes
        total += (stop - start - 1) * max(tape.leaving_bytes, tape.entering_bytes)
        leaving = tape.leaving_bytes
    return total + leaving


def _plotted(curve: Curve) -> dict[str, object]:
    return {"end": float(curve.seconds[-1]), "bytes": curve.bytes.astype(int).tolist()}


def _drawn(choices: Tradeoff, chosen: tuple[int, float]) -> dict[str, object]:
    points = list(choices)
    stride = -(-len(points) // _POINTS)
    return {
        "points": [point for k, point in enumerate(points) if k % stride == 0 or k == len(points) - 1],
        "marks": [(*point, name) for point in choices if (name := choices.name_of(point[0]))],
        "chosen": chosen,
    }


# ---- words and tables


def _headlines(chain: Chain, simulation: Simulation, budget_bytes: int, choices: Tradeoff) -> Iterator[tuple[str, str]]:
    yield format_bytes(budget_bytes), "budget"
    share = 100 * simulation.peak_bytes / budget_bytes
    yield format_bytes(simulation.peak_bytes), f"peak, {share:.3g} % of the budget"
    yield f"{simulation.forward_runs / chain.length:.3g}", "forward runs a stage"
    if simulation.seconds > 0:
        yield format_seconds(simulation.seconds), "an iteration"
        yield f"{simulation.seconds / float(choices.seconds[-1]):.3g} ×", "the time with everything kept"


def _note(choices: Tradeoff) -> str:
    exact = "" if choices.exact else " To be drawn soon enough, the curve is a little too high: plans may be faster."
    return f"Both axes are logarithmic. At the knee, less memory begins to cost ever more.{exact}"


def _row(cells: Sequence[str], numbers: Sequence[int] = (), kind: str = "") -> str:
    marked = [f"<td{_classed('number' if k in numbers else '')}>{escape(cell)}</td>" for k, cell in enumerate(cells)]
    return f"<tr{_classed(kind)}>{''.join(marked)}</tr>\n"


def _classed(name: str) -> str:
    return f' class="{name}"' if name else ""


def _budget_rows(choices: Tradeoff, chosen: tuple[int, float]) -> Iterator[str]:
    fastest, largest = float(choices.seconds[-1]), choices.largest_budget_bytes
    rows = [(size, seconds, choices.name_of(size)) for size, seconds in choices.selected()]
    for size, seconds, name in sorted([*rows, (*chosen, "this plan")]):
        share = f"{100 * size / largest:.3g} %" if largest else "–"
        slower = f"{seconds / fastest:.4g}" if fastest else "–"
        cells = [format_bytes(size), share, format_seconds(seconds), slower, name]
        yield _row(cells, range(4), "chosen-row" if name == "this plan" else "")


def _bar_rows(bars: Sequence[Bar], *, timed: bool) -> Iterator[str]:
    for bar in bars:
        times = [format_seconds(time) if timed else f"action {time:.0f}" for time in (bar.start, bar.end)]
        yield _row([bar.name, format_bytes(bar.bytes), *times], range(1, 4))
