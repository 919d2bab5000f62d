"""The command `remat report`: a plan as a page to explore in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options, problems
from .options import option
from .planners import names
from .plans import plan
from .sizes import format_bytes
from .tradeoff import tradeoff


def report(
    out: Annotated[str, typer.Argument(parser=options.page, metavar="OUT.html", help="Where the page goes.")],
    steps: options.Steps = None,
    carry: options.Carry = None,
    tape: options.TapeSize = None,
    budget: Annotated[
        int | None, option(options.size, "SIZE", "The memory that there is (the knee of the trade-off).")
    ] = None,
    planner: Annotated[str, typer.Option(metavar="NAME", help=f"auto, or one of {', '.join(names())}.")] = "auto",
    forward_ms: options.ForwardMs = None,
    record_ms: options.RecordMs = None,
    backward_ms: options.BackwardMs = None,
    workspace: options.Workspace = None,
    chain_file: options.ChainFile = None,
) -> None:
    """A page to explore a plan in a browser: one file, which needs no network.

    From sizes: remat report plan.html --steps 1000 --carry 32KiB --tape 120KiB --budget 5MiB

    From a file: remat report plan.html --chain chain.json --budget 5MiB
    """
    sizes = {"--carry": carry, "--tape": tape, "--workspace": workspace}
    times = {"--forward-ms": forward_ms, "--record-ms": record_ms, "--backward-ms": backward_ms}
    problems.check_source(chain_file, {"--steps": steps, **sizes, **times})
    problems.check_planner(planner)
    if chain_file is not None:
        chain = problems.read_chain(chain_file)
    else:
        chain = problems.repeated(steps or 0, carry or 0, tape or 0, workspace or 0, *times.values())
    made = plan(chain, budget or tradeoff(chain).knee[0], planner)
    with options.writing("OUT.html", out):
        made.plot(out)
    print(f"{out}: {chain.length} stages within {format_bytes(made.budget_bytes)}, for a browser")
