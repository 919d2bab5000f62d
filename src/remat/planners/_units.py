"""Bytes as small whole numbers, always rounded against ourselves: sizes up, room down."""

from __future__ import annotations

from math import gcd

import msgspec

from .room import Room

_MOST_UNITS = 2000  # levels of a recurrence; more of them waste less room and take longer
_FINEST = 64  # how many units a carry is cut into at most when the sizes have no useful common divisor


class Units(msgspec.Struct, frozen=True):
    """The costs of `Room` in units, and how many units may be kept besides carry 0."""

    steps: int
    keep: int
    carry: int
    alone: int
    beside: int
    more: int
    from_slot: int  # a recorded stage whose entering carry gives up its slot for it

    @classmethod
    def of(cls, room: Room, keep: int, most: int = _MOST_UNITS) -> Units:
        """The unit that wastes least, among those that leave at most `most` units."""
        sizes = (room.carry, room.alone, room.beside, room.more, room.alone - room.carry)
        keep = min(keep, room.steps * max(room.more, room.carry) + room.alone)
        exact = gcd(*sizes) or max(1, keep)
        if keep // exact <= most:
            return cls(room.steps, keep // exact, *(size // exact for size in sizes))
        coarse = -(-keep // most)
        tried = {coarse} | {-(-size // k) for size in sizes for k in range(1, _FINEST + 1)}
        unit = min((unit for unit in tried if unit >= coarse), key=lambda unit: _waste(sizes, unit))
        return cls(room.steps, keep // unit, *(-(-size // unit) for size in sizes))


def _waste(sizes: tuple[int, ...], unit: int) -> float:
    """By what share the sizes grow when rounded up, the worst of them."""
    return max((-(-size // unit) * unit / size - 1 for size in sizes if size), default=0.0)
