"""`remat figures`: the papers' results as pictures and CSV tables, each with the place in the paper it stands for.

Two papers: Gruslys et al. 2016, "Memory-efficient backpropagation through time", and Chen et al. 2016, "Training deep
nets with sublinear memory cost", with which the first compares itself.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from . import theory
from .drawing import Figure

_MEASURED: Final = "hsm_ism_measured"
_THEORY: Final[dict[str, Callable[[bool], Figure]]] = {
    "hsm_ism_theory": theory.lengths,
    "memory": theory.memory,
    "tight": theory.tight,
    "chen": theory.against_chen,
    "bounds": theory.bounds,
}
NAMES: Final = (*_THEORY, _MEASURED)


def reproduce(out: Path, *, quick: bool = False, measured: bool = True) -> Iterator[tuple[str, str]]:
    """Write NAME.png and NAME.csv of every figure into a folder; yields (name, what it shows) as they come.

    Raises:
        OSError: a file cannot be written.
        RematError: an exact cost exceeds its bound, which cannot be.
    """
    for name, make in _THEORY.items():
        yield name, save(out / name, make(quick))
    if measured:
        from .measured import lengths  # torch, which no other figure needs

        yield _MEASURED, save(out / _MEASURED, lengths(quick))


def save(path: Path, figure: Figure) -> str:
    """Write NAME.png and NAME.csv; returns what the figure shows, in one line.

    Raises:
        OSError: a file cannot be written.
    """
    figure.save(path.with_suffix(".png"))
    with open(path.with_suffix(".csv"), "w", encoding="utf-8", newline="") as file:
        file.write(f"# {figure.source}. {figure.note}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(figure.header)
        writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in figure.rows)
    return figure.finding
