"""Memory outside the recurrences: what no schedule can do without, and the room that is left for what it keeps.

A schedule of one repeated stage keeps slots and recorded ranges; all else it needs at some moment is the same whatever
it keeps. `Room` adds that up once, so that a planner that keeps at most `room` bytes stays inside the budget:

* fixed: outputs, final carry, gradients;
* reserve: one adjoint, and the stage that is being worked on — two carries while it is advanced, or its live carry, its
  tape, its end carry and what recording and backward allocate in passing.

With every workspace 0 and in the paper's units the reserve is the paper's "internal state being worked on", the live
hidden state and the adjoint, none of which the paper's m counts: a budget of m hidden states is fixed + reserve + m.
"""

from __future__ import annotations

import msgspec

from ..chains import Chain, Stage, Tape
from ..errors import InfeasibleBudget, UnsupportedChain
from . import _bytes


class Room(msgspec.Struct, frozen=True):
    """The byte costs of one repeated stage, recorded as one menu entry.

    Attributes:
        steps: how many stages.
        stage: the stage.
        entry: the menu entry it is recorded with.
        fixed_bytes: outputs, final carry and all gradients.
        reserve_bytes: most that is needed at any moment beyond fixed and kept bytes.
        free_start: whether carry 0 costs nothing, because the caller keeps it.
    """

    steps: int
    stage: Stage
    entry: int
    fixed_bytes: int
    reserve_bytes: int
    free_start: bool

    @classmethod
    def of(cls, chain: Chain, entry: int = 0, *, planner: str = "tight") -> Room:
        """The room of a chain of one repeated stage; `UnsupportedChain` for any other."""
        if len(chain.runs) != 1:
            raise UnsupportedChain(
                f"planner {planner!r} plans one repeated stage, not a chain of {len(chain.runs)} kinds of stages; "
                "'unequal' plans those exactly, 'sqrt', 'recursive' and 'constant' by rule"
            )
        stage, steps = chain.runs[0]
        tape = stage.menu[entry]
        fixed = chain.output_bytes + chain.final_carry_bytes + chain.backward_fixed_bytes
        # Stages' own gradients come one by one; counting all from the start errs on the safe side.
        fixed += steps * stage.gradient_bytes
        return cls(steps, stage, entry, fixed, _reserve(stage, tape), chain.caller_keeps_carry)

    @property
    def carry(self) -> int:
        """Bytes of a stored carry."""
        return self.stage.carry_bytes

    @property
    def tape(self) -> Tape:
        """How the stage is recorded."""
        return self.stage.menu[self.entry]

    @property
    def alone(self) -> int:
        """Bytes of a recorded stage with nothing kept before it: what it keeps of both its carries included."""
        return self.tape.tape_bytes + self.tape.entering_bytes + self.carry

    @property
    def beside(self) -> int:
        """Bytes of a recorded stage whose entering carry is kept in full anyway."""
        return self.tape.tape_bytes + self.carry

    @property
    def more(self) -> int:
        """Bytes by which a recorded range grows with its next stage."""
        return self.tape.tape_bytes + max(self.tape.entering_bytes, self.tape.leaving_bytes)

    @property
    def start_bytes(self) -> int:
        """Bytes of carry 0 in its slot."""
        return 0 if self.free_start else self.carry

    def keep(self, budget_bytes: int) -> int:
        """Bytes that may be kept besides carry 0; negative when not even that fits."""
        return budget_bytes - self.fixed_bytes - self.reserve_bytes - self.start_bytes

    def seconds(self, forward_runs: int) -> float:
        """Time of a schedule that records every stage once and runs `forward_runs` in all."""
        once = self.tape.forward_s + self.tape.backward_s - self.stage.forward_s
        return forward_runs * self.stage.forward_s + self.steps * once


def _reserve(stage: Stage, tape: Tape) -> int:
    carry = stage.carry_bytes
    between = max(tape.entering_bytes, tape.leaving_bytes)
    advancing = 2 * carry + stage.workspace_bytes
    recording = 2 * carry + tape.tape_bytes + tape.workspace_bytes
    # The last stage of a kept range gives up its end carry, but may leave more between it and the newest one.
    newest = max(tape.entering_bytes, between - carry) + tape.tape_bytes
    # Once the newest is consumed, the next one's adjoint comes on top, and what it keeps of the carry in between.
    consuming = max(newest, tape.leaving_bytes) + tape.leaving_bytes + tape.backward_workspace_bytes
    return carry + max(advancing, recording, consuming)


