"""Which leaves of a carry need a gradient, boundary by boundary, as in the plain loop.

For most steps it can be read off a few runs of one step: from some boundary on it is the same for all. Where a leaf or
an output could need a gradient and does not, a later step may change that; then a first pass watches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .recorded import can_need, needs_gradient
from .stages import Needs
from .trees import Leaves

Flags = tuple[bool, ...]


def could_need(leaf: object) -> bool:
    """Whether a leaf could need a gradient."""
    return isinstance(leaf, torch.Tensor) and can_need(leaf)


def flags_of(leaves: Iterable[object]) -> Flags:
    """Which leaves need a gradient."""
    return tuple(map(needs_gradient, leaves))


def united(flags: Iterable[Flags]) -> Flags:
    """What is needed anywhere."""
    return tuple(map(any, zip(*flags, strict=True)))


def needs_like(carry: Leaves, orbit: Sequence[Flags]) -> Needs:
    """What carry 0 says itself, then an orbit: carry 1, carry 2, ..., and its last entry for all that follow."""
    first, last = flags_of(carry), len(orbit)
    return lambda boundary: orbit[min(boundary, last) - 1] if boundary else first


class Needed(NamedTuple):
    """What is needed at any step of a loop, and what its steps change.

    Attributes:
        carry: which leaves of a carry need a gradient, carry 0 aside.
        outputs: which outputs need one.
        changes: which streams, buffers, lists, ... change, by number.
    """

    carry: Flags
    outputs: Flags
    changes: frozenset[int] = frozenset()

    def union(self, other: Needed) -> Needed:
        """What is in either."""
        return Needed(
            united((self.carry, other.carry)), united((self.outputs, other.outputs)), self.changes | other.changes
        )


class SeenNeeds:
    """What a first pass has seen of carries and outputs; it is a `Needs` for all boundaries that were reached.

    Runs of equal boundaries are kept, not boundaries, so that it does not grow with the length of a regular loop.

    Attributes:
        reached: the last boundary that was.
        outputs: which outputs need a gradient at any step so far.
    """

    def __init__(self, carry: Leaves) -> None:
        self._starts, self._flags = [0], [flags_of(carry)]
        self.reached = 0
        self.outputs: Flags = ()

    def __call__(self, boundary: int) -> Flags:
        return self._flags[bisect_right(self._starts, boundary) - 1]

    @property
    def carries(self) -> Flags:
        """Which leaves need a gradient at any boundary but the first."""
        return united(self._flags[1:] if len(self._flags) > 1 and self._starts[1] == 1 else self._flags)

    def note(self, boundary: int, carry: Leaves, outputs: Leaves) -> None:
        """What the step before a boundary returned."""
        flags, given = flags_of(carry), flags_of(outputs)
        self.reached = boundary
        if flags != self._flags[-1]:
            self._starts.append(boundary)
            self._flags.append(flags)
        self.outputs = united((self.outputs, given)) if self.outputs else given
