"""Exhaustive search over all legal schedules of a small chain, in exact bytes and seconds.

It shares no code with planners or simulator: bytes are counted afresh from what is alive (see `remat.chains`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from remat.chains import Chain, Tape
from remat.schedules import Action, Advance, Backward, Drop, Load, Record, Store


class State(NamedTuple):
    live: int | None
    slots: frozenset[int]
    ranges: frozenset[Record]
    done: int
    finals: int = 0  # how often the final carry was made, at most 2 told apart


@dataclass(frozen=True)
class Found:
    seconds: float
    peak_bytes: int
    actions: tuple[Action, ...]


def frontier(chain: Chain) -> list[Found]:
    """All best pairs of seconds and peak, fastest first, each with a schedule."""
    machine = _Machine(chain)
    ticket = count()
    start = State(0, frozenset(), frozenset(), chain.length)
    heap: list[tuple[float, int, int, State, tuple | None]] = [(0.0, machine.bytes(start), next(ticket), start, None)]
    least: dict[State, int] = {}
    moves: dict[State, list[tuple[Action, State, float, int]]] = {}
    found: list[Found] = []
    while heap:
        seconds, peak, _, state, trail = heappop(heap)
        if peak >= least.get(state, peak + 1) or (found and peak >= found[-1].peak_bytes):
            continue
        least[state] = peak
        if state.done == 0 and not state.slots:
            found.append(Found(seconds, peak, _unwind(trail)))
            continue
        if state not in moves:
            moves[state] = list(machine.moves(state))
        for action, after, time, most in moves[state]:
            reached = max(peak, most)
            if reached < least.get(after, reached + 1):
                heappush(heap, (seconds + time, reached, next(ticket), after, (action, trail)))
    return found


def _unwind(trail: tuple | None) -> tuple[Action, ...]:
    actions = []
    while trail is not None:
        action, trail = trail
        actions.append(action)
    return tuple(reversed(actions))


class _Machine:
    def __init__(self, chain: Chain) -> None:
        self.chain, self.length = chain, chain.length
        self.carry = [chain.carry_bytes(k) for k in range(chain.length + 1)]
        self.stages = [chain.stage(k) for k in range(chain.length)]
        self._known: dict[State, int] = {}

    def _tapes(self, state: State) -> dict[int, Tape]:
        return {k: self.stages[k].menu[r.entry] for r in state.ranges for k in range(r.start, r.stop)}

    def bytes(self, state: State) -> int:
        if state not in self._known:
            self._known[state] = self._count(state, self._tapes(state), {r.stop for r in state.ranges})
        return self._known[state]

    def _count(self, state: State, tapes: dict[int, Tape], ends: set[int]) -> int:
        chain = self.chain
        total = chain.output_bytes + sum(tape.tape_bytes for tape in tapes.values())
        total += chain.final_carry_bytes * (state.finals > 0)
        total += chain.final_carry_bytes * (state.finals > 1 and (state.live == self.length or self.length in ends))
        if state.done < self.length:
            total += chain.backward_fixed_bytes + self.carry[state.done]
            total += sum(stage.gradient_bytes for stage in self.stages[state.done :])
        for k in range(1 if chain.caller_keeps_carry else 0, self.length):
            if k in state.slots or k in ends or k == state.live:
                total += self.carry[k]
            else:
                before = tapes[k - 1].leaving_bytes if k - 1 in tapes else 0
                total += max(before, tapes[k].entering_bytes if k in tapes else 0)
        return total

    def moves(self, state: State) -> Iterator[tuple[Action, State, float, int]]:
        """Every legal action with the state after it, its seconds and its peak."""
        if state.live is not None:
            yield from self._runs(state, state.live)
            if state.live not in state.slots and state.live < state.done:  # others are of no use
                yield Store(state.live), state._replace(slots=state.slots | {state.live}), 0.0, self.bytes(state)
        held = state.slots | {r.stop for r in state.ranges} | ({0} if self.chain.caller_keeps_carry else set())
        for k in held - {state.live}:
            after = state._replace(live=k)
            yield Load(k), after, 0.0, self.bytes(after)
        for k in state.slots:
            yield Drop(k), state._replace(slots=state.slots - {k}), 0.0, self.bytes(state)
        for record in state.ranges:
            if record.stop == state.done:
                after = state._replace(live=None, ranges=state.ranges - {record}, done=record.start)
                tapes = [self.stages[k].menu[record.entry] for k in range(record.start, record.stop)]
                yield (
                    Backward(record.start, record.stop),
                    after,
                    sum(tape.backward_s for tape in tapes),
                    self._backward_peak(state, record),
                )

    def _runs(self, state: State, k: int) -> Iterator[tuple[Action, State, float, int]]:
        if k >= state.done:
            return
        finals = min(2, state.finals + 1) if k + 1 == self.length else state.finals
        peak = self.bytes(state) + self.carry[k + 1] + self.stages[k].workspace_bytes
        yield Advance(k, k + 1), state._replace(live=k + 1, finals=finals), self.stages[k].forward_s, peak
        recorded = self._tapes(state)
        for entry in range(len(self.stages[k].menu)):
            alive, peak, seconds = self.bytes(state), 0, 0.0
            for last in range(k, state.done):
                if last in recorded or entry >= len(self.stages[last].menu):
                    break
                tape = self.stages[last].menu[entry]
                entered = self.carry[last] if last > k else 0  # in full until the stage has run
                peak = max(peak, alive + entered + tape.tape_bytes + self.carry[last + 1] + tape.workspace_bytes)
                if last > k:
                    alive += max(tape.entering_bytes, self.stages[last - 1].menu[entry].leaving_bytes)
                alive += tape.tape_bytes
                seconds += tape.forward_s
                record = Record(k, last + 1, entry)
                finals = min(2, state.finals + 1) if last + 1 == self.length else state.finals
                after = state._replace(live=last + 1, ranges=state.ranges | {record}, finals=finals)
                yield record, after, seconds, peak

    def _backward_peak(self, state: State, record: Record) -> int:
        """Newest stage first; the adjoint that came in stays until the end."""
        peak = 0
        incoming = 0 if record.stop == self.length else self.carry[record.stop]
        for k in reversed(range(record.start, record.stop)):
            rest = state.ranges - {record} | {Record(record.start, k + 1, record.entry)}
            # While the newest stage of `rest` is consumed its end is no longer held, but what its tape keeps of it is.
            during = State(None, state.slots, rest, k + 1, state.finals)
            tape = self.stages[k].menu[record.entry]
            alive = self._count(during, self._tapes(during), {r.stop for r in rest if r.stop != k + 1})
            if k + 1 < record.stop:
                alive += incoming
                if record.stop < self.length:
                    alive += self.stages[record.stop - 1].menu[record.entry].leaving_bytes
            if k + 1 == self.length:
                alive += self.chain.backward_fixed_bytes
            peak = max(peak, alive + tape.backward_workspace_bytes)
        return peak
