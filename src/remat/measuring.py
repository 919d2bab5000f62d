"""`remat profile`: what the blocks of a network cost, looked at here or on paper, into a table and a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from . import options, targets
from .chains import Chain, Stage
from .options import option
from .plans import plan
from .sizes import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN: Final = 40  # rows of the table


def command(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="Returns the blocks, an nn.Sequential or a list for instance."),
    ],
    entering: Annotated[
        list[targets.Input],
        option(
            targets.parse_input,
            "SHAPE",
            f"What the first block takes, {targets.FORM}; again for each further argument, which all blocks take.",
            "--input",
        ),
    ],
    save: Annotated[
        str | None, option(options.output, "FILE", "Write the chain as JSON; '-' is stdout.", "--save")
    ] = None,
    meta: Annotated[
        bool, typer.Option("--meta", help="On paper: nothing is allocated or run, seconds are estimated.")
    ] = False,
) -> None:
    """What every block of a chain costs, in bytes and seconds, for remat plan.

    remat profile networks.py:make --input 8x3x32x32 --save chain.json

    remat plan chain.json --budget 2GiB
    """
    from rich.console import Console

    from .profiling import profile

    device = "meta" if meta else "cpu"
    work = targets.load(target, device)
    if not hasattr(work, "__iter__"):
        raise typer.TyperException(
            f"{target} gives {type(work).__name__}, and blocks are profiled: give an nn.Sequential or a list of them, "
            "as remat.chain takes it"
        )
    x, *shared = (given.tensor(device) for given in entering)
    chain = profile(work, x, *shared, device="meta" if meta else None)
    if save != "-":
        console = Console(highlight=False)
        console.print(table(chain))
        everything = plan(chain, 2**62, "keep-all")
        console.print(
            f"{chain.length} blocks; keeping everything takes {format_bytes(everything.peak_bytes)} and "
            f"{format_seconds(everything.seconds)}"
        )
    with options.writing("--save", save):
        if save is not None:
            options.write(save, [chain.to_json().decode(), "\n"])


def table(chain: Chain) -> Table:
    """What stages cost, equal neighbours in one row."""
    from rich.table import Table

    rows = list(_rows(chain))
    drawn = Table("blocks", *("carry", "tape", "workspace", "gradients", "forward", "backward"), box=None)
    for column in drawn.columns[1:]:
        column.justify = "right"
    for row in rows[:_SHOWN]:
        drawn.add_row(*row)
    if len(rows) > _SHOWN:
        drawn.add_row(f"… {len(rows) - _SHOWN} more rows")
    return drawn


def _rows(chain: Chain) -> Iterator[tuple[str, ...]]:
    at = 0
    for stage, count in chain.runs:
        where = str(at) if count == 1 else f"{at} … {at + count - 1}"
        yield where, *_costs(stage)
        at += count


def _costs(stage: Stage) -> tuple[str, ...]:
    whole = stage.menu[0]
    workspace = max(stage.workspace_bytes, whole.workspace_bytes, whole.backward_workspace_bytes)
    return (
        *map(format_bytes, (stage.carry_bytes, whole.tape_bytes, workspace, stage.gradient_bytes)),
        format_seconds(stage.forward_s),
        format_seconds(whole.backward_s),
    )
