"""What holds for every schedule of a chain, or for the fastest one of all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ._unequal_costs import Costs
from ._unequal_tables import COUNTED, FREE


@dataclass(frozen=True, slots=True)
class KeepAll:
    """How to record every stage once, in its fastest way, in the smallest room.

    Attributes:
        room: that room, in bytes.
        ways: the way to take at each stage that begins a range.
    """

    room: int
    ways: dict[int, int]

    def choose(self, _flavour: int, s: int, _t: int, _room_bytes: int) -> int:
        """The option to take."""
        return self.ways[s]


def keep_all(costs: Costs, flavour: int) -> KeepAll:
    """The best way without any stage run twice."""
    length, carry, gradients = costs.length, costs.carry.tolist(), costs.gradients.tolist()
    first, stop, base = costs.first.tolist(), costs.stop.tolist(), int(costs.base[length])
    fastest = costs.fastest.tolist()
    room, ways = [0] * (length + 1), {}
    for s in range(length - 1, -1, -1):
        found: list[tuple[int, int]] = []
        for c in range(first[s], first[s + 1]):
            j = stop[c]
            if costs.seconds[c] > (fastest[j] - fastest[s]) * (1 + 1e-12):
                continue
            counted = s == 0 and flavour == COUNTED
            own, extra = (carry[0], int(costs.entering[c])) if counted else (0, 0)
            need = max(base + own + int(costs.need_forward[c]), gradients[j] + extra + int(costs.need_backward[c]))
            found.append((max(need, extra + int(costs.keep[c]) + room[j] if j < length else 0), c))
        room[s], ways[s] = min(found)
    return KeepAll(room[0], ways)


def lower_bound_s(costs: Costs, flavour: int, room_bytes: int) -> float:
    """Seconds that every legal schedule takes whose peak leaves this room.

    When the first backward begins every stage has been run. A recorded one stays until its backward, so what is
    recorded by then is alive together; every other stage has been run without a tape and will be run again. So the time
    is at least that of a fractional multiple-choice knapsack: each stage held in some way of its menu, or run twice.
    """
    skipped = 1 if flavour == FREE else 0  # carry 0 is the caller's
    by_entering = [list(row) for row in costs.menus.entering]
    by_leaving = [list(row) for row in costs.menus.leaving]
    by_entering[:skipped] = [[0] * len(row) for row in by_entering[:skipped]]
    by_leaving[-1] = [0] * len(by_leaving[-1])  # carry L is not counted among what is held
    return max(_knapsack(costs, kept, room_bytes) for kept in (by_entering, by_leaving))


def _knapsack(costs: Costs, kept: list[list[int]], room_bytes: int) -> float:
    total, steps = 0.0, []
    room = float(room_bytes)
    for k in range(costs.length):
        again = float(costs.forward[k + 1] - costs.forward[k])
        times, tapes = costs.menus.seconds[k], costs.menus.tape[k]
        held = [(float(tape + kept[k][e]), time) for e, (tape, time) in enumerate(zip(tapes, times, strict=True))]
        last = k == costs.length - 1  # is never run without a tape before the first backward
        corners = _hull(held if last else [(0.0, min(times) + again), *held])
        total += corners[0][1]
        room -= corners[0][0]
        steps += [(b[0] - a[0], a[1] - b[1]) for a, b in pairwise(corners)]
    for size, gain in sorted(steps, key=lambda step: step[0] / step[1]):
        part = 1.0 if size <= room else max(0.0, room / size)
        total -= part * gain
        room -= part * size
        if part < 1:
            break
    return total


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the convex decreasing lower hull of (bytes, seconds), from the fewest bytes on."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if corners and y >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x1, y1), (x2, y2) = corners[-2:]
            if (y2 - y1) * (x - x1) < (y - y1) * (x2 - x1):
                break
            corners.pop()
        corners.append((x, y))
    return corners
