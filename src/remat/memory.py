"""`remat memory`: Chen's table for a network, and the same over depth and over length as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import options, targets
from .options import option

if TYPE_CHECKING:
    from .figures.drawing import Figure

_OVER: Final = {"resnet": ((50, 101, 200, 500, 1001), (50, 101)), "lstm": ((8, 16, 32, 64), (4, 8))}
_SHOWN: Final = (
    *("no optimisation", "in-place", "sharing", "in-place + sharing", "cheap results dropped"),
    *("segments by algorithm 3", "recursion", "smallest budget"),
)
_GIB: Final = 2**30


def command(
    network: Annotated[str, typer.Argument(metavar="NETWORK", help="resnet, lstm, or MODULE:FUNCTION of yours.")] = "",
    size: Annotated[int | None, option(options.count, "N", "Layers of the resnet, steps of the lstm.")] = None,
    batch: Annotated[int | None, option(options.count, "N", "Examples in a batch.")] = None,
    entering: Annotated[
        targets.Input | None, option(targets.parse_input, "SHAPE", f"Your model's: {targets.FORM}.", "--input")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time the operators here, not by estimate.")] = False,
    picture: Annotated[str | None, option(options.picture, "FILE", "Draw the table.")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw over depth and length instead.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="With --figures: smaller networks.")] = False,
) -> None:
    """What a training step takes with no optimisation, in-place, sharing, dropping, and remat: Chen's table.

    FUNCTION returns a model; it is called with a tensor as --input says. Nothing is trained, and the memory that is
    spoken of need not be there.
    """
    if figures is not None:
        _draw(figures, quick)
        return
    if not network:
        raise typer.TyperException("NETWORK missing: resnet, lstm, or MODULE:FUNCTION with --input")
    from .explain import explain

    model, example, title = _yours(network, entering) if ":" in network else _known(network, size, batch)
    explained = explain(model, example, costs="measured" if measure else "estimated")
    print(title)
    print(explained)
    with options.writing("--picture", picture):
        if picture is not None:
            explained.draw(picture, title)


def _known(name: str, size: int | None, batch: int | None) -> tuple[Any, Any, str]:
    from .networks import NETWORKS, example

    try:
        network = NETWORKS[name]
        size, batch = size or network.usual[0], batch or network.usual[1]
        return *example(name, size, batch), f"{name} of {size} {network.size}, batch {batch}"
    except KeyError:
        raise typer.TyperException(
            f"no network is called {name!r}: {', '.join(NETWORKS)}, or yours as MODULE:FUNCTION"
        ) from None
    except ValueError as error:
        raise typer.TyperException(str(error)) from None


def _yours(name: str, entering: targets.Input | None) -> tuple[Any, Any, str]:
    """A model from the user's own function."""
    import torch

    if entering is None:
        raise typer.TyperException(f"--input missing: what {name} is called with, {targets.FORM}")
    model = targets.load(name)
    if not isinstance(model, torch.nn.Module):
        raise typer.TyperException(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model, entering.tensor(), f"{name}, input {entering}"


# ---- over depth and length


def _draw(out: Path, quick: bool) -> None:
    from .figures import save

    with options.writing("--figures", str(out)):
        out.mkdir(parents=True, exist_ok=True)
    for name in _OVER:
        drawn = figure(name, quick)
        with options.writing("--figures", str(out)):
            print(f"{name}: {save(out / f'memory_{name}', drawn)}", flush=True)


def figure(name: str, quick: bool) -> Figure:
    """One network's table over its size."""
    from .figures.drawing import COLOURS, Figure, Line, Panel
    from .networks import NETWORKS

    network = NETWORKS[name]
    sizes = _OVER[name][quick]
    found = list(_over(name, sizes))
    colours = (*COLOURS, "#b5651d", "#000000")
    memory, times = [], []
    for way, colour in zip(_SHOWN, colours, strict=True):
        style = "o-" if way == "smallest budget" else ".-"
        label = "remat, smallest" if way == "smallest budget" else way
        memory.append(Line(label, sizes, [rows[way][0] / _GIB for rows in found], colour, style))
        if found[-1][way][1] > 1:
            times.append(Line("", sizes, [rows[way][1] for rows in found], colour, style))
    rival = "segments by algorithm 3"
    times.append(
        Line(
            "remat, in algorithm 3's memory (colours as on the left)",
            sizes,
            [rows["in its memory"][1] for rows in found],
            "#000000",
            "x--",
        )
    )
    first, least, same = found[-1]["no optimisation"], found[-1]["smallest budget"], found[-1]["in its memory"]
    return Figure(
        f"Chen et al. 2016, section 5: memory of a training step of the {name}, batch {network.usual[1]}",
        "Bytes from fake tensors, seconds estimated from floating-point operations and bytes; nothing was run.",
        f"{sizes[-1]} {network.size}: {first[0] / _GIB:.3g} GiB without optimisation, algorithm 3 "
        f"{found[-1][rival][0] / _GIB:.3g} GiB at {found[-1][rival][1]:.2f} × the time, remat in as much "
        f"{same[1]:.2f} ×, down to {least[0] / _GIB:.3g} GiB",
        (network.size, "way", "bytes", "time_ratio"),
        [(size, way, *row) for size, rows in zip(sizes, found, strict=True) for way, row in rows.items()],
        [
            Panel("Memory", network.size, "GiB", memory),
            Panel("Time over that of the plain step", network.size, "×", times, log_y=False),
        ],
    )


def _over(name: str, sizes: tuple[int, ...]) -> Iterator[dict[str, tuple[int, float]]]:
    """For each size, bytes and time ratio by the names of the ways; "in its memory" is remat in algorithm 3's.

    Both overwrite in place what they can.
    """
    from .graph import inplace_ops
    from .graph.op_costs import estimated
    from .graph.planning import with_reserve
    from .graph.table import Table
    from .graph.tracing import trace
    from .networks import NETWORKS, example

    for size in sizes:
        model, data = example(name, size, NETWORKS[name].usual[1])
        graph, nodes = trace(model, (data,), costs=estimated)
        table = Table(graph, inplace_ops.candidates(nodes))
        rows = {row.name: row for row in table.rows(())}
        plain = rows["no optimisation"].seconds
        same = table.within(with_reserve(table.peak_bytes("budgeted")))
        yield {way: (row.bytes, row.seconds / plain) for way, row in {**rows, "in its memory": same}.items()}
