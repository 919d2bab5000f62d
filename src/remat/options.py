"""What options of the command are parsed with; a `typer.BadParameter` becomes one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from .sizes import parse_bytes


def size(text: str) -> int:
    """Bytes, above 0."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def amount(text: str) -> int:
    """Bytes, or 0."""
    return 0 if text.strip() == "0" else size(text)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def milliseconds(text: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise typer.BadParameter(f"must be a number of milliseconds of at least 0, not {text!r}")
    return number


def budget(text: str) -> int | float:
    """Bytes as an int, a percentage as a float."""
    if not text.strip().endswith("%"):
        return size(text)
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise typer.BadParameter(f"must be a size like '6MiB' or a percentage above 0 like '5%', not {text!r}")
    return share


def output(text: str) -> str:
    """A path that can be written, found out before the work is done."""
    folder = os.path.dirname(text) or "."
    if text != "-" and (os.path.isdir(text) or not os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"{text} cannot be written")
    return text


def picture(text: str) -> str:
    """Such a path, with the ending of a picture."""
    if not text.endswith((".png", ".svg", ".pdf")):
        raise typer.BadParameter(f"a picture's name ends in .png, .svg or .pdf, not {text!r}")
    return output(text)


def page(text: str) -> str:
    """Such a path, with the ending of a page."""
    if not text.endswith(".html"):
        raise typer.BadParameter(f"a page's name ends in .html, not {text!r}")
    return output(text)


def option(parser: Callable[[str], Any], metavar: str, help: str, *names: str) -> Any:
    """An option with a parser of these."""
    return typer.Option(*names, parser=parser, metavar=metavar, help=help)


# Options of several commands: a chain of equal steps, and where figures and pictures go.
Steps = Annotated[int | None, option(count, "N", "How often the step is applied.")]
Carry = Annotated[int | None, option(amount, "SIZE", "What goes from a step to the next.")]
TapeSize = Annotated[int | None, option(amount, "SIZE", "What autograd keeps of a step, the entering carry included.")]
Workspace = Annotated[
    int | None, option(amount, "SIZE", "Allocated and freed again within a step, and within its backward (0).")
]
ForwardMs = Annotated[float | None, option(milliseconds, "MS", "A step without a tape (1).")]
RecordMs = Annotated[float | None, option(milliseconds, "MS", "A step with its tape kept (as forward).")]
BackwardMs = Annotated[float | None, option(milliseconds, "MS", "Its backward (twice forward).")]
JsonFile = Annotated[str | None, option(output, "FILE", "Write the figures; '-' is stdout.", "--json")]
ChainFile = Annotated[
    Path | None, typer.Option("--chain", metavar="FILE", help="Instead, a chain as Chain.to_json writes it.")
]


@contextmanager
def writing(name: str, path: str | None) -> Iterator[None]:
    """What cannot be written after all is said in one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise typer.TyperException(f"{name} {path}: cannot be written: {reason}") from None


def write(path: str, parts: Iterable[str]) -> None:
    """Text into a file; '-' is stdout."""
    with nullcontext(sys.stdout) if path == "-" else open(path, "w", encoding="utf-8") as file:
        file.writelines(parts)
