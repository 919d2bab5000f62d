"""The default: the least forward runs for one repeated stage with carries and tapes of any sizes.

Like the paper's MSM, but every carry is paid for only where nothing else holds it. A range whose start is in a slot of
its own gives up the slot when its first stage is recorded; a range that starts at the end of a kept tape needs no
slot; a recorded range grows by its next stage for less than a tape kept alone. In the paper's units, with A for a
range that starts from a slot counted in m and B for one whose start is held:

    A_m(t) = min of  y + A_{m−1}(t−y) + A_m(y),  y + B_{m−1−α}(t−y) + A_m(y−1) for y ≥ 2,  1 + B_{m−α}(t−1),  t(t+1)/2
    B_m(t) = min of  y + A_m(t−y) + B_m(y),      y + B_{m−α}(t−y) + B_m(y−1),                                t(t+1)/2

It equals the least over all legal schedules wherever an exhaustive search was run (see the test-suite), in the room
that `room` leaves for what is kept. Where sizes have to be rounded to few enough units, HSM and ISM, which need no
units, may come out better and are then taken. Time: 0.3 s for 10⁴ stages and 1000 units, growing with the kinks of the
curves, which are many for 10⁵ stages and more when only a few per cent of the tapes fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..chains import Chain
from ..schedules import Action, Schedule
from . import _tables, hsm, ism
from ._shared import plan_repeated
from .room import Room


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """The optimum for the budget's room."""
    return plan_repeated(chain, budget_bytes, "tight", _strategy)


def _strategy(room: Room, keep: int) -> tuple[int, partial[Iterator[Action]]]:
    options = (_tables.strategy(room, keep, tight=True), hsm.strategy(room, keep), ism.strategy(room, keep))
    return min(options, key=lambda option: option[0])
