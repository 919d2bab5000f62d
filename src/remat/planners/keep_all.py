"""Standard backpropagation: every stage is recorded once, nothing is run a second time, all tapes are kept."""

from __future__ import annotations

from ..chains import Chain
from ..schedules import Backward, Record, Schedule
from . import _bytes
from .room import Smallest


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """One range, recorded and consumed; the fastest menu entry that all stages have and that fits."""
    found = fitting(chain, budget_bytes)
    if found is None:
        raise smallest(chain).refusal(budget_bytes)
    return found


def fitting(chain: Chain, budget_bytes: int) -> Schedule | None:
    """The schedule of this planner if it fits the budget, or None."""
    fits = [entry for entry in entries(chain) if peak_bytes(chain, entry) <= budget_bytes]
    if not fits:
        return None
    best = min(fits, key=lambda entry: seconds(chain, entry))
    return Schedule(chain.length, "keep-all", (Record(0, chain.length, best), Backward(0, chain.length)))


def entries(chain: Chain) -> range:
    """The menu entries that every stage of the chain has."""
    return range(min(len(stage.menu) for stage, _ in chain.runs))


def peak_bytes(chain: Chain, entry: int) -> int:
    """Most bytes alive when all is kept as this menu entry."""
    return _bytes.work_peak(chain, 0, chain.length, 0, entry, held=chain.caller_keeps_carry)


def seconds(chain: Chain, entry: int) -> float:
    """Seconds when all is kept as this menu entry."""
    tapes = ((stage.menu[entry], count) for stage, count in chain.runs)
    return sum(count * (tape.forward_s + tape.backward_s) for tape, count in tapes)


def smallest(chain: Chain) -> Smallest:
    """What keeping all takes with the menu entry that takes least."""
    entry = min(entries(chain), key=lambda entry: peak_bytes(chain, entry))
    parts = {
        "outputs": chain.output_bytes,
        "gradients of outputs": chain.output_gradient_bytes,
        "gradients of inputs": chain.input_gradient_bytes,
        "gradients of parameters": chain.parameter_gradient_bytes,
        "final carry": chain.final_carry_bytes,
        "all tapes": _bytes.range_bytes(chain, 0, chain.length, entry),
    }
    peak = peak_bytes(chain, entry)
    return Smallest(peak, parts | {"workspace": peak - sum(parts.values())})
