"""Pictures of an arena: time to the right, addresses upwards, every block a rectangle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from ..sizes import format_bytes
from .arena import Lifetime, Placement, load_bytes, lower_bound_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#0b6e99", "#d9822b", "#2a9d5c", "#8e5bb5", "#9aa5b1", "#c2b280")
_BOUND_COLOUR: Final = "#c8372d"


def draw_arenas(
    path: str | PathLike[str],
    arenas: Mapping[str, tuple[Sequence[Lifetime], Placement]],
    *,
    title: str = "Blocks in one arena",
) -> None:
    """Draw named arenas one beside the other, at one scale, into a picture file whose ending says its kind.

    Blocks are coloured by their `kind`; the line is what is alive, which no arena can lie below.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the kind of file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 5.4 * len(arenas), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(arenas), sharey=True, squeeze=False)[0]
    top = max((placement.total_bytes for _, placement in arenas.values()), default=0) or 1
    power = next((p for p in (3, 2, 1) if top >= 1024**p), 0)
    kinds = sorted({one.kind for lifetimes, _ in arenas.values() for one in lifetimes})
    colours = dict(zip(kinds, _COLOURS * (1 + len(kinds) // len(_COLOURS)), strict=False))
    for axes, (name, (lifetimes, placement)) in zip(panels, arenas.items(), strict=True):
        _draw(axes, lifetimes, placement, colours, 1024**power)
        axes.set_title(f"{name}: {format_bytes(placement.total_bytes)}{_over(lifetimes, placement)}", loc="left")
        axes.set_xlabel("nodes run")
    panels[0].set_ylim(0, top * 1.02 / 1024**power)
    panels[0].set_ylabel(f"address, {('bytes', 'KiB', 'MiB', 'GiB')[power]}")
    figure.legend(handles=_legend(colours), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(path, dpi=140)


def _over(lifetimes: Sequence[Lifetime], placement: Placement) -> str:
    bound = lower_bound_bytes(lifetimes)
    return f", {placement.total_bytes / bound:.3f} × alive" if bound else ""


def _draw(
    axes: Axes, lifetimes: Sequence[Lifetime], placement: Placement, colours: Mapping[str, str], unit: int
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patheffects import Normal, Stroke

    corners: list[Any] = []
    for one, offset in zip(lifetimes, placement.offsets, strict=True):
        left, right, low, high = one.first, one.last + 1, offset / unit, (offset + one.bytes) / unit
        corners.append(((left, low), (right, low), (right, high), (left, high)))
    faces = [colours[one.kind] for one in lifetimes]
    # Thin white edges tell neighbours apart; where blocks are many they would be all that is seen.
    width = 0.4 if len(lifetimes) <= 600 else 0.05
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=width))
    times, load = load_bytes(lifetimes)
    load[-1:] = load[-2:-1]  # what is freed at the end would be drawn as a line along the edge
    halo = [Stroke(linewidth=3, foreground="white"), Normal()]  # over blocks of any colour
    axes.step(times, load / unit, where="post", color=_BOUND_COLOUR, linewidth=1.2, path_effects=halo)
    axes.set_xlim(int(times[0]) if len(times) else 0, int(times[-1]) if len(times) else 1)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(colours: Mapping[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=kind) for kind, colour in colours.items() if kind]
    return [*patches, Line2D([], [], color=_BOUND_COLOUR, linewidth=1, label="alive")]
