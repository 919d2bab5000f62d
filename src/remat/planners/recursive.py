"""Chen et al. 2016, section 4.3: a chain is cut into k+1 parts, k carries are stored, and every part is cut again.

Memory k·log_{k+1} L carries and one tape, at most one more forward run a stage for every level: k = 1 gives O(log L)
memory for O(L log L) runs. The k is the fastest that fits the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from ..chains import Chain
from ..errors import InfeasibleBudget
from ..schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store
from . import _bytes, keep_all, room


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """The k and the menu entry that take the least time within the budget; constant memory if none fits."""
    tried = [
        (*_cost(chain, k, entry), k, entry) for entry in keep_all.entries(chain) for k in _useful_cuts(chain.length)
    ]
    fits = [option for option in tried if option[0] <= budget_bytes]
    if not fits:
        least = min(tried)[0]
        raise InfeasibleBudget(budget_bytes, least, _parts(chain, least))
    _, _, k, entry = min(fits, key=lambda option: option[1:])
    return Schedule(chain.length, "recursive", partial(_actions, chain, k, entry))


def _useful_cuts(length: int) -> list[int]:
    """For every number of levels the fewest cuts a level that reach single stages, and a few small numbers."""
    cuts, levels = {1, 2, 3, 4, 6, 8, max(1, length - 1)}, 1
    while 2**levels < 2 * length:
        low, high = 1, length
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if (middle + 1) ** levels >= length else (middle + 1, high)
        cuts.add(low)
        levels += 1
    return sorted(k for k in cuts if k < length or k == 1)


def _parts_of(start: int, stop: int, k: int) -> tuple[int, int, int]:
    """(how many parts a range is cut into, stages in each, how many at its beginning have one more)."""
    parts = min(k + 1, stop - start)
    return parts, *divmod(stop - start, parts)


def _cost(chain: Chain, k: int, entry: int) -> tuple[int, float]:
    """(peak bytes, seconds) with k cuts a level; ranges of one length are alike inside one run."""
    alike = len(chain.runs) == 1 and chain.runs[0][0].gradient_bytes == 0
    known: dict[tuple[int, ...], tuple[int, float]] = {}

    def kind(start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, start == 0, stop == chain.length) if alike else (start, stop)

    def solve(start: int, stop: int) -> tuple[int, float]:
        """Peak beyond the slots that hold the range's own start and all before it."""
        key = kind(start, stop)
        if key not in known:
            known[key] = _leaf(chain, start, entry) if stop - start == 1 else inner(start, stop)
        return known[key]

    def inner(start: int, stop: int) -> tuple[int, float]:
        parts, size, larger = _parts_of(start, stop, k)
        fixed = _fixed(chain, stop)
        peak, seconds, slots = 0, 0.0, 0
        for q, repeat in _groups(parts, larger, alike):
            a, b = (start + part * size + min(part, larger) for part in (q, q + 1))
            slots = q * chain.carry_bytes(0) if alike else slots + (chain.carry_bytes(a) if q else 0)
            part_peak, part_seconds = solve(a, b)
            peak, seconds = max(peak, slots + part_peak), seconds + repeat * part_seconds
            if b < stop:
                peak = max(peak, fixed + slots + _bytes.advance_need(chain, a, b, held=True))
                seconds += repeat * sum((j - i) * stage.forward_s for stage, i, j in chain.pieces(a, b))
        return peak, seconds

    peak, seconds = solve(0, chain.length)
    return peak + room.start_bytes(chain), seconds


def _groups(parts: int, larger: int, alike: bool) -> Iterator[tuple[int, int]]:
    """(last part of a group, how many in it) where the parts of a group differ only in the slots before them."""
    bounds = sorted({0, 1, larger, parts - 1, parts}) if alike else range(parts + 1)
    for first, last in pairwise(bounds):
        yield last - 1, last - first


def _fixed(chain: Chain, stop: int) -> int:
    """Bytes that are there whatever is kept, when a range that ends at `stop` is begun."""
    return _bytes.before_backward(chain) if stop == chain.length else _bytes.after_backward(chain, stop)


def _leaf(chain: Chain, k: int, entry: int) -> tuple[int, float]:
    """One stage is recorded and consumed; its carry has left the slot, which the caller of this has counted."""
    tape = chain.stage(k).menu[entry]
    held = k == 0 and chain.caller_keeps_carry
    own = 0 if held else chain.carry_bytes(k)
    return _bytes.work_peak(chain, k, k + 1, 0, entry, held=held) - own, tape.forward_s + tape.backward_s


def _actions(chain: Chain, k: int, entry: int) -> Iterator[Action]:
    """Last part first; a stack of ranges whose starts are in slots stands for the recursion."""
    kept, live = chain.caller_keeps_carry, 0
    stack = [(0, chain.length)]
    stored = {0} if kept else set()
    while stack:
        start, stop = stack.pop()
        if live != start:
            yield Load(start)
        if stop - start == 1:
            if start in stored and (start or not kept):
                stored.remove(start)
                yield Drop(start)
            yield Record(start, stop, entry)
            yield Backward(start, stop)
            live = -1
            continue
        parts, size, larger = _parts_of(start, stop, k)
        b = start
        for part in range(parts):
            a, b = b, b + size + (part < larger)
            stack.append((a, b))
            if b < stop:
                if a not in stored:
                    stored.add(a)
                    yield Store(a)
                yield Advance(a, b)
        live = a


def _parts(chain: Chain, peak: int) -> dict[str, int]:
    fixed = _bytes.after_backward(chain, chain.length)
    return {"outputs and gradients": fixed, "carries, one step's tape and workspace": peak - fixed}
