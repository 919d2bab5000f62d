"""Which gradients arrive for what a loop returns: learnt in backwards, so that plans keep no room for others.

A loss rarely uses all that a loop returns. Before the first backward nothing is known of it, and a plan has room for
the gradients of the whole final carry and of all outputs. Afterwards a plan leaves out what has never come for such
a step, and stays within the budget whatever comes:

* A gradient that comes all the same finds room when it arrives: no backward has begun, so what the first one will
  allocate (its workspace, gradients of inputs and parameters) is still free. What would not fit there is planned for.
* Then what the forward kept is let go, and the loop is run once more, by a plan that has room for everything that
  arrived. From then on plans have room for it.

So the budget is kept without knowing the loss, at the price of one more forward when a loss changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Final, NamedTuple

import msgspec

from .calls import Nature
from .chains import Chain
from .needs import Flags, united
from .planners.room import smallest
from .profiler import Costs

_WORTH: Final = 200  # a plan is made anew for what is at least this part of the budget


class Arrivals(NamedTuple):
    """Which leaves of a final carry, and which outputs, gradients arrive for."""

    carry: Flags
    outputs: Flags

    @classmethod
    def of(cls, adjoint: Sequence[Any], stacked: Sequence[Any]) -> Arrivals:
        """Those of one backward, by leaf and by output."""
        return cls(tuple(each is not None for each in adjoint), tuple(each is not None for each in stacked))

    def union(self, other: Arrivals) -> Arrivals:
        """What arrives in either."""
        return Arrivals(united((self.carry, other.carry)), united((self.outputs, other.outputs)))


class Sparing(NamedTuple):
    """How to plan without room for gradients that have never arrived.

    Attributes:
        chain: what to plan by.
        again: what to plan by when one does arrive: the loop once more, with all gradients there from the start.
        arriving: what has arrived before.
        kept_bytes: room that there is for others all the same.
    """

    chain: Chain
    again: Chain
    arriving: Arrivals
    kept_bytes: int

    def finds_room(self, adjoint: Sequence[Any], stacked: Sequence[Any], left_bytes: int) -> bool:
        """Whether what arrives fits, as foreseen or into so many bytes that the plan leaves of the budget."""
        pairs = (*zip(adjoint, self.arriving.carry, strict=True), *zip(stacked, self.arriving.outputs, strict=True))
        return bool(
            sum(each.nbytes for each, known in pairs if each is not None and not known) <= self.kept_bytes + left_bytes
        )


def sparing(
    costs: Costs,
    nature: Nature,
    length: int,
    input_gradient_bytes: int,
    arriving: Arrivals,
    limit: int,
    ends_bytes: int,
) -> Sparing | None:
    """Without room for what is not arriving; None if that is not worth a plan, or another loss would not fit.

    Args:
        costs: of one step, with room for all gradients.
        nature: the step's.
        length: of the loop.
        input_gradient_bytes: gradients of inputs.
        arriving: what has arrived so far.
        limit: the budget in bytes.
        ends_bytes: what both ends of the loop may take beyond the other steps.
    """
    final = _missing(nature.carry_bytes, nature.needed.carry, arriving.carry)
    output = _missing(nature.output_bytes, nature.needed.outputs, arriving.outputs)
    full = costs.chain(length, input_gradient_bytes)
    begins = min(tape.backward_workspace_bytes for tape in costs.stage.menu)
    free = full.parameter_gradient_bytes + full.input_gradient_bytes + begins
    kept = max(final + length * output - free, 0)  # of what may come, what would find no room
    if (final + length * output - kept) * _WORTH < limit:
        return None
    alone = replace(costs, output_gradient_bytes=0, final_gradient_bytes=0).chain(length, input_gradient_bytes)
    there = alone.output_bytes + full.output_gradient_bytes + full.final_carry_bytes  # the caller holds the first one
    again = msgspec.structs.replace(alone, output_bytes=there)
    if smallest(again).peak_bytes + ends_bytes > limit:
        return None
    lean = replace(
        costs,
        output_gradient_bytes=costs.output_gradient_bytes - output,
        final_gradient_bytes=costs.final_gradient_bytes - final + kept,
    )
    return Sparing(lean.chain(length, input_gradient_bytes), again, arriving, kept)


def arriving_alone(costs: Costs, nature: Nature, chain: Chain, arriving: Arrivals) -> Chain:
    """A chain of such steps with what gradients from outside take if no others arrive."""
    final = _missing(nature.carry_bytes, nature.needed.carry, arriving.carry)
    output = _missing(nature.output_bytes, nature.needed.outputs, arriving.outputs)
    lean = replace(
        costs,
        output_gradient_bytes=costs.output_gradient_bytes - output,
        final_gradient_bytes=costs.final_gradient_bytes - final,
    ).chain(chain.length, chain.input_gradient_bytes)
    return msgspec.structs.replace(
        chain, output_bytes=lean.output_bytes, output_gradient_bytes=lean.output_gradient_bytes
    )


def _missing(sizes: Sequence[int], needed: Flags, arriving: Flags) -> int:
    """Bytes of what could get a gradient and does not."""
    return sum(compress(sizes, (need and not there for need, there in zip(needed, arriving, strict=True))))