def slots_budget_bytes(chain: Chain, slots: int, entry: int = 0) -> int:
    """The budget with which exactly `slots` carries can be stored, the initial one counted among them."""
    if slots < 1:
        raise ValueError(f"the initial carry takes one slot, so there is at least 1, not {slots}")
    room = Room.of(chain, entry)
    return room.fixed_bytes + room.reserve_bytes + room.start_bytes + (slots - 1) * room.carry


def in_paper_units(planner: str, steps: int, slots: int, alpha: int = 2) -> tuple[Chain, int]:
    """The chain and budget with which a planner solves the paper's problem of `slots` units.

    HSM, MSM: `slots` counts hidden states, the initial one included, an internal state counts `alpha`. ISM: `slots`
    counts internal states, the one being worked on included; the initial hidden state is free.
    """
    chain = Chain.in_paper_units(steps, alpha)
    if planner != "ism":
        return chain, slots_budget_bytes(chain, slots)
    if slots < 1:
        raise ValueError(f"the internal state being worked on takes one slot, so there is at least 1, not {slots}")
    chain = Chain(chain.runs, chain.final_carry_bytes, caller_keeps_carry=True)
    return chain, slots_budget_bytes(chain, 1) + (slots - 1) * alpha


def start_bytes(chain: Chain) -> int:
    """Bytes of carry 0 in its slot: none if the caller keeps it anyway."""
    return 0 if chain.caller_keeps_carry else chain.carry_bytes(0)


class Smallest(msgspec.Struct, frozen=True):
    """The smallest budget with which some planner has a schedule.

    Attributes:
        peak_bytes: that budget.
        parts_bytes: what it is made of, by name; the sum is `peak_bytes`.
    """

    peak_bytes: int
    parts_bytes: dict[str, int]

    def refusal(self, budget_bytes: int) -> InfeasibleBudget:
        """The error for a budget below it."""
        return InfeasibleBudget(budget_bytes, self.peak_bytes, self.parts_bytes)


def smallest(chain: Chain) -> Smallest:
    """The peak of the constant-memory schedule, every run recorded as the menu entry that needs least."""
    worst = [
        min((*moment, entry) for entry, moment in enumerate(run_peaks(chain, run))) for run in range(len(chain.runs))
    ]
    peak, last, entry = max(worst)
    done = last + 1
    own = sum((stop - start) * stage.gradient_bytes for stage, start, stop in chain.pieces(done, chain.length))
    parts = {
        "outputs": chain.output_bytes,
        "gradients of outputs": chain.output_gradient_bytes,
        "gradients of inputs": chain.input_gradient_bytes,
        "gradients of parameters": chain.parameter_gradient_bytes + own,
        "final carry": chain.final_carry_bytes,
        "adjoints": chain.carry_bytes(done) if done < chain.length else 0,
        "one step's tape": chain.stage(done - 1).menu[entry].tape_bytes,
    }
    # The stage's backward holds all of these at once, so what is left over is never negative.
    return Smallest(peak, parts | {"workspace": peak - sum(parts.values())})


def run_peaks(chain: Chain, run: int) -> list[tuple[int, int]]:
    """For every menu entry of a run's stage, constant memory's (peak bytes, stage worked on then) within the run.

    In the middle of a run every stage needs the same but for the gradients that have come, which grow evenly, so both
    ends of the run and their neighbours decide.
    """
    (stage, count), first = chain.runs[run], chain.starts[run]
    offsets = sorted({k for k in (0, 1, 2, count - 3, count - 2, count - 1) if 0 <= k < count})
    return [
        max((constant_peak(chain, first + k, entry), first + k) for k in offsets) for entry in range(len(stage.menu))
    ]


def constant_peak(chain: Chain, k: int, entry: int) -> int:
    """Most bytes while constant memory works on stage k: from carry 0 forward to k, recorded, and back."""
    start = 0 if chain.caller_keeps_carry or k == 0 else chain.carry_bytes(0)
    held = k == 0 and chain.caller_keeps_carry
    peak = _bytes.work_peak(chain, k, k + 1, start, entry, held=held)
    if k == 0:
        return peak
    fixed = _bytes.before_backward(chain) if k + 1 == chain.length else _bytes.after_backward(chain, k + 1)
    return max(peak, fixed + start + _bytes.advance_need(chain, 0, k, held=True))
