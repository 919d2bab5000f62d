"""Chen et al. 2016: the chain in equal segments, a carry stored before each, one segment recorded at a time.

Forward runs everything once and records the last segment; backward brings the other segments back from their stored
carries, each run a second time. With segments of √L stages both parts of the memory, stored carries and one segment's
tapes, are O(√L); here the segment length is the fastest that fits the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import isqrt

from ..chains import Chain
from ..errors import InfeasibleBudget
from ..schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store
from . import _bytes, keep_all

_MOST_TRIED = 128  # segment lengths tried on a chain of different stages, where trying one costs O(L)


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """The segment length and the menu entry that take the least time within the budget."""
    tried = [
        (_peak_bytes(chain, length, entry), _seconds(chain, length, entry), length, entry)
        for entry in keep_all.entries(chain)
        for length in _lengths(chain)
    ]
    fits = [option for option in tried if option[0] <= budget_bytes]
    if not fits:
        peak, _, length, entry = min(tried)
        raise InfeasibleBudget(budget_bytes, peak, _parts(chain, length, entry, peak))
    _, _, length, entry = min(fits, key=lambda option: option[1:])
    return Schedule(chain.length, "sqrt", partial(_actions, chain, length, entry))


def _lengths(chain: Chain) -> Iterable[int]:
    """Segment lengths to try: for n segments only the shortest length that needs no more than n matters."""
    size = chain.length
    useful = {-(-size // n) for n in range(1, isqrt(size) + 2)} | set(range(1, min(size, isqrt(size) + 1) + 1))
    if len(chain.runs) == 1 or len(useful) <= _MOST_TRIED:
        return sorted(useful)
    return [*sorted(useful)[:: -(-len(useful) // _MOST_TRIED)], size]


def _segments(chain: Chain, length: int) -> int:
    return -(-chain.length // length)


def _seconds(chain: Chain, length: int, entry: int) -> float:
    """All stages recorded once, and all before the last segment advanced once as well."""
    last = (_segments(chain, length) - 1) * length
    return keep_all.seconds(chain, entry) + sum((j - i) * stage.forward_s for stage, i, j in chain.pieces(0, last))


def _peak_bytes(chain: Chain, length: int, entry: int) -> int:
    count = _segments(chain, length)
    # In one run all inner segments are alike but for what grows evenly, slots one way and gradients the other.
    looked_at = {0, min(1, count - 1), max(0, count - 2), count - 1} if len(chain.runs) == 1 else range(count)
    return max(_segment_peak(chain, length, entry, q) for q in looked_at)


def _segment_peak(chain: Chain, length: int, entry: int, q: int) -> int:
    """Most bytes from the forward run through segment q and while it is recorded and consumed."""
    start, stop = q * length, min((q + 1) * length, chain.length)
    slots = _slot_bytes(chain, length, q)
    # The segment's own carry leaves its slot for the recording, so it is live then, and counted with the segment.
    peak = _bytes.work_peak(chain, start, stop, slots, entry, held=start == 0 and chain.caller_keeps_carry)
    if stop < chain.length:
        own = 0 if start == 0 and chain.caller_keeps_carry else chain.carry_bytes(start)
        forward = _bytes.advance_need(chain, start, stop, held=True)
        peak = max(peak, _bytes.before_backward(chain) + slots + own + forward)
    return peak


def _slot_bytes(chain: Chain, length: int, q: int) -> int:
    """Bytes of the stored carries before segment q, its own not counted."""
    inner = sum(
        stage.carry_bytes * (-(-j // length) - -(-i // length)) for stage, i, j in chain.pieces(0, max(1, q * length))
    )
    return inner - (chain.carry_bytes(0) if chain.caller_keeps_carry or q == 0 else 0)


def _actions(chain: Chain, length: int, entry: int) -> Iterator[Action]:
    count = _segments(chain, length)
    for q in range(count - 1):
        if q or not chain.caller_keeps_carry:
            yield Store(q * length)
        yield Advance(q * length, (q + 1) * length)
    for q in reversed(range(count)):
        start, stop = q * length, min((q + 1) * length, chain.length)
        if q < count - 1:
            yield Load(start)
            if q or not chain.caller_keeps_carry:
                yield Drop(start)
        yield Record(start, stop, entry)
        yield Backward(start, stop)


def _parts(chain: Chain, length: int, entry: int, peak: int) -> dict[str, int]:
    count = _segments(chain, length)
    worst = max(range(count) if len(chain.runs) > 1 else {0, count - 1}, key=lambda q: _slot_bytes(chain, length, q))
    parts = {
        "outputs and gradients": _bytes.after_backward(chain, chain.length),
        "stored carries": _slot_bytes(chain, length, worst),
        "one segment's tapes": _bytes.range_bytes(chain, 0, min(length, chain.length), entry),
    }
    rest = peak - sum(parts.values())
    # On unequal stages the worst of each part need not meet in one moment; then only the total is certain.
    return parts | {"workspace": rest} if rest >= 0 else {"in all": peak}
