"""Compiled: what an order of units takes, and which of its second runs can be left out.

    order      units, −1 where none is any more
    at, lists  row NEEDS, MAKES or OVER of `at` says where in `lists` the storages begin that a unit reads, makes, may
               overwrite
    storages   a row a storage: bytes; 0, 1 if it stays from the turn on, 2 if it does once its last run has made it, 3
               if it goes then although it holds a gradient
    costs      a row a unit: nanoseconds, workspace in bytes, generator state in bytes, 1 if it has to run though
               nothing may read it or 2 if it is the turn
    room       scratch

A *memory* is a storage as one run makes it.
"""

from __future__ import annotations

from typing import Any, Final

from ..planners._compiled import INT, LIST, ROWS, compiled, types

NEEDS: Final = 0
MAKES: Final = 1
OVER: Final = 2
_BYTES: Final = 0
_STAYS: Final = 1
_TIME: Final = 0
_WORKSPACE: Final = 1
_STATE: Final = 2
_ROLE: Final = 3
FLOAT: Final = types.float64
FLOATS: Final = FLOAT[::1]

# rows of `room`
_CURRENT: Final = 0  # of a storage: the number of its newest memory
_SOURCE: Final = 1  # of a read: the number of the memory that is read
_END: Final = 2  # of a memory: the last place that reads it; −1 if none does
_MADE: Final = 3  # of a memory: the place that makes it
_FIRST: Final = 4  # of a unit: its first place
_LAST: Final = 5  # of a unit: its last place
_CHANGE: Final = 6  # of a place: bytes more than at the one before
_SEEN: Final = 7  # of a unit: whether it has run
SCRATCH_ROWS: Final = 8
_GRAPH: Final = (ROWS, LIST, ROWS, ROWS)  # at, lists, storages, costs


@compiled(INT, LIST, *_GRAPH, ROWS)
def _link(order: Any, at: Any, lists: Any, storages: Any, costs: Any, room: Any) -> int:
    """Number memories and reads in order; the place of the turn comes out."""
    read, made, turn = 0, 0, 0
    room[_FIRST, : len(costs)] = -1
    for p in range(len(order)):
        room[_CHANGE, p] = 0
        u = order[p]
        if u < 0:
            continue
        for k in range(at[NEEDS, u], at[NEEDS, u + 1]):
            room[_SOURCE, read] = room[_CURRENT, lists[k]]
            read += 1
        several = at[MAKES, u + 1] - at[MAKES, u] > 1
        for k in range(at[MAKES, u], at[MAKES, u + 1]):
            # What is returned and one of several results comes from the first run: `Reduced.program`.
            if room[_FIRST, u] < 0 or not several or storages[lists[k], _STAYS] != 1:
                room[_CURRENT, lists[k]] = made
            room[_END, made] = -1
            room[_MADE, made] = p
            made += 1
        room[_FIRST, u] = 0
        room[_LAST, u] = p
        if costs[u, _ROLE] == 2:
            turn = p
    room[_CHANGE, len(order)] = 0
    room[_CURRENT, 0] = read
    room[_CURRENT, 1] = made
    return turn


@compiled(INT, INT, INT, INT, INT, INT, ROWS, LIST, ROWS)
def _read(p: int, u: int, read: int, turn: int, last: int, at: Any, lists: Any, room: Any) -> int:
    """Note what a run reads, from the `read`-th read on; the memory that it overwrites comes out, or −1."""
    start, count = at[NEEDS, u], at[NEEDS, u + 1] - at[NEEDS, u]
    taken = -1
    for j in range(at[OVER, u], at[OVER, u + 1]):
        for k in range(count):
            memory = room[_SOURCE, read + k]
            # As `inplace`: nothing reads it later, and a run of the same half has made it.
            if taken < 0 and lists[start + k] == lists[j] and room[_END, memory] < 0:
                made = room[_MADE, memory]
                if made != turn and (made < turn) == (p < turn):
                    taken = memory
    for k in range(count):
        memory = room[_SOURCE, read + k]
        if memory == taken:
            room[_END, memory] = p - 1
        elif p == turn:
            room[_END, memory] = last
        else:
            room[_END, memory] = max(room[_END, memory], p)
    return taken


@compiled(INT, LIST, ROWS, ROWS, LIST)
def _keep_states(order: Any, costs: Any, room: Any, during: Any) -> int:
    """Generators' states, kept from the first to the last of several runs, and set aside in all but the first."""
    for p in range(len(order)):
        u = order[p]
        if u >= 0 and costs[u, _STATE] > 0 and during[p] >= 0:
            if p != room[_FIRST, u]:
                during[p] += costs[u, _STATE]
            room[_LAST, u] = p
    for p in range(len(order)):
        u = order[p]
        if u >= 0 and costs[u, _STATE] > 0 and during[p] >= 0 and p == room[_FIRST, u] and room[_LAST, u] > p:
            room[_CHANGE, p] += costs[u, _STATE]
            room[_CHANGE, room[_LAST, u] + 1] -= costs[u, _STATE]
    return 0


