"""What a command is about: a chain, out of sizes and times or out of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import typer

from .chains import Chain, Stage, Tape
from .planners import names


def check_planner(name: str) -> None:
    """A name that nobody has is said in one line."""
    if name not in (*names(), "auto"):
        raise typer.TyperException(f"no planner is called {name!r}; there are {', '.join(names())} and auto")


def repeated(
    steps: int,
    carry: int,
    tape: int,
    workspace: int,
    forward_ms: float | None,
    record_ms: float | None,
    backward_ms: float | None,
) -> Chain:
    """Equal steps, from sizes in bytes and times in milliseconds."""
    forward_s = (1.0 if forward_ms is None else forward_ms) / 1e3
    kept = min(carry, tape)  # a tape keeps the carry that enters, so far as it is that large
    entry = Tape(
        tape - kept,
        entering_bytes=kept,
        forward_s=forward_s if record_ms is None else record_ms / 1e3,
        backward_s=2 * forward_s if backward_ms is None else backward_ms / 1e3,
        workspace_bytes=workspace,
        backward_workspace_bytes=carry + workspace,  # the new adjoint counts
    )
    return Chain.repeat(Stage(carry, (entry,), forward_s, workspace), steps)


def check_source(chain_file: Path | None, given: Mapping[str, object]) -> None:
    """A chain comes from a file, or from --steps with sizes, or, where that is an option, from --steps with --alpha."""
    named = [name for name, value in given.items() if value is not None]
    if chain_file is not None:
        if named:
            raise typer.TyperException(f"--chain says all about the chain and excludes {', '.join(named)}")
        return
    alpha = "--alpha" in given
    either = ["--carry and --tape", "--alpha"] if alpha else ["--carry and --tape"]
    if given["--steps"] is None:
        raise typer.TyperException(f"--steps missing: give it with {' or with '.join(either)}, or --chain alone")
    if alpha and given["--alpha"] is not None:
        others = [name for name in named if name not in ("--steps", "--alpha")]
        if others:
            raise typer.TyperException(f"--alpha counts in the papers' units and excludes {', '.join(others)}")
        return
    missing = [name for name in ("--carry", "--tape") if given[name] is None]
    if missing:
        ways = ", or ".join([*either, "--chain alone"][: 2 if alpha else 3])
        raise typer.TyperException(f"{', '.join(missing)} missing: give {ways}")


def read_chain(path: Path) -> Chain:
    """A chain as `Chain.to_json` writes it."""
    try:
        return Chain.from_json(path.read_bytes())
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise typer.TyperException(f"{path}: {reason}") from None
