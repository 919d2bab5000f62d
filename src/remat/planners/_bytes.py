"""What the primitive moves of a schedule need, in exact bytes, for any chain: the planners' own reading of `chains`.

The simulator counts the same bytes in another way (it follows what is alive); the test-suite holds the two against
each other. All functions take O(1) for every run of equal stages that a range touches.

*Held* means that the carry a move starts from is alive anyway: in a slot, at the end of a kept range, or at the
caller. Its bytes are then not the move's; otherwise it is only live, and they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..chains import Chain, Tape


def before_backward(chain: Chain) -> int:
    """Fixed bytes until the first backward; the final carry joins them in the move that makes it."""
    return chain.output_bytes


def after_backward(chain: Chain, done: int) -> int:
    """Fixed bytes, gradients and the one adjoint when the stages from `done` on have had their backward."""
    adjoint = chain.carry_bytes(done) if done < chain.length else 0
    gradients = sum((stop - start) * stage.gradient_bytes for stage, start, stop in chain.pieces(done, chain.length))
    return chain.output_bytes + chain.final_carry_bytes + chain.backward_fixed_bytes + gradients + adjoint


def advance_need(chain: Chain, start: int, stop: int, *, held: bool) -> int:
    """Most bytes that running start … stop−1 without tapes takes."""
    need = 0
    for stage, first, last in chain.pieces(start, stop):
        for k in {first, min(first + 1, last - 1), last - 1}:
            live = 0 if held and k == start else stage.carry_bytes
            need = max(need, live + chain.carry_bytes(k + 1) + stage.workspace_bytes)
    return need


def record_need(chain: Chain, start: int, stop: int, entry: int, *, held: bool) -> int:
    """Most bytes that recording start … stop−1 takes, the end carry included."""
    alive, need = 0 if held else chain.carry_bytes(start), 0
    for tape, k, repeat, between in _growth(chain, start, stop, entry):
        # Before stage k the newest carry is whole; it shrinks to what tapes keep once carry k+1 is the newest.
        alive += (repeat - 1) * (tape.tape_bytes + between)
        last = k + repeat - 1
        need = max(need, alive + tape.tape_bytes + chain.carry_bytes(last + 1) + tape.workspace_bytes)
        alive += tape.tape_bytes + chain.carry_bytes(last + 1)
        if last > start:
            alive -= chain.carry_bytes(last) - between
    return need


def range_bytes(chain: Chain, start: int, stop: int, entry: int) -> int:
    """Tapes of a recorded range and what they keep of the carries strictly inside it."""
    return sum(
        repeat * tape.tape_bytes + (repeat if k > start else repeat - 1) * between
        for tape, k, repeat, between in _growth(chain, start, stop, entry)
    )


def backward_need(chain: Chain, start: int, stop: int, entry: int, *, held: bool) -> int:
    """Most bytes that the backward of a recorded range takes, its tapes included, beyond `after_backward(stop)`."""
    leaving = chain.stage(stop - 1).menu[entry].leaving_bytes if stop < chain.length else 0
    alive = range_bytes(chain, start, stop, entry) + leaving
    alive += 0 if held else chain.stage(start).menu[entry].entering_bytes
    need = 0
    for stage, first, last in reversed(list(chain.pieces(start, stop))):
        tape = stage.menu[entry]
        # Within a run the sum changes evenly from its second stage on, so three of its stages see the highest.
        for k, repeat in ((last - 1, 1), (last - 2, last - 2 - first), (first, min(1, last - 1 - first))):
            if repeat < 1:
                continue
            # What came in stays until the range is done, so further inside an adjoint and its carry come on top.
            inside = chain.carry_bytes(k + 1) + tape.leaving_bytes if k + 1 < stop else 0
            need = max(need, alive + inside + tape.backward_workspace_bytes)
            alive += repeat * (stage.gradient_bytes - tape.tape_bytes)
            alive -= repeat * kept_between(chain, k, entry) if k > start else 0
    return need


def kept_between(chain: Chain, k: int, entry: int) -> int:
    """What is kept of carry k inside a recorded range."""
    return max(chain.stage(k).menu[entry].entering_bytes, chain.stage(k - 1).menu[entry].leaving_bytes)


def _growth(chain: Chain, start: int, stop: int, entry: int) -> Iterator[tuple[Tape, int, int, int]]:
    """A range from left to right as (tape, first stage, how many alike, bytes kept of each one's entering carry)."""
    for stage, first, last in chain.pieces(start, stop):
        tape = stage.menu[entry]
        yield tape, first, 1, kept_between(chain, first, entry) if first > start else 0
        between = max(tape.entering_bytes, tape.leaving_bytes)
        if last - first > 2:
            yield tape, first + 1, last - first - 2, between
        if last - first > 1:
            yield tape, last - 1, 1, between


def work_peak(chain: Chain, start: int, stop: int, kept: int, entry: int, *, held: bool) -> int:
    """Most bytes while start … stop−1 are recorded and at once consumed, with `kept` bytes kept besides."""
    first = stop == chain.length
    forward = before_backward(chain) if first else after_backward(chain, stop)
    return kept + max(
        forward + record_need(chain, start, stop, entry, held=held),
        after_backward(chain, stop) + backward_need(chain, start, stop, entry, held=held),
    )
