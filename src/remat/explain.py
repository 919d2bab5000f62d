"""`remat.explain(model, *inputs)`: what a training step takes, and what it would take with less memory and more time.

Nothing is trained: the model is traced with fake tensors, each kind of operator timed by itself, or not even that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final, Literal

from torch import nn

from .graph import inplace_ops
from .graph.op_costs import estimated, measured
from .graph.table import SHARES, Row, Table
from .graph.tracing import trace
from .sizes import format_bytes

_COSTS: Final = {"measured": measured, "estimated": estimated}
_COLOURS: Final = {"Chen et al. 2016": "#d9822b", "PyTorch": "#9aa5b1", "remat": "#0b6e99"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Chen's table for one model.

    Attributes:
        rows: one for each way to run the step.
        nodes: how many nodes the training graph has.
        costs: where the seconds come from, "measured" or "estimated".
    """

    rows: tuple[Row, ...]
    nodes: int
    costs: str

    @property
    def plain(self) -> Row:
        """What PyTorch does without recomputation."""
        return next(row for row in self.rows if row.group == "PyTorch")

    def __str__(self) -> str:
        plain = self.plain
        lines = [f"{'':<40} {'memory':>10} {'of plain':>9} {'time':>7}"]
        group = ""
        for row in self.rows:
            if row.group != group:
                lines.append(group := row.group)
            share = 100 * row.bytes / plain.bytes if plain.bytes else 100.0
            ratio = row.seconds / plain.seconds if plain.seconds else 1.0
            lines.append(f"  {row.name:<38} {format_bytes(row.bytes):>10} {share:>7.1f} % {ratio:>5.2f} ×")
        lines.append(f"one training step of {self.nodes} nodes, plain {_text(plain.seconds)} ({self.costs})")
        return "\n".join(lines)

    def draw(self, path: str | PathLike[str], title: str = "One training step") -> None:
        """Draw the table into a picture file (.png, .svg, .pdf): a bar for the memory of each row, its time beside it.

        Raises:
            OSError: the file cannot be written.
            ValueError: matplotlib does not know the kind of file.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.4 + 0.36 * len(self.rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        places = range(len(self.rows))
        power = next((p for p in (3, 2, 1) if self.plain.bytes >= 1024**p), 0)
        sizes = [row.bytes / 1024**power for row in self.rows]
        axes.barh(places, sizes, color=[_COLOURS[row.group] for row in self.rows], height=0.7)
        for place, row, size in zip(places, self.rows, sizes, strict=True):
            label = f" {format_bytes(row.bytes)}, {row.seconds / (self.plain.seconds or 1):.2f} × the time"
            axes.text(size, place, label, va="center", fontsize=9)
        axes.set_yticks(places, [row.name for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlim(0, max(sizes) * 1.35)
        axes.set_xlabel(("bytes", "KiB", "MiB", "GiB")[power])
        axes.spines[["top", "right"]].set_visible(False)
        handles = [axes.barh([0], [0], color=colour, label=name) for name, colour in _COLOURS.items()]
        axes.legend(handles=handles, loc="lower right", frameon=False)
        axes.set_title(title, loc="left", fontweight="bold")
        figure.savefig(path, dpi=140)


def explain(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    shares: Sequence[float] = SHARES,
    costs: Literal["measured", "estimated"] = "measured",
    gradients_exist: bool = False,
) -> Explanation:
    """Chen's table for a model: no optimisation, in-place, sharing, dropping, sublinear plans, remat at budgets.

    Args:
        model: in the mode in which it is trained; a scalar loss need not be part of it, its outputs' gradients are then
            counted as large as the outputs.
        inputs: what it is called with, real tensors or fake ones.
        kwargs: what it is called with by name.
        shares: budgets for remat, as shares of the peak of plain PyTorch; those that cannot be met are left out.
        costs: "measured" times each kind of operator once by itself on its device; "estimated" runs nothing.
        gradients_exist: whether parameters have a `.grad` already, so that their gradients cost nothing more.

    Raises:
        ValueError: `costs` is neither.
        RematError: no output needs a gradient.
    """
    if costs not in _COSTS:
        raise ValueError(f"costs are 'measured' or 'estimated', not {costs!r}")
    graph, nodes = trace(model, inputs, dict(kwargs or {}), costs=_COSTS[costs])
    table = Table(graph, inplace_ops.candidates(nodes), gradients_exist=gradients_exist)
    return Explanation(tuple(table.rows(shares)), len(graph.nodes), costs)


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
