"""The problem a planner solves: stages in order, with what each costs in bytes and seconds.

Words: a *stage* is one application of the step (or one block). Stage k turns *carry* k into carry k+1, so a chain of
L stages has the carries 0 … L; carry 0 comes from the caller and carry L is an output. Running a stage with autograd
keeps a *tape* until its backward; the *menu* of a stage lists the ways in which its tape can be kept.

What is alive at a moment, which simulator and planners both count (and nothing else may count):

* carry k in full, if it sits in a slot, is the live carry, ends a recorded range, or the caller keeps it;
* otherwise only what a tape keeps of it: the larger of `entering_bytes` of stage k's tape and `leaving_bytes` of
  stage k−1's tape, of those that are recorded;
* `tape_bytes` of every recorded stage; the adjoint of one carry once backward has begun;
* the chain's fixed bytes: outputs from the start, gradients from the first backward on;
* during an action, its workspace on top.

The paper's units (Gruslys et al. 2016) are a special case: a carry of 1, an internal state of α that includes the
carry leaving the stage (`tape_bytes` = α − 1, `leaving_bytes` = 1, `entering_bytes` = 0), no workspace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Final

import msgspec

INTERNAL_STATE: Final = "internal state"  # names the tape of a chain in the paper's units


def _require_non_negative(owner: msgspec.Struct) -> None:
    for name in owner.__struct_fields__:
        value = getattr(owner, name)
        if isinstance(value, int | float) and not 0 <= value < float("inf"):
            raise ValueError(f"{type(owner).__name__}.{name} must be a finite number ≥ 0, not {value!r}")


class Tape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a stage's menu: what autograd keeps if the stage is recorded this way.

    Attributes:
        tape_bytes: bytes kept until backward, carries not included.
        entering_bytes: how much of the entering carry the tape keeps alive by itself.
        leaving_bytes: how much of the leaving carry the tape keeps alive by itself.
        forward_s: seconds to run the stage while recording.
        backward_s: seconds of its backward.
        workspace_bytes: allocated and freed again within the recording run, beyond tape and leaving carry.
        backward_workspace_bytes: most bytes that its backward holds over those at its start; the new adjoint counts.
        name: what people call this entry.
    """

    tape_bytes: int
    entering_bytes: int = 0
    leaving_bytes: int = 0
    forward_s: float = 1.0
    backward_s: float = 2.0
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    name: str = "whole"

    def __post_init__(self) -> None:
        _require_non_negative(self)


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is run, or run again, as a unit.

    Attributes:
        carry_bytes: bytes of the carry that *enters* the stage.
        menu: the ways to record it, at least one.
        forward_s: seconds to run it without a tape.
        workspace_bytes: allocated and freed again within such a run, beyond the leaving carry.
        gradient_bytes: parameter gradients that appear in its backward and stay (layers own parameters; a time loop
            shares them, see `Chain.parameter_gradient_bytes`).
    """

    carry_bytes: int
    menu: tuple[Tape, ...]
    forward_s: float = 1.0
    workspace_bytes: int = 0
    gradient_bytes: int = 0

    def __post_init__(self) -> None:
        _require_non_negative(self)
        if not self.menu:
            raise ValueError("Stage.menu is empty: a stage needs at least one way to be recorded for its backward")
        for tape in self.menu:
            if tape.entering_bytes > self.carry_bytes:
                raise ValueError(f"a tape keeps {tape.entering_bytes} bytes of an entering carry of {self.carry_bytes}")


class Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Stages in order, run-length coded: `((stage, count), ...)`.

    Attributes:
        runs: equal neighbours as one pair; a recurrent network is one run.
        final_carry_bytes: bytes of carry L, alive from when it is first made.
        caller_keeps_carry: whether carry 0 stays alive anyway, so that storing it costs nothing.
        output_bytes: outputs besides the final carry, alive from the start.
        output_gradient_bytes: gradients that arrive for outputs and final carry, alive from the first backward on.
        input_gradient_bytes: gradients of inputs, alive from the first backward on.
        parameter_gradient_bytes: gradients of parameters that all stages share, alive from the first backward on.
    """

    runs: tuple[tuple[Stage, int], ...]
    final_carry_bytes: int = 0
    caller_keeps_carry: bool = True
    output_bytes: int = 0
    output_gradient_bytes: int = 0
    input_gradient_bytes: int = 0
    parameter_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        _require_non_negative(self)
        if not self.runs or any(count < 1 for _, count in self.runs):
            raise ValueError(f"a chain needs at least one stage in every run, not counts {[c for _, c in self.runs]}")

    @classmethod
    def repeat(cls, stage: Stage, count: int, **fixed: int | bool) -> Chain:
        """One stage applied `count` times; the final carry is as large as the others unless given."""
        fixed.setdefault("final_carry_bytes", stage.carry_bytes)
        return cls(((stage, count),), **fixed)  # type: ignore[arg-type]  # msgspec validates

    @classmethod
    def in_paper_units(cls, steps: int, alpha: int = 2) -> Chain:
        """The chain of Gruslys et al. 2016: a hidden state costs 1, an internal state `alpha`, forward 1, backward 2.

        The initial hidden state is counted (`caller_keeps_carry` is False), as in the paper's tables for HSM and MSM.
        """
        if alpha < 1:
            raise ValueError(f"alpha is an internal state's cost in hidden states and at least 1, not {alpha}")
        state = Tape(alpha - 1, leaving_bytes=1, name=INTERNAL_STATE)
        return cls.repeat(Stage(1, (state,)), steps, caller_keeps_carry=False)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first stage of every run, and the number of stages at the end."""
        return tuple(accumulate((count for _, count in self.runs), initial=0))

    @property
    def length(self) -> int:
        """How many stages there are."""
        return self.starts[-1]

    def stage(self, index: int) -> Stage:
        """Stage `index`, 0 ≤ index < length."""
        if not 0 <= index < self.length:
            raise IndexError(f"stage {index} of a chain of {self.length}")
        return self.runs[bisect_right(self.starts, index) - 1][0]

    def carry_bytes(self, index: int) -> int:
        """Bytes of carry `index`, 0 ≤ index ≤ length."""
        return self.final_carry_bytes if index == self.length else self.stage(index).carry_bytes

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Stage, int, int]]:
        """The runs of stages start … stop−1 as (stage, first, last+1)."""
        run = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[run + 1])
            yield self.runs[run][0], start, end
            start, run = end, run + 1

    @property
    def backward_fixed_bytes(self) -> int:
        """Gradients alive from the first backward on, beyond those of single stages."""
        return self.output_gradient_bytes + self.input_gradient_bytes + self.parameter_gradient_bytes

    def to_json(self) -> bytes:
        """The chain as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Chain:
        """A chain from `to_json`; raises `msgspec.ValidationError` with the path of what is wrong."""
        return msgspec.json.decode(text, type=cls)


def takes_no_more(chain: Chain, other: Chain) -> bool:
    """Whether any schedule of `other` takes no more bytes on this chain at any moment.

    Menus may differ in length: entries come and go with measured seconds, and take the same bytes when they are back.
    """
    if chain == other:
        return True
    if chain.length != other.length or not _no_more(chain, other):
        return False
    firsts = sorted({*chain.starts[:-1], *other.starts[:-1]})
    return all(_stage_takes_no_more(chain.stage(first), other.stage(first)) for first in firsts)


def _stage_takes_no_more(stage: Stage, other: Stage) -> bool:
    return _no_more(stage, other) and all(map(_no_more, stage.menu, other.menu))


def _no_more(one: msgspec.Struct, other: msgspec.Struct) -> bool:
    names = [name for name in one.__struct_fields__ if name.endswith("_bytes")]
    return all(getattr(one, name) <= getattr(other, name) for name in names)
