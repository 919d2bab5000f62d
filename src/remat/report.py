"""Pictures of memory over time: out of numbers into a file, and into the terminal.

Curves are drawn from buckets of equal time that keep the most bytes of each, so that a peak is seen however long the
sequence is. matplotlib is imported when a file is drawn, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from .chains import Chain
from .schedules import Action, Advance, Backward, Drop, Record, Schedule, Store
from .simulator import Simulation, timeline
from .sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BUCKETS: Final = 2000  # more than a picture has columns
_COLOURS: Final = ("#9aa5b1", "#0b6e99", "#2a9d5c")
_BUDGET_COLOUR: Final = "#c8372d"


class Curve(msgspec.Struct, frozen=True):
    """Bytes over time, as a picture needs them.

    Attributes:
        seconds: ends of the buckets, ascending.
        bytes: most bytes alive within each.
    """

    seconds: np.ndarray
    bytes: np.ndarray


class Step(NamedTuple):
    """One action of a simulated schedule on the time axis of a picture."""

    action: Action
    start: float
    end: float
    before: int
    after: int
    peak: int


def steps(chain: Chain, schedule: Schedule, simulation: Simulation) -> Iterator[Step]:
    """The actions as a picture needs them; a chain without times counts an action as a second."""
    timed = simulation.seconds > 0
    start, before = 0.0, 0
    for position, moment in enumerate(timeline(chain, schedule)):
        end = moment.end_s if timed else position + 1.0
        yield Step(moment.action, start, end, before, moment.bytes, moment.peak_bytes)
        start, before = end, moment.bytes


def span(simulation: Simulation) -> float:
    """Where the time axis of a picture ends."""
    return simulation.seconds if simulation.seconds > 0 else float(simulation.actions)


def plan_curve(chain: Chain, schedule: Schedule, simulation: Simulation, buckets: int = _BUCKETS) -> Curve:
    """The predicted curve, from the start of the call to its end."""
    highs = Highs(buckets, span(simulation))
    for step in steps(chain, schedule, simulation):
        highs.add(step)
    return highs.curve()


class Highs:
    """Most bytes within each bucket. Within an action memory changes evenly, with what the action holds on top."""

    def __init__(self, buckets: int, span: float) -> None:
        self.width = span / buckets
        self.bytes = np.zeros(buckets)

    def add(self, step: Step) -> range:
        """Count an action in; returns the buckets that it falls into."""
        end = len(self.bytes) - 1
        first, last = min(int(step.start / self.width), end), min(int(step.end / self.width), end)
        if first == last:
            self.bytes[first] = max(self.bytes[first], step.peak)
            return range(first, last + 1)
        heights = np.linspace(float(step.before), float(step.after), last + 1 - first)
        heights += float(step.peak - max(step.before, step.after))
        part = self.bytes[first : last + 1]
        np.maximum(part, heights, out=part)
        return range(first, last + 1)

    def curve(self) -> Curve:
        """What has been counted so far."""
        return Curve(self.width * np.arange(1, len(self.bytes) + 1), self.bytes)


def measured_curve(timeline: Iterable[tuple[float, int]], buckets: int = _BUCKETS) -> Curve:
    """A measured curve of (seconds, bytes from then on), ascending in time."""
    points = np.array(list(timeline), dtype=np.float64).reshape(-1, 2)
    if not len(points):
        return Curve(np.zeros(1), np.zeros(1))
    total = max(points[-1, 0], 1e-12)
    index = np.minimum((points[:, 0] / total * buckets).astype(np.int64), buckets - 1)
    highs = np.zeros(buckets)
    np.maximum.at(highs, index, points[:, 1])
    # A bucket also holds what was alive when it began: the last value of the buckets before it.
    lasts = np.full(buckets, -1)
    lasts[index] = np.arange(len(points))
    carried = np.maximum.accumulate(np.concatenate(([-1], lasts[:-1])))
    highs = np.maximum(highs, np.where(carried >= 0, points[carried, 1], 0))
    return Curve(total / buckets * np.arange(1, buckets + 1), highs)


# ---- files


def draw_memory(
    path: str | PathLike[str], curves: Mapping[str, Curve], budget_bytes: int | None = None, *, title: str | None = None
) -> None:
    """Draw named curves, and the budget as a line, into a picture file whose ending says its kind.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the kind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = max([budget_bytes or 0, *(int(curve.bytes.max()) for curve in curves.values())])
    zoomed = budget_bytes is not None and top > 4 * budget_bytes  # else the budget is a line on the floor
    figure = Figure(figsize=(9, 7.5 if zoomed else 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1 + zoomed, 1, sharex=True, squeeze=False)[:, 0]
    for axes, height in zip(panels, (top, budget_bytes or 0), strict=False):
        _draw_panel(axes, curves, budget_bytes, height)
    panels[0].set_title(title or "Memory over time", loc="left")
    panels[0].set_ylim(0, panels[0].get_ylim()[1] * 1.1)  # room for the legend above the curves
    panels[0].legend(loc="upper left", ncols=3, frameon=False)
    if zoomed:
        panels[1].set_title("The same, enlarged to the budget", loc="left")
    panels[-1].set_xlabel("seconds since the start of the call")
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Axes, curves: Mapping[str, Curve], budget_bytes: int | None, top: int) -> None:
    factor, unit = _scale(top)
    for colour, (name, curve) in zip(_COLOURS, curves.items(), strict=False):
        heights = curve.bytes / factor
        label = f"{name}: peak {format_bytes(int(curve.bytes.max()))}"
        axes.plot(curve.seconds, heights, color=colour, linewidth=1.2, label=label)
        axes.fill_between(curve.seconds, heights, color=colour, alpha=0.25, linewidth=0)
    if budget_bytes is not None:
        label = f"budget: {format_bytes(budget_bytes)}"
        axes.axhline(budget_bytes / factor, color=_BUDGET_COLOUR, linewidth=1.4, linestyle="--", label=label)
    axes.set_xlim(0, max(float(curve.seconds[-1]) for curve in curves.values()) or 1)
    axes.set_ylim(0, top * 1.15 / factor or 1)
    axes.set_ylabel(f"allocated since the start, {unit}")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(top: float) -> tuple[int, str]:
    """The binary unit in which `top` is a handy number."""
    power = next((p for p in (3, 2, 1) if top >= 1024**p), 0)
    return 1024**power, ("bytes", "KiB", "MiB", "GiB")[power]


