"""How long the chunks of a recurrent layer are, and how sweeps that follow each other share one budget.

Both are functions of shapes and budget alone, not of measured seconds: the chunk length decides the last bits of
gradients, so a program that runs twice, or as several processes, must choose the same. Time is counted in steps
instead: one kernel call costs its steps and `_CALL_STEPS` more. Bytes are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from .chains import Chain, Stage, Tape
from .errors import InfeasibleBudget
from .planners.room import smallest
from .plans import Plan, plan
from .profiler import Costs
from .schedules import Backward
from .simulator import timeline

_CALL_STEPS: Final = 2  # measured on LSTM and GRU of 64 to 512 units: 0 to 4
_LONGEST: Final = 64  # longer chunks save less than 3 % of the time
_PROBED: Final = 4  # costs are measured up to here, and at the length that is chosen


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided.

    Attributes:
        chunk: steps in a chunk; 0 when the whole layer fits as one plain call.
        plans: one for every sweep.
    """

    chunk: int
    plans: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A recurrent layer as sweeps, one after the other, and in backward the last first.

    Attributes:
        limit: the budget in bytes.
        fixed: for every sweep, bytes alive while it is at work that are no sweep's own: inputs and outputs of layers,
            their gradients, masks.
        plain: bytes that the plain call may need beyond what the sweeps need.
        longest: the number of steps (of full steps, if packed).
        pieces: how many chunks of so many steps there are, and how long the longest is.
        measured: the costs of one chunk of a sweep: (sweep, steps, bytes that may be taken) -> costs.
    """

    limit: int
    fixed: tuple[int, ...]
    plain: int
    longest: int
    pieces: Callable[[int], tuple[int, int]]
    measured: Callable[[int, int, int], Costs]

    def choose(self, chunk: int | None) -> Choice:
        """The chunk length with the least time within the budget, or the given one.

        Raises:
            InfeasibleBudget: not even chunks of one step, or those of the given length, fit.
        """
        if chunk is not None:
            lengths = [min(chunk, self.longest)]
            ranked = [(0, lengths[0])]
        else:
            probed = self._probe()
            top = _LONGEST if probed == _PROBED else probed
            lengths = [1 << k for k in range(top.bit_length()) if 1 << k <= self.longest]
            ranked = self._ranked(lengths)
        for _, length in ranked:
            count, size = self.pieces(length)
            costs = [self._costs(index, size) for index in range(len(self.fixed))]
            plans = self._shared(costs, count)
            if plans is not None:
                keeps_all = chunk is None and all(made.forward_runs == count for made in plans)
                return Choice(0) if keeps_all and self._plain_fits(costs, size) else Choice(length, plans)
        raise self._refusal(lengths[0])

    # ---- costs

    def _costs(self, sweep: int, size: int) -> Costs:
        return self.measured(sweep, size, self.limit - self.fixed[sweep])

    def _probe(self) -> int:
        """Measure short chunks, each only where twice the one before is sure to fit; returns the longest."""
        length = 1
        while length < _PROBED and 2 * length <= self.longest:
            count, size = self.pieces(length)
            doubled = [_extended(None, self._costs(index, size), 2) for index in range(len(self.fixed))]
            if self._least(doubled, count) > self.limit:
                break
            length *= 2
        return length

    def _expected(self, sweep: int, size: int) -> Costs:
        """Costs of a chunk, on the straight line through those of the two longest that are measured first."""
        if size <= _PROBED:
            return self._costs(sweep, size)
        half, full = self._costs(sweep, _PROBED // 2), self._costs(sweep, _PROBED)
        return _extended(half, full, 1 + (size - _PROBED) / (_PROBED - _PROBED // 2))

    def _ranked(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """(time, length) of those that are expected to fit, the best first."""
        found: list[tuple[int, int]] = []
        for length in reversed(lengths):
            count, size = self.pieces(length)
            if found and min(found)[0] <= 3 * len(self.fixed) * count * (size + _CALL_STEPS):
                break  # shorter chunks take longer even if nothing is recomputed
            plans = self._shared([self._expected(index, size) for index in range(len(self.fixed))], count)
            if plans is not None:
                runs = sum(made.forward_runs + 2 * count for made in plans)
                found.append((runs * (size + _CALL_STEPS), -length))
        return [(time, -length) for time, length in sorted(found)]

    # ---- one budget for all sweeps

    def _shared(self, costs: Sequence[Costs], count: int) -> tuple[Plan, ...] | None:
        """Plans within the budget, each sweep with the same room beyond the least it needs; None if there are none."""
        chains = [_chain(cost, count) for cost in costs]
        least = [smallest(chain).peak_bytes for chain in chains]

        def at(room: int) -> list[tuple[Plan, int]] | None:
            made = [_planned(chain, need + room) for chain, need in zip(chains, least, strict=True)]
            return made if self._peak(made) <= self.limit else None

        if len(chains) == 1:
            made = at(room) if (room := self.limit - self.fixed[0] - least[0]) >= 0 else None
        else:
            room = self._common_room(chains, least)
            made = (at(room) if room > 0 else None) or at(0)
            if made is not None and room > 0:  # more, as they keep less than they might
                made = at(room + (self.limit - self._peak(made)) // len(chains)) or made
        return tuple(each for each, _ in made) if made is not None else None

    def _common_room(self, chains: Sequence[Chain], least: Sequence[int]) -> int:
        """Room that every sweep can have at once.

        When its first backward begins, a sweep holds what it keeps, gradients and workspace, all within its budget: so
        it keeps no more than its budget without those.
        """
        kept, room = 0, self.limit
        after = sum(map(_left_bytes, chains))
        for index, (fixed, chain, need) in enumerate(zip(self.fixed, chains, least, strict=True)):
            after -= _left_bytes(chain)
            room = min(room, (self.limit - fixed - kept - need - after) // (index + 1))
            kept += need - chain.parameter_gradient_bytes - chain.stage(0).menu[0].backward_workspace_bytes
        return room

    def _peak(self, made: Sequence[tuple[Plan, int]]) -> int:
        """Most bytes at any time: what a sweep at work needs, those before it keep, and those after it left."""
        before, peak = 0, 0
        after = sum(_left_bytes(each.chain) for each, _ in made)
        for fixed, (current, kept) in zip(self.fixed, made, strict=True):
            after -= _left_bytes(current.chain)
            peak = max(peak, fixed + before + current.peak_bytes + after)
            before += kept
        return peak

    def _least(self, costs: Sequence[Costs], count: int) -> int:
        chains = [_chain(cost, count) for cost in costs]
        return self._peak([_planned(chain, smallest(chain).peak_bytes) for chain in chains])

    def _plain_fits(self, costs: Sequence[Costs], size: int) -> bool:
        """Whether the plain call is sure to fit.

        What a kernel needs grows with its steps no faster than in proportion, as a larger or smaller constant is part
        of it, so a chunk's bytes times the number of chunks are enough.
        """
        times = -(-self.longest // size)
        whole = [smallest(_chain(_extended(None, cost, times), 1)).peak_bytes for cost in costs]
        return max(self.fixed) + sum(whole) + self.plain <= self.limit

    def _refusal(self, length: int) -> InfeasibleBudget:
        count, size = self.pieces(length)
        costs = [self._costs(index, size) for index in range(len(self.fixed))]
        least = self._least(costs, count)
        between = max(self.fixed)
        parameters = min(sum(cost.parameter_gradient_bytes for cost in costs), least - between)
        parts = {
            "inputs, outputs and their gradients": between,
            "gradients of parameters": parameters,
            "states, one chunk's tape and workspace": least - between - parameters,
        }
        return InfeasibleBudget(self.limit, least, parts)


def _chain(costs: Costs, count: int) -> Chain:
    """A sweep by itself; seconds in kernel calls, so that equal shapes have equal plans."""
    tape = msgspec.structs.replace(costs.stage.menu[0], forward_s=1.0, backward_s=2.0)
    stage = msgspec.structs.replace(costs.stage, menu=(tape,), forward_s=1.0)
    return Chain.repeat(stage, count, parameter_gradient_bytes=costs.parameter_gradient_bytes)


@lru_cache(maxsize=1024)
def _planned(chain: Chain, budget_bytes: int) -> tuple[Plan, int]:
    """A sweep's plan, and the bytes that it keeps from the end of its forward to the start of its backward."""
    made = plan(chain, budget_bytes)
    kept = 0
    for moment in timeline(chain, made.schedule):
        if isinstance(moment.action, Backward):
            break
        kept = moment.bytes
    return made, kept


