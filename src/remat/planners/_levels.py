"""One level of the mixed recurrences: the cost of every length for a given memory, from the levels below.

With k(n) the least cost of n stages at the right end, once the carry before them is stored or the stage before them is
recorded, every level of the papers' MSM and of the tight recurrence has the form

    F(t) = min(1 + h(t−1),  min over 1 ≤ y < t of  y + F(y) + k(t−y)),
    k(n) = min(f(n), 1 + g(n−1)),  k(1) = 1:

f: the right part with its start in a slot; g: with its start at the end of a tape; h: the first stage recorded at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.int64]


@cache
def compiled_level() -> Callable[[Costs, Costs, bool], Costs]:
    """`level`, compiled once per machine."""
    from numba import njit

    return njit(cache=True)(level)


def right_costs(stored: Costs | None, recorded: Costs | None, steps: int) -> Costs:
    """k of the module's text; where nothing can be kept only k(1) is finite."""
    k = np.full(steps + 1, np.iinfo(np.int64).max // 4)
    if stored is not None:
        k = np.minimum(k, stored)
    if recorded is not None:
        k[1:] = np.minimum(k[1:], 1 + recorded[:-1])
    k[1] = 1
    return k


def level(first: Costs, k: Costs, alone: bool) -> Costs:
    """F of the module's text, where `first`[t] is 1 + h(t−1) and `alone` says that only k(1) is finite.

    No convexity is assumed (F has none): a sum u(y) + v(t−y) is least at an end of the range or where u or v has a
    positive second difference, because elsewhere one of the two neighbours is no worse. So only those y are tried.
    """
    steps = k.size - 1
    cost = np.zeros(steps + 1, np.int64)
    kinks_k = [1]
    if not alone:
        kinks_k += [n for n in range(2, steps) if k[n + 1] - k[n] > k[n] - k[n - 1]]
    kinks = [1]
    cost[1] = 1
    for t in range(2, steps + 1):
        best = first[t]
        for n in kinks_k:
            if n >= t:
                break
            best = min(best, k[n] + t - n + cost[t - n])
        if not alone:
            for y in kinks:
                if y < t:
                    best = min(best, y + cost[y] + k[t - y])
        cost[t] = best
        if t > 2 and cost[t] - cost[t - 1] > cost[t - 1] - cost[t - 2]:
            kinks.append(t - 1)
    return cost
