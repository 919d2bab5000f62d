"""Bytes as people write them, "512MiB", "0.5GB", 1048576, and seconds as they read them."""

from __future__ import annotations

import re
from typing import Final

_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE: Final = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kmgt]?)(?P<binary>i?)(?P<byte>b?)", re.IGNORECASE
)


def parse_bytes(size: int | str) -> int:
    """A number of bytes from an int or from text: "7GiB" is 7·2³⁰, "7GB" is 7·10⁹, "7" is 7 bytes.

    Fractions of a byte are rounded down, so that a budget never grows by being read.

    Raises:
        TypeError: `size` is neither int nor str.
        ValueError: the text is not a size, or the number is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"a size is an int or text like '512MiB', not {type(size).__name__}: {size!r}")
    number = size if isinstance(size, int) else _parse_text(size)
    if number <= 0:
        raise ValueError(f"a size must be positive, not {size!r}; write for instance '512MiB' or a number of bytes")
    return number


def _parse_text(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found["binary"] and not found["prefix"]):
        raise ValueError(f"{text!r} is not a size; write for instance '512MiB', '7GiB', '0.5GB' or a number of bytes")
    base = 1024 if found["binary"] else 1000
    return int(float(found["number"]) * base ** _POWERS[found["prefix"].lower()])


def format_bytes(size: int) -> str:
    """A size for people: three digits and a binary unit."""
    if abs(size) < 1024:
        return f"{size} B"
    power = next(p for p in (1, 2, 3, 4) if abs(size) < 1000 * 1024**p or p == 4)
    return f"{size / 1024**power:.3g} {'KMGT'[power - 1]}iB"


def format_seconds(seconds: float) -> str:
    """A time for people: four digits and a unit."""
    if seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} µs"