def _left_bytes(chain: Chain) -> int:
    """What a sweep leaves after its backward: gradients, and its final states, which the caller has."""
    return chain.parameter_gradient_bytes + chain.final_carry_bytes + chain.carry_bytes(0)


def _extended(half: Costs | None, full: Costs, times: float) -> Costs:
    """Costs `half + times × (full − half)`, rounded up; carries and the gradients of parameters do not grow."""

    def sizes(a: Stage | Tape | None, b: Stage | Tape, names: Sequence[str]) -> dict[str, int]:
        low = [getattr(a, name) if a is not None else 0 for name in names]
        high = [getattr(b, name) for name in names]
        return {name: max(y, -int(-(x + times * (y - x)) // 1)) for name, x, y in zip(names, low, high, strict=True)}

    tape = full.stage.menu[0]
    tape = msgspec.structs.replace(tape, **sizes(None if half is None else half.stage.menu[0], tape, _TAPE_SIZES))
    stage = msgspec.structs.replace(
        full.stage, menu=(tape,), **sizes(None if half is None else half.stage, full.stage, _STAGE_SIZES)
    )
    return Costs(stage, 0, 0, 0, full.parameter_gradient_bytes)


_TAPE_SIZES: Final = ("tape_bytes", "workspace_bytes", "backward_workspace_bytes")
_STAGE_SIZES: Final = ("workspace_bytes",)
