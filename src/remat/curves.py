"""A trade-off to look at: as a table, in characters, as a picture, as JSON."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .plans import BYTES, Units
from .tradeoff import Tradeoff

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH, _LINES = 77, 14  # of the picture in characters, its labels and axis within 80
_MARKS: Final = {"the smallest": "▲", "the knee": "◆", "more gains nothing": "■"}
_COLOUR, _KNEE_COLOUR = "#0b6e99", "#c8372d"


def figures(curve: Tradeoff, units: Units) -> dict[str, Any]:
    """The whole curve as JSON has it."""
    knee, seconds = curve.knee
    return {
        f"smallest_{units.name}": units.count(curve.smallest_budget_bytes),
        f"largest_{units.name}": units.count(curve.largest_budget_bytes),
        "knee": {units.name: units.count(knee), "seconds": seconds},
        "exact": curve.exact,
        "points": [{units.name: units.count(budget), "seconds": seconds} for budget, seconds in curve],
    }


def show(curve: Tradeoff, units: Units) -> None:
    """Print the table and the picture in characters."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in console.render_lines(_table(curve, units), pad=False):
        console.print("".join(segment.text for segment in line).rstrip())
    if not curve.exact:
        print("Sizes were rounded up to tell few enough budgets apart; a plan may be a little faster.")
    print()
    print(text_chart(curve, units))


def _table(curve: Tradeoff, units: Units) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("budget", "of all kept", "an iteration", "× fastest"):
        table.add_column(header, justify="right")
    table.add_column()
    largest, fastest = units.count(curve.largest_budget_bytes), float(curve.seconds[-1])
    for budget, seconds in curve.selected():
        count = units.count(budget)
        share = f"{100 * count / largest:.3g} %" if largest else "–"
        slower = f"{seconds / fastest:.4g}" if fastest else "–"
        table.add_row(units.text(count), share, units.time(seconds), slower, _mark(curve, budget))
    return table


def _mark(curve: Tradeoff, budget: int) -> str:
    name = curve.name_of(budget)
    return f"{_MARKS[name]} {name}" if name else ""


# ---- characters


def text_chart(curve: Tradeoff, units: Units) -> str:
    """Seconds against bytes in characters, both axes logarithmic, with the smallest budget, the knee and the end.

    The smallest budgets often take so much longer that they would press all others flat: they are drawn at the top.
    """
    counts = np.array([units.count(budget) for budget, _ in curve], dtype=np.float64)
    knee = int(np.searchsorted(curve.budgets_bytes, curve.knee[0]))
    lines = _positions(np.minimum(curve.seconds, curve.seconds[knee] ** 2 / max(curve.seconds[-1], 1e-12)), _LINES)
    labels = {lines[k]: units.time(float(curve.seconds[k])) for k in (knee, len(counts) - 1, 0)}
    margin = max(map(len, labels.values()))
    columns = _positions(counts, _WIDTH - margin)
    cells = [[" "] * (_WIDTH - margin) for _ in range(_LINES)]
    for k, (column, line) in enumerate(zip(columns, lines, strict=True)):
        end = columns[k + 1] if k + 1 < len(columns) else 0
        for x in range(column, max(end, column + 1)):
            cells[line][x] = "·"
    for k, mark in ((len(counts) - 1, "■"), (knee, "◆"), (0, "▲")):
        cells[lines[k]][columns[k]] = mark
    drawn = [
        f"{labels.get(y, ''):>{margin}} {'┤' if y in labels else '│'}" + "".join(cells[y]).rstrip()
        for y in reversed(range(_LINES))
    ]
    first, last = units.text(int(counts[0])), units.text(int(counts[-1]))
    drawn.append(" " * margin + " └" + "─" * (_WIDTH - margin))
    drawn.append(" " * (margin + 2) + first + last.rjust(_WIDTH - margin - len(first)))
    return "\n".join(drawn)


def _positions(values: np.ndarray, cells: int) -> list[int]:
    """Where values lie between the least and the greatest, logarithmically, in so many cells."""
    logs = np.log(np.maximum(values, 1e-12))
    span = float(logs.max() - logs.min())
    share = (logs - logs.min()) / span if span else np.zeros(len(logs))
    return [round(float(each) * (cells - 1)) for each in share]


# ---- files


def draw(path: str | PathLike[str], curve: Tradeoff, units: Units) -> None:
    """Draw the curve into a picture file whose ending says its kind.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the kind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = np.array([units.count(budget) for budget, _ in curve], dtype=np.float64)
    factor, unit = _scale(float(counts[-1])) if units is BYTES else (1, "slots")
    time = "seconds" if units is BYTES else "forward runs"
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.step(counts / factor, curve.seconds, where="post", color=_COLOUR, linewidth=1.6)
    knee = int(np.searchsorted(curve.budgets_bytes, curve.knee[0]))
    for k, marker, name in ((0, "^", "smallest"), (knee, "D", "knee"), (len(counts) - 1, "s", "all kept")):
        label = f"{name}: {units.text(int(counts[k]))}, {units.time(float(curve.seconds[k]))}"
        colour = _KNEE_COLOUR if k == knee else _COLOUR
        axes.plot(counts[k] / factor, curve.seconds[k], marker, color=colour, markersize=8, label=label)
    if curve.seconds[-1] > 0 and counts[0] > 0:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    axes.set(xlabel=f"budget, {unit}", ylabel=f"an iteration, {time}")
    axes.set_title("What a budget buys", loc="left")
    axes.grid(which="both", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, dpi=150)


def _scale(top: float) -> tuple[int, str]:
    """The binary unit in which `top` is a handy number."""
    power = next((p for p in (3, 2, 1) if top >= 1024**p), 0)
    return 1024**power, ("bytes", "KiB", "MiB", "GiB")[power]
