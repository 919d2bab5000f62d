"""One budget for the calls of several graphs in one training step: how much each of them may take.

A model that is captured in parts runs their forwards one after the other and their backwards in the opposite order.
What a part keeps lies there while later ones run, and the gradients that it leaves while earlier ones do. So a step is
judged as a whole, and the budget goes, step by step, to the part in which a byte spares the most time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)


class Take(msgspec.Struct, frozen=True):
    """What one call of a part takes under one of its plans, in bytes over those at the start of its forward.

    Attributes:
        forward_bytes: most during its forward.
        kept_bytes: when its forward is over: results and what is kept for the backward.
        backward_bytes: most during its backward, what was kept included.
        left_bytes: when its backward is over: gradients that stay.
        seconds: of both.
    """

    forward_bytes: int
    kept_bytes: int
    backward_bytes: int
    left_bytes: int
    seconds: float


def step_peak_bytes(calls: Sequence[Take]) -> int:
    """Most bytes at any moment of a step with these calls, in the order of their forwards."""
    peak = live = 0
    for call in calls:
        peak = max(peak, live + call.forward_bytes)
        live += call.kept_bytes
    for call in reversed(calls):
        live -= call.kept_bytes
        peak = max(peak, live + call.backward_bytes)
        live += call.left_bytes
    return peak


def shared(menus: Mapping[K, Sequence[Take]], steps: Sequence[Sequence[K]], budget_bytes: int) -> dict[K, int] | None:
    """For each part, which of its takes; None if even the smallest do not fit together.

    Args:
        menus: for each part what it takes under its plans, in any order.
        steps: for each kind of step the parts in the order of their calls, one that is called again again.
        budget_bytes: for every step.
    """
    chosen = _least(menus, steps)
    if _peak(menus, steps, chosen) > budget_bytes:
        return None
    times = {part: max(calls.count(part) for calls in steps) for part in menus}
    while True:
        best: tuple[float, K, int] | None = None
        for part, menu in menus.items():
            now = menu[chosen[part]]
            for k, take in enumerate(menu):
                spared_s = (now.seconds - take.seconds) * times[part]
                if spared_s <= 0 or _peak(menus, steps, {**chosen, part: k}) > budget_bytes:
                    continue
                price = spared_s / max(1, take.kept_bytes - now.kept_bytes)
                if best is None or price > best[0]:
                    best = price, part, k
        if best is None:
            return chosen
        chosen[best[1]] = best[2]


def smallest_bytes(menus: Mapping[K, Sequence[Take]], steps: Sequence[Sequence[K]]) -> int:
    """What the largest step takes where each part takes the least."""
    return _peak(menus, steps, _least(menus, steps))


def _least(menus: Mapping[K, Sequence[Take]], steps: Sequence[Sequence[K]]) -> dict[K, int]:
    """The takes that others feel least, or those that need least themselves, whichever makes the smaller step."""
    found = [
        {part: min(range(len(menu)), key=lambda k, m=menu: order(m[k])) for part, menu in menus.items()}  # type: ignore[misc]
        for order in (_by_kept, _by_peak)
    ]
    return min(found, key=lambda chosen: _peak(menus, steps, chosen))


def _by_kept(take: Take) -> tuple[int, int, float]:
    return take.kept_bytes, max(take.forward_bytes, take.backward_bytes), take.seconds


def _by_peak(take: Take) -> tuple[int, int, float]:
    return max(take.forward_bytes, take.backward_bytes), take.kept_bytes, take.seconds


def _peak(menus: Mapping[K, Sequence[Take]], steps: Sequence[Sequence[K]], chosen: Mapping[K, int]) -> int:
    return max(step_peak_bytes([menus[part][chosen[part]] for part in calls]) for calls in steps)
