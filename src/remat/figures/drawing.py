"""A figure as data: panels of lines for the picture, rows for the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#0b6e99", "#d9822b", "#2a9d5c", "#8e5bb5", "#c8372d", "#5b6770")


@dataclass(frozen=True, slots=True)
class Line:
    """Points that belong together.

    Attributes:
        label: its name in the legend; none if empty.
        style: matplotlib's format: "-", "--", ":", or a marker for points that are not joined.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    style: str = "-"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = True
    log_y: bool = True
    most_y: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """What one picture shows, and the same as a table.

    Attributes:
        source: the place in the paper that it stands for.
        note: how the numbers count.
        finding: what it shows, in one line.
    """

    source: str
    note: str
    finding: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]] = field(repr=False)
    panels: Sequence[Panel] = field(repr=False)

    def save(self, path: Path) -> None:
        """Draw it into a file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(0.8 + 5.2 * len(self.panels), 5.6), layout="constrained")
        FigureCanvasAgg(canvas)
        for axes, panel in zip(canvas.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
            _draw(axes, panel)
        canvas.suptitle(self.source, x=0.01, ha="left", fontsize=11, fontweight="bold")
        canvas.savefig(path, dpi=130)


def _draw(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(line.x, line.y, line.style, color=line.colour, label=line.label or None, linewidth=1.5, markersize=5)
    axes.set(xscale="log" if panel.log_x else "linear", yscale="log" if panel.log_y else "linear")
    for axis, logarithmic in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
        if logarithmic:
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    if panel.most_y is not None:
        axes.set_ylim(top=panel.most_y)
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.grid(which="both", alpha=0.15)
    axes.tick_params(which="minor", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes, where it covers nothing.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, fontsize=8.5)
