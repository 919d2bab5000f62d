"""The judge: carries a schedule out on paper, in exact bytes, and refuses what cannot be carried out.

It knows chains and actions and nothing of planners, so that it cannot share their defects. The rules of what is alive
stand in `chains`. Time per action is constant, memory grows with what the schedule keeps, not with its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import msgspec
import numpy as np

from .chains import Chain
from .errors import IllegalSchedule
from .schedules import Action, Advance, Backward, Drop, Load, Record, Schedule, Store


class Moment(msgspec.Struct, frozen=True):
    """One action of a simulated schedule.

    Attributes:
        action: what was done.
        end_s: seconds since the start when it ended.
        bytes: alive after it.
        peak_bytes: most alive during it.
    """

    action: Action
    end_s: float
    bytes: int
    peak_bytes: int


class Simulation(msgspec.Struct, frozen=True):
    """What a schedule costs.

    Attributes:
        peak_bytes: most bytes alive at any moment, over those at the start.
        seconds: time of all actions.
        forward_runs: how often a stage was run forward, recorded or not, in all.
        recorded_runs: how many of those kept a tape.
        actions: how many actions there were.
        peak_position: the first action that reached the peak.
    """

    peak_bytes: int
    seconds: float
    forward_runs: int
    recorded_runs: int
    actions: int
    peak_position: int


def simulate(chain: Chain, schedule: Iterable[Action]) -> Simulation:
    """Carry the schedule out on paper.

    Raises:
        IllegalSchedule: an action cannot be carried out where it stands, or something is left undone at the end.
    """
    machine = _Machine(chain)
    for action in schedule:
        machine.do(action)
    machine.finish()
    return Simulation(
        machine.peak_bytes,
        machine.seconds,
        machine.forward_runs,
        machine.recorded_runs,
        machine.position,
        machine.peak_position,
    )


def timeline(chain: Chain, schedule: Iterable[Action]) -> Iterator[Moment]:
    """The simulated schedule, action by action, as it streams; raises as `simulate` does."""
    machine = _Machine(chain)
    for action in schedule:
        peak = machine.do(action)
        yield Moment(action, machine.seconds, machine.bytes, peak)
    machine.finish()


def forward_runs_per_stage(chain: Chain, schedule: Schedule) -> np.ndarray:
    """How often each stage is run forward: int64 of shape (length,)."""
    difference = np.zeros(chain.length + 1, dtype=np.int64)
    for action in schedule:
        if isinstance(action, Advance | Record):
            difference[action.start] += 1
            difference[action.stop] -= 1
    return np.cumsum(difference[:-1])


class _Machine:
    """Everything that is alive, and how it changes."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.length = chain.length
        self.live: int | None = 0
        self.slots: set[int] = set()
        self.starts: dict[int, Record] = {}  # recorded ranges by their first stage
        self.ends: dict[int, Record] = {}  # and by the carry at their end
        self.done = self.length  # stages from here on have had their backward
        self.final_carries = 0  # how often carry L was made; the caller keeps the first
        self.position = 0
        self.seconds = 0.0
        self.forward_runs = 0
        self.recorded_runs = 0
        self.bytes = chain.output_bytes + self._alive(0)
        self.peak_bytes = self.bytes
        self.peak_position = 0
        self._verbs: dict[type, Callable[..., int]] = {
            Advance: self._advance,
            Store: self._store,
            Load: self._load,
            Drop: self._drop,
            Record: self._record,
            Backward: self._backward,
        }

    def do(self, action: Action) -> int:
        """Carry out one action; returns the most bytes alive during it."""
        peak = self._verbs[type(action)](action)
        if peak > self.peak_bytes:
            self.peak_bytes, self.peak_position = peak, self.position
        self.position += 1
        return peak

    def finish(self) -> None:
        if self.done:
            self._refuse(None, f"stages 0 … {self.done - 1} have had no backward")
        if self.slots:
            self._refuse(None, f"carries {sorted(self.slots)} are still in slots")

    def _refuse(self, action: Action | None, reason: str) -> NoReturn:
        raise IllegalSchedule(action, self.position, reason)

    # ---- what is alive

    def _alive(self, k: int | None) -> int:
        """Bytes of carry k that are alive and counted."""
        if k is None or (k == 0 and self.chain.caller_keeps_carry):
            return 0
        if k == self.length:
            copy = self.final_carries > 1 and (self.live == k or k in self.ends)
            return self.chain.final_carry_bytes if copy else 0
        if k in self.slots or self.live == k or k in self.ends:
            return self.chain.carry_bytes(k)
        record = self.starts.get(k)
        return self.chain.stage(k).menu[record.entry].entering_bytes if record else 0

    def _set_live(self, k: int | None) -> None:
        old = self.live
        if old == k:
            return
        before = self._alive(old) + self._alive(k)
        self.live = k
        self.bytes += self._alive(old) + self._alive(k) - before

    def _make_final_carry(self) -> int:
        """Carry L has been made; returns the bytes that this adds to what the caller keeps."""
        self.final_carries += 1
        return self.chain.final_carry_bytes if self.final_carries == 1 else 0

    def _kept_between(self, k: int, entry: int) -> int:
        """Bytes of carry k inside a recorded range, where only tapes keep it."""
        after, before = self.chain.stage(k).menu[entry], self.chain.stage(k - 1).menu[entry]
        return max(after.entering_bytes, before.leaving_bytes)

    # ---- actions: each returns the peak during it and leaves `bytes` as they are after it

    def _check_run(self, action: Advance | Record) -> None:
        if not 0 <= action.start < action.stop <= self.length:
            self._refuse(action, f"not a range of stages within 0 … {self.length}")
        if self.live != action.start:
            where = "no carry is live" if self.live is None else f"the live carry is {self.live}"
            self._refuse(action, f"it needs carry {action.start}, but {where}")
        if action.stop > self.done:
            self._refuse(action, f"the backward of stages from {self.done} on is already done")

    def _advance(self, action: Advance) -> int:
        self._check_run(action)
        chain, peak = self.chain, 0
        for stage, start, stop in chain.pieces(action.start, action.stop):
            # In the middle all stages need the same; the first may find its carry stored, the last may leave another.
            for k in (start, min(start + 1, stop - 1), stop - 1):
                self._set_live(k)
                peak = max(peak, self.bytes + chain.carry_bytes(k + 1) + stage.workspace_bytes)
            self.seconds += (stop - start) * stage.forward_s
        self.forward_runs += action.stop - action.start
        if action.stop == self.length:
            self.bytes += self._make_final_carry()
        self._set_live(action.stop)
        return peak

    def _store(self, action: Store) -> int:
        if self.live != action.at:
            self._refuse(action, "it is not the live carry")
        if action.at in self.slots:
            self._refuse(action, "it is stored already")
        self.slots.add(action.at)  # a live carry is alive in full already
        return self.bytes

    def _load(self, action: Load) -> int:
        held = action.at in self.slots or action.at in self.ends or (action.at == 0 and self.chain.caller_keeps_carry)
        if not held:
            self._refuse(action, "it is in no slot and ends no recorded range")
        self._set_live(action.at)
        return self.bytes

    def _drop(self, action: Drop) -> int:
        if action.at not in self.slots:
            self._refuse(action, "it is in no slot")
        peak = self.bytes
        before = self._alive(action.at)
        self.slots.remove(action.at)
        self.bytes += self._alive(action.at) - before
        return peak

    def _record(self, action: Record) -> int:
        self._check_run(action)
        chain, entry = self.chain, action.entry
        for stage, start, _ in chain.pieces(action.start, action.stop):
            if not 0 <= entry < len(stage.menu):
                self._refuse(action, f"stage {start} has {len(stage.menu)} menu entries, none with index {entry}")
        if action.stop in self.ends or any(r.start < action.stop and action.start < r.stop for r in self.ends.values()):
            self._refuse(action, "a part of it is recorded already")
        # Grow from left to right. `alive` counts the leaving carry of every stage in full while it is the newest.
        alive, peak = self.bytes, 0
        for stage, start, stop in chain.pieces(action.start, action.stop):
            tape = stage.menu[entry]
            # Between the first stage of a run and its last, whose leaving carry may be another, the growth is even.
            for first, last in ((start, start), (start + 1, stop - 2), (max(start + 1, stop - 1), stop - 1)):
                if first > last:
                    continue
                if last > first:
                    between = self._kept_between(last, entry)
                    alive += (last - first) * (tape.tape_bytes + between)
                peak = max(peak, alive + tape.tape_bytes + chain.carry_bytes(last + 1) + tape.workspace_bytes)
                alive += tape.tape_bytes + chain.carry_bytes(last + 1)
                if last > action.start:
                    alive += self._kept_between(last, entry) - chain.carry_bytes(last)
            self.seconds += (stop - start) * tape.forward_s
        final = self._make_final_carry() if action.stop == self.length else 0
        self.forward_runs += action.stop - action.start
        self.recorded_runs += action.stop - action.start
        self.bytes += self._range_bytes(action) + final
        before = self._alive(action.start) + self._alive(action.stop)
        self.starts[action.start] = self.ends[action.stop] = action
        self.live = action.stop
        self.bytes += self._alive(action.start) + self._alive(action.stop) - before
        return peak

    def _range_bytes(self, action: Record) -> int:
        """Tapes of a recorded range and what they keep of the carries inside it."""
        total = 0
        for stage, start, stop in self.chain.pieces(action.start, action.stop):
            total += (stop - start) * stage.menu[action.entry].tape_bytes
            if start > action.start:
                total += self._kept_between(start, action.entry)
            if stop - start > 1:
                total += (stop - start - 1) * self._kept_between(start + 1, action.entry)
        return total

    def _backward(self, action: Backward) -> int:
        record = self.ends.get(action.stop)
        if record is None or record.start != action.start:
            self._refuse(action, "it is not a recorded range")
        if action.stop != self.done:
            self._refuse(action, f"the adjoint at hand is that of carry {self.done}")
        chain, entry = self.chain, record.entry
        self._set_live(None)
        if self.done == self.length:
            self.bytes += chain.backward_fixed_bytes
        kept = self._range_bytes(record)
        before = self._alive(action.stop)
        del self.ends[action.stop]
        leaving = 0  # what only the newest tape keeps of carry `stop`
        if action.stop < self.length and not self._alive(action.stop):
            leaving = chain.stage(action.stop - 1).menu[entry].leaving_bytes
        self.bytes += self._alive(action.stop) + leaving - before
        peak = self._consume(action, entry)
        self.bytes += self._adjoint_bytes(action.start) - self._adjoint_bytes(action.stop) - kept - leaving
        self.bytes += sum((b - a) * stage.gradient_bytes for stage, a, b in chain.pieces(action.start, action.stop))
        before = self._alive(action.start)
        del self.starts[action.start]
        self.bytes += self._alive(action.start) - before
        self.done = action.start
        return peak

    def _adjoint_bytes(self, k: int) -> int:
        return 0 if k == self.length else self.chain.carry_bytes(k)

    def _consume(self, action: Backward, entry: int) -> int:
        """The peak while tapes go away newest first.

        The adjoint that came in, and what the newest tape kept of its carry, stay until the whole range is done; the
        adjoint at hand comes on top, with what the tape at hand keeps of its carry.
        """
        alive, peak, inside = self.bytes, 0, 0
        for stage, start, stop in reversed(list(self.chain.pieces(action.start, action.stop))):
            tape, newest = stage.menu[entry], stop
            while newest > start:
                if newest < action.stop:
                    inside = self.chain.carry_bytes(newest) + tape.leaving_bytes
                peak = max(peak, alive + inside + tape.backward_workspace_bytes)
                # The newest of a run goes by itself, then all but the oldest together: among those the change is even.
                oldest = newest - 1 if newest == stop or newest - start == 1 else start + 1
                alive -= (newest - oldest) * (tape.tape_bytes - stage.gradient_bytes)
                if oldest > action.start:
                    alive -= (newest - oldest) * self._kept_between(oldest, entry)
                newest = oldest
            self.seconds += (stop - start) * tape.backward_s
        return peak
