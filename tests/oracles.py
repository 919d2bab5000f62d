"""Brute force: the least cost over all legal schedules, by shortest path over the states of the machine.

Written from the rules in `remat.chains`, sharing nothing with planners or simulator. Only for tiny chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from remat.chains import Chain
from remat.schedules import Action, Advance, Drop, Load, Record, Store


class Sizes(NamedTuple):
    """One repeated stage: bytes of its carry, of its tape, and what the tape keeps of both its carries."""

    carry: int
    tape: int
    entering: int
    leaving: int


class State(NamedTuple):
    """What is kept; stages from `done` on have had their backward; `open`: the last action recorded up to `live`."""

    done: int
    slots: frozenset[int]
    ranges: tuple[tuple[int, int], ...]
    live: int | None
    open: bool


def fewest_forward_runs(sizes: Sizes, steps: int, keep: int, *, free_start: bool) -> int | None:
    """Least number of forward runs with at most `keep` bytes in slots and kept ranges, carry 0's slot included.

    The live carry, the adjoint and the stage that is recorded and consumed at once are not counted.
    """
    start = State(steps, frozenset(), (), 0, False)
    queue: list[tuple[int, int, State]] = [(0, 0, start)]
    best, ticket = {start: 0}, 0
    while queue:
        cost, _, state = heappop(queue)
        if cost > best[state]:
            continue
        if state.done == 0:
            return cost
        for extra, following in _moves(state, free_start):
            if following.done and _kept(sizes, following, free_start) > keep:
                continue
            if cost + extra < best.get(following, 1 << 60):
                best[following] = cost + extra
                ticket += 1
                heappush(queue, (cost + extra, ticket, following))
    return None


def _moves(state: State, free_start: bool) -> Iterator[tuple[int, State]]:
    """Every action that is legal, with the forward runs it takes."""
    done, slots, ranges, live, opened = state
    for k in slots | {j for _, j in ranges} | ({0} if free_start else set()):
        if k != live and k < done:
            yield 0, State(done, slots, ranges, k, False)
    for k in slots:
        yield 0, State(done, slots - {k}, ranges, live, opened)
    for i, j in ranges:
        if j == done:
            yield 0, _consumed(state, i)
    if live is None or live >= done:
        return
    if live not in slots:
        yield 0, State(done, slots | {live}, ranges, live, opened)
    recorded = (*ranges[:-1], (ranges[-1][0], live + 1)) if opened else (*ranges, (live, live + 1))
    if live + 1 == done:  # the stage being worked on, with the range it is a part of, goes back at once
        yield 1, _consumed(State(done, slots, recorded, None, False), recorded[-1][0])
        return
    yield 1, State(done, slots, ranges, live + 1, False)
    if not any(i <= live < j for i, j in ranges):
        yield 1, State(done, slots, recorded, live + 1, True)


def _consumed(state: State, first: int) -> State:
    ranges = tuple(r for r in state.ranges if r[0] != first)
    return State(first, frozenset(k for k in state.slots if k < first or k == first), ranges, None, False)


def _kept(sizes: Sizes, state: State, free_start: bool) -> int:
    """Bytes of all slots and ranges, every carry once and in the largest form in which something holds it."""
    carries: dict[int, int] = dict.fromkeys(state.slots, sizes.carry)
    total = 0
    for i, j in state.ranges:
        total += (j - i) * sizes.tape
        held = {i: sizes.entering, j: sizes.carry} | dict.fromkeys(range(i + 1, j), max(sizes.entering, sizes.leaving))
        for k, size in held.items():
            carries[k] = max(carries.get(k, 0), size)
    return total + sum(size for k, size in carries.items() if k or not free_start)


@cache
def hidden_states(steps: int, slots: int) -> int:
    """The recurrence of Gruslys et al. 2016 for HSM, as printed."""
    if slots == 1 or steps == 1:
        return steps * (steps + 1) // 2
    return min(y + hidden_states(steps - y, slots - 1) + hidden_states(y, slots) for y in range(1, steps))


@cache
def internal_states(steps: int, slots: int) -> int:
    """The recurrence of Gruslys et al. 2016 for ISM, as printed."""
    if steps == 0:
        return 0
    if slots == 1:
        return steps * (steps + 1) // 2
    return min(y + internal_states(steps - y, slots - 1) + internal_states(y - 1, slots) for y in range(1, steps + 1))


@cache
def mixed_states(steps: int, slots: int, alpha: int) -> int:
    """The recurrence of Gruslys et al. 2016 for MSM, as printed, with its care for small m."""
    if steps == 0:
        return 0
    found = steps * (steps + 1) // 2
    if slots > 1:
        both = (y + mixed_states(steps - y, slots - 1, alpha) + mixed_states(y, slots, alpha) for y in range(1, steps))
        found = min([found, *both])
    if slots - alpha >= 1:
        taped = (
            y + mixed_states(steps - y, slots - alpha, alpha) + mixed_states(y - 1, slots, alpha)
            for y in range(1, steps + 1)
        )
        found = min([found, *taped])
    return found


def dense_costs(sizes: Sizes, steps: int, keep: int, *, free_start: bool) -> int:
    """The tight recurrences, every y tried, in single bytes; `keep` bytes may be kept besides carry 0."""
    alone, beside = sizes.tape + sizes.entering + sizes.carry, sizes.tape + sizes.carry
    more, from_slot = sizes.tape + max(sizes.entering, sizes.leaving), sizes.tape + sizes.entering
    slot: list[list[int]] = []  # by memory: the range's start is in a slot of its own
    kept: list[list[int]] = []  # its start is held by something that outlives it
    end: list[list[int]] = []  # its start is the end of a range that can still be recorded on

    def first(table: list[list[int]], memory: int, price: int, t: int) -> int:
        return 1 + table[memory - price][t - 1] if price <= memory else 1 << 60

    for m in range(keep + 1):
        right = [0, 1]
        for n in range(2, steps + 1):
            stored = slot[m - sizes.carry][n] if sizes.carry <= m else 1 << 60
            right.append(min(stored, first(end, m, alone, n)))

        def best(t: int, row: list[int], right: list[int] = right) -> int:
            return min((y + row[y] + right[t - y] for y in range(1, t)), default=1)

        for table in (slot, kept, end):
            table.append([0])
        for t in range(1, steps + 1):
            kept[m].append(min(best(t, kept[m]), first(end, m, beside, t)))
            end[m].append(min(kept[m][t], first(end, m, more, t)))
            slot[m].append(min(best(t, slot[m]), first(end, m, from_slot, t)))
    return (kept if free_start else slot)[keep][steps]


def bytes_alive(chain: Chain, schedule: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """(bytes after, most bytes during) every action, added up from nothing, one stage at a time."""
    live: int | None = 0
    slots: set[int] = set()
    ranges: dict[int, Record] = {}
    done, final = chain.length, False

    def alive(adjoint: int, *, final: bool) -> int:
        total = chain.output_bytes + (chain.final_carry_bytes if final else 0)
        carries = {k: chain.carry_bytes(k) for k in (*slots, live) if k is not None and k < chain.length}
        for record in ranges.values():
            for k in range(record.start, record.stop):
                tape = chain.stage(k).menu[record.entry]
                total += tape.tape_bytes
                carries[k] = max(carries.get(k, 0), tape.entering_bytes)
                if k + 1 < chain.length:
                    ends = k + 1 == record.stop and not consuming
                    kept = chain.carry_bytes(k + 1) if ends else tape.leaving_bytes
                    carries[k + 1] = max(carries.get(k + 1, 0), kept)
        if chain.caller_keeps_carry:
            carries.pop(0, None)
        total += sum(carries.values())
        if adjoint < chain.length or consuming:
            total += chain.output_gradient_bytes + chain.input_gradient_bytes + chain.parameter_gradient_bytes
            total += sum(chain.stage(k).gradient_bytes for k in range(adjoint, chain.length))
            total += chain.carry_bytes(adjoint) if adjoint < chain.length else 0
        return total

    for action in schedule:
        consuming = False
        peak = 0
        if isinstance(action, Store):
            slots.add(action.at)
        elif isinstance(action, Load):
            live = action.at
        elif isinstance(action, Drop):
            peak = alive(done, final=final)
            slots.discard(action.at)
        elif isinstance(action, Advance):
            for k in range(action.start, action.stop):
                live = k
                workspace = chain.stage(k).workspace_bytes
                peak = max(peak, alive(done, final=final) + chain.carry_bytes(k + 1) + workspace)
            live, final = action.stop, final or action.stop == chain.length
        elif isinstance(action, Record):
            for k in range(action.start, action.stop):
                tape = chain.stage(k).menu[action.entry]  # the carry it started from is live until it ends
                new = tape.tape_bytes + chain.carry_bytes(k + 1) + tape.workspace_bytes
                peak = max(peak, alive(done, final=final) + new)
                ranges[action.start] = Record(action.start, k + 1, action.entry)
            live, final = action.stop, final or action.stop == chain.length
        else:
            live, consuming = None, True
            record = ranges[action.start]
            for k in range(action.stop - 1, action.start - 1, -1):
                ranges[action.start] = Record(action.start, k + 1, record.entry)
                workspace = chain.stage(k).menu[record.entry].backward_workspace_bytes
                stays = 0  # the adjoint that came in, and what the newest tape kept of its carry
                if k + 1 < action.stop < chain.length:
                    stays = chain.carry_bytes(action.stop)
                    stays += chain.stage(action.stop - 1).menu[record.entry].leaving_bytes
                peak = max(peak, alive(k + 1, final=final) + stays + workspace)
            del ranges[action.start]
            done = action.start
        after = alive(done, final=final)
        yield after, after if isinstance(action, Store | Load) else peak
