"""The mixed recurrences at every room at once: what each number of kept bytes costs, read from a few tables.

A table for the largest room holds all smaller rooms too, and what it holds is exact wherever the cap on increments
allowed a range of all stages. Smaller rooms need larger caps, so the tables shrink: each is made for the largest room
that the one before left open, at little cost, because few rooms are left where increments are large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from ._curves import NEVER
from ._mixed import FreeCarries, Node
from ._tables import Tables
from ._units import Units
from .room import Room

_STEP: Final = 4  # how much less room the next finer table is for
_MOST_EXACT: Final = 6000  # units for which no size is rounded though the tables take seconds


def forward_runs(room: Room, units: int, *, tight: bool = True) -> tuple[int, Iterator[tuple[int, int]]]:
    """What bytes beside carry 0 buy, from none to as many as help.

    Where sizes have to be rounded, a table of coarse units for all room is followed by finer ones for less room.

    Returns:
        The bytes of the finest unit if no size had to be rounded, else 0; and (bytes kept, forward runs), unordered.
    """
    if room.carry == 0:
        return max(1, room.alone, room.more), _free_carries(room)
    root = Node.FROM_KEPT if room.free_start else Node.FROM_SLOT
    top = room.steps * max(room.more, room.carry) + room.alone
    whole = Units.of(room, top, _MOST_EXACT)
    if (unit := _exact_unit(room, whole)) > 0:
        return unit, _points(unit, every_room(whole, root, tight=tight))
    return 0, _ladder(room, top, units, root, tight=tight)


def _exact_unit(room: Room, units: Units) -> int:
    """The bytes of a unit if all sizes are multiples of it, else 0."""
    unit = next(size // count for size, count in _sizes(room, units) if count)
    return unit if all(size == count * unit for size, count in _sizes(room, units)) else 0


def _sizes(room: Room, units: Units) -> tuple[tuple[int, int], ...]:
    return (room.carry, units.carry), (room.alone, units.alone), (room.beside, units.beside), (room.more, units.more)


def _ladder(room: Room, top: int, most: int, root: int, *, tight: bool) -> Iterator[tuple[int, int]]:
    while top >= 0:
        units = Units.of(room, top, most)
        # The unit may be any that rounds to these counts; the largest quotient is safe for all of them.
        unit = max(-(-size // count) for size, count in _sizes(room, units) if count)
        yield from _points(unit, every_room(units, root, tight=tight))
        if _exact_unit(room, units):
            return
        top //= _STEP


def _points(unit: int, costs: list[int]) -> Iterator[tuple[int, int]]:
    return ((unit * memory, cost) for memory, cost in enumerate(costs))


def every_room(units: Units, root: int, *, tight: bool) -> list[int]:
    """Forward runs of all stages with 0, 1, …, `units.keep` units."""
    costs: list[int] = []
    open_from = units.keep
    while open_from >= 0:
        table = _EveryRoom(replace(units, keep=open_from), root, tight=tight)
        found = []
        while open_from >= 0 and (cost := table.cost(root, open_from, units.steps)) < NEVER:
            found.append(cost)
            open_from -= 1
        costs += found
    return costs[::-1]


class _EveryRoom(Tables):
    """Tables that also hold the rooms which the largest does not lead to."""

    def _reachable(self) -> set[int]:
        return set(range(self.units.keep + 1))


def _free_carries(room: Room) -> Iterator[tuple[int, int]]:
    tape = max(room.alone, room.more)
    counts = range(room.steps if tape else 1)
    return ((n * tape, FreeCarries(room.steps, n * tape, tape).forward_runs) for n in counts)