# ---- the terminal

_MARKS: Final = " ·░╱█▒"
_MARK_NAMES: Final = ("", "stored", "tape kept", "run", "recorded", "backward")
_SLOT, _TAPE, _RUN, _RECORD, _BACKWARD = range(1, 6)
_COLUMNS: Final = 66  # with the labels, within 80


def text_picture(
    chain: Chain, schedule: Schedule, simulation: Simulation, budget_bytes: int, size: Callable[[int], str]
) -> str:
    """A plan in characters, 80 columns wide: memory over time, and below it stages over the same time."""
    highs = Highs(_COLUMNS, span(simulation))
    marks = _Map(chain.length, span(simulation), rows=16, columns=_COLUMNS)
    for step in steps(chain, schedule, simulation):
        highs.add(step)
        marks.add(step)
    marks.finish()
    return f"{_text_memory(highs.curve(), budget_bytes, size)}\n\n{_text_map(marks, chain.length)}"


def _text_memory(curve: Curve, budget_bytes: int, size: Callable[[int], str], rows: int = 8) -> str:
    """Memory over time in block characters, one column a bucket, the budget at the top."""
    top = max(budget_bytes, int(curve.bytes.max()), 1)
    eighths = np.ceil(curve.bytes / top * rows * 8).astype(np.int64)
    lines = [f"{size(budget_bytes):>11} ┬" + "╌" * len(eighths)]
    for row in reversed(range(rows)):
        cells = np.clip(eighths - 8 * row, 0, 8)
        label = size(top * (row + 1) // rows) if row == rows // 2 - 1 else ""
        lines.append(f"{label:>11} {'┤' if label else '│'}" + "".join(" ▁▂▃▄▅▆▇█"[cell] for cell in cells).rstrip())
    lines.append(f"{size(0):>11} └" + "─" * len(eighths))
    return "\n".join(lines)


def _text_map(marks: _Map, length: int) -> str:
    """Stages against time: which are run, recorded, kept, undone, when."""
    rows, columns = marks.cells.shape
    lines = []
    for row in reversed(range(rows)):
        label = {rows - 1: f"{length}", rows // 2: "stage", 0: "0"}.get(row, "")
        lines.append(f"{label:>11} │" + "".join(_MARKS[cell] for cell in marks.cells[row]).rstrip())
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(_MARKS, _MARK_NAMES, strict=True) if name)
    return "\n".join([*lines, f"{'':>11} └" + "─" * columns, f"{'':>13}time →   {legend}"])


class _Map:
    """The cells of a map of stages against time, filled action by action.

    Of what falls into one cell the most telling is seen: backward over recording over running over keeping.
    """

    def __init__(self, length: int, span: float, rows: int, columns: int) -> None:
        self.per_row, self.per_column = length / rows, span / columns
        self.cells = np.zeros((rows, columns), dtype=np.int8)
        self.stored: dict[int, float] = {}  # a carry in a slot: since when
        self.recorded: dict[int, tuple[float, float]] = {}  # the first stage of a range: when it was recorded
        self.end = span

    def add(self, step: Step) -> None:
        start, end = step.start, step.end
        match step.action:
            case Advance() as action:
                self._line(_RUN, action.start, action.stop, start, end)
            case Record() as action:
                self._line(_RECORD, action.start, action.stop, start, end)
                self.recorded[action.start] = start, end
            case Backward() as action:
                self._line(_BACKWARD, action.stop, action.start, start, end)
                self._tapes(action, self.recorded.pop(action.start), (start, end))
            case Store() as action:
                self.stored[action.at] = start
            case Drop() as action:
                self._row_of(_SLOT, action.at, self.stored.pop(action.at), start)

    def finish(self) -> None:
        for at, since in self.stored.items():
            self._row_of(_SLOT, at, since, self.end)

    def _row(self, stage: float) -> int:
        return min(int(stage / self.per_row), len(self.cells) - 1)

    def _column(self, time: float) -> int:
        return min(int(time / self.per_column), self.cells.shape[1] - 1)

    def _row_of(self, mark: int, stage: float, start: float, end: float) -> None:
        cells = self.cells[self._row(stage), self._column(start) : self._column(end) + 1]
        np.maximum(cells, mark, out=cells)

    def _tapes(self, action: Backward, recorded: tuple[float, float], undone: tuple[float, float]) -> None:
        """Every stage's tape from when it was recorded to its backward, a row at a time."""
        for row in range(self._row(action.start), self._row(action.stop) + 1):
            stage = (row + 0.5) * self.per_row
            part = min(max((stage - action.start) / (action.stop - action.start), 0.0), 1.0)
            since = recorded[0] + part * (recorded[1] - recorded[0])
            self._row_of(_TAPE, stage, since, undone[1] - part * (undone[1] - undone[0]))

    def _line(self, mark: int, first: int, last: int, start: float, end: float) -> None:
        """From stage `first` at `start` to stage `last` at `end`, column by column."""
        left, right = self._column(start), self._column(end)
        stages = np.linspace(first, last, right - left + 2)
        for column, (a, b) in enumerate(pairwise(stages), left):
            rows = self.cells[self._row(min(a, b)) : self._row(max(a, b)) + 1, column]
            np.maximum(rows, mark, out=rows)