@compiled(INT, LIST, *_GRAPH, ROWS, LIST, inner=False)
def assess(order: Any, at: Any, lists: Any, storages: Any, costs: Any, room: Any, during: Any) -> int:
    """Nanoseconds of all runs that are needed; `during` gets the bytes while each runs, −1 for those that are not."""
    turn = _link(order, at, lists, storages, costs, room)
    read, made, last = room[_CURRENT, 0], room[_CURRENT, 1], len(order) - 1
    nanoseconds = 0
    for p in range(last, -1, -1):
        u = order[p]
        during[p] = -1
        if u < 0:
            continue
        start, count = at[MAKES, u], at[MAKES, u + 1] - at[MAKES, u]
        read -= at[NEEDS, u + 1] - at[NEEDS, u]
        made -= count
        final = room[_LAST, u] == p
        needed = final and costs[u, _ROLE] > 0
        for k in range(count):
            needed = needed or room[_END, made + k] >= 0
        if not needed:
            continue
        during[p] = costs[u, _WORKSPACE]
        nanoseconds += costs[u, _TIME]
        _read(p, u, read, turn, last, at, lists, room)
        for k in range(count):
            storage = lists[start + k]
            until = last if storages[storage, _STAYS] == 2 and final else max(p, room[_END, made + k])
            room[_CHANGE, p] += storages[storage, _BYTES]
            room[_CHANGE, until + 1] -= storages[storage, _BYTES]
        room[_FIRST, u] = p
    _keep_states(order, costs, room, during)
    alive = 0
    for p in range(last + 1):
        alive += room[_CHANGE, p]
        if during[p] >= 0:
            during[p] += alive
    return nanoseconds


@compiled(INT, LIST, INT)
def _fits(during: Any, limit_bytes: int) -> int:
    for q in range(len(during)):
        if during[q] > limit_bytes:
            return 0
    return 1


@compiled(INT, LIST, *_GRAPH, ROWS, LIST, LIST, FLOATS, FLOATS, LIST, INT, INT)
def _weigh(
    order: Any,
    at: Any,
    lists: Any,
    storages: Any,
    costs: Any,
    room: Any,
    before: Any,
    during: Any,
    weight: Any,
    worth: Any,
    guarded: Any,
    now: int,
    limit_bytes: int,
) -> int:
    """For each place the time over the bytes of leaving it out, 0 where it has to stay; how many do not comes out."""
    room[_SEEN, : len(costs)] = 0
    found = 0
    for p in range(len(order)):
        worth[p] = 0.0
        u = order[p]
        if u < 0 or before[p] < 0:
            continue
        if room[_SEEN, u] == 0 or guarded[p] > 0:
            room[_SEEN, u] = 1
            continue
        order[p] = -1
        spared = now - assess(order, at, lists, storages, costs, room, during)
        order[p] = u
        if spared <= 0 or _fits(during, limit_bytes) == 0:
            continue
        price = 1e-9
        for q in range(len(order)):
            if during[q] >= 0 and before[q] >= 0:
                price += weight[q] * (during[q] - before[q])
        worth[p] = spared / max(price, 1e-9)
        found += 1
    return found


@compiled(INT, LIST, *_GRAPH, ROWS, LIST, LIST, FLOATS, FLOATS, LIST, INT, INT, FLOAT, inner=False)
def spare(
    order: Any,
    at: Any,
    lists: Any,
    storages: Any,
    costs: Any,
    room: Any,
    before: Any,
    during: Any,
    weight: Any,
    worth: Any,
    guarded: Any,
    budget_bytes: int,
    sweeps: int,
    sharpness: float,
) -> int:
    """Leave out second runs, by keeping what the run before made, those first that spare most time for their bytes.

    Bytes count the more the nearer a place is to the budget: (bytes / budget) ** `sharpness`. A place that is `guarded`
    stays. Returns nanoseconds; `before` is as after `assess`.
    """
    now = assess(order, at, lists, storages, costs, room, before)
    for _ in range(sweeps):
        limit = budget_bytes
        for p in range(len(order)):
            limit = max(limit, before[p])
        for p in range(len(order)):
            weight[p] = (max(before[p], 0) / limit) ** sharpness
        found = _weigh(order, at, lists, storages, costs, room, before, during, weight, worth, guarded, now, limit)
        begin = now
        for _ in range(found):
            p = worth.argmax()
            worth[p] = 0.0
            u = order[p]
            order[p] = -1
            then = assess(order, at, lists, storages, costs, room, during)
            if then < now and _fits(during, limit) == 1:
                now = then
            else:
                order[p] = u
        now = assess(order, at, lists, storages, costs, room, before)
        if now == begin:
            break
    return now
