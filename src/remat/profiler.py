"""What a step costs: bytes from the meter, seconds from the clock, by running small schedules on the real step.

The interpreter itself runs them, so what is measured is what will be done. Nothing is left behind: outputs and
gradients are thrown away, random streams and buffers put back. Where tensors are fake, another gauge takes the place of
meter and clock (see `estimate`).

A stage can be recorded in two ways, and both are measured: with its whole tape, and with a selective one (see
`selective`), which goes on the menu if it keeps less and takes less time than running the whole stage again would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

import msgspec
import torch

from .ambient import recomputing
from .chains import Chain, Stage, Tape
from .gauges import Gauge, Reading, no_collections
from .interpreter import Interpreter
from .paces import Paces, paces_of, timed_ranges, timed_schedule
from .ranges import SELECTIVE, WHOLE
from .recorded import hooks_set_aside
from .schedules import Action, Advance, Backward, Load, Record

STEPS: Final = 4
# Every stage alone, so that no more than one tape is alive; the first backward makes the parameter gradients.
_SINGLY: Final[tuple[Action, ...]] = (
    Advance(0, 1),
    Advance(1, 3),
    Record(3, 4),
    Backward(3, 4),
    Load(0),
    Advance(0, 2),
    Record(2, 3),
    Backward(2, 3),
    Load(0),
    Advance(0, 1),
    Record(1, 2),
    Backward(1, 2),
    Load(0),
    Record(0, 1),
    Backward(0, 1),
)
# Two stages in one range, which shows what a carry costs inside it.
_IN_PAIRS: Final[tuple[Action, ...]] = (
    Advance(0, 3),
    Record(3, 4),
    Backward(3, 4),
    Load(0),
    Advance(0, 1),
    Record(1, 3),
    Backward(1, 3),
    Load(0),
    Record(0, 1),
    Backward(0, 1),
)
_LAST: Final[tuple[Action, ...]] = (Advance(0, 3), Record(3, 4), Backward(3, 4))
ROUNDS: Final = 3
_TIMED_S: Final = 0.06  # a run that tells the paces is no longer than this
_SCALARS: Final = 16  # bytes: a recorder's own two, made before anything is measured
_WORTH: Final = 15 / 16  # of a whole tape, carry included: a selective one keeps less, or is left out


@dataclass(frozen=True, slots=True)
class Costs:
    """What one step costs.

    Attributes:
        stage: bytes and seconds.
        output_bytes: bytes of the outputs of one step.
        output_gradient_bytes: bytes of those that need a gradient.
        final_gradient_bytes: bytes of the carry's leaves that need a gradient.
        parameter_gradient_bytes: bytes of the gradients of captured tensors.
        sparse_gradient_bytes: bytes by which sparse gradients of captured tensors grow with every step.
        state_bytes: bytes of the states that are kept all the time: those at the start and those after the
            forward.
        first_pass_bytes: bytes of the states that are held until the forward is over, as nothing changes them.
        paces: how long ranges of such steps take, if ranges of several lengths were timed.
        finishing_bytes: most bytes of the first step's backward, after which gradients are handed out, where that of
            another step takes `backward_workspace_bytes`.
        pairs_from_bytes: the budget from which two stages in one range can be measured; 0: they were. Before, tapes are
            taken to keep their leaving carry, which they may not.
    """

    stage: Stage
    output_bytes: int
    output_gradient_bytes: int
    final_gradient_bytes: int
    parameter_gradient_bytes: int
    state_bytes: int = 0
    sparse_gradient_bytes: int = 0
    first_pass_bytes: int = 0
    finishing_bytes: int = 0
    paces: Paces | None = None
    pairs_from_bytes: int = 0

    def chain(self, length: int, input_gradient_bytes: int) -> Chain:
        """The chain of `length` such steps."""
        output_gradient_bytes = length * self.output_gradient_bytes
        return Chain.repeat(
            self.stage,
            length,
            output_bytes=length * self.output_bytes + self.state_bytes + self._first_pass_excess(output_gradient_bytes),
            output_gradient_bytes=output_gradient_bytes + self.final_gradient_bytes,
            input_gradient_bytes=input_gradient_bytes,
            # Sparse gradients are added up by joining them: the sum so far and the new one are there at once.
            parameter_gradient_bytes=self.parameter_gradient_bytes + 2 * length * self.sparse_gradient_bytes,
        )

    def _first_pass_excess(self, output_gradient_bytes: int) -> int:
        """By how much the forward's peak may lie above the backward's for what only the forward holds.

        The last stage is run in the forward and consumed in the backward, with as much stored. When it is consumed, the
        gradients of the outputs and the backward's workspace are there instead of what the first pass holds and the
        forward's workspace, for which a plan has room by itself.
        """
        stage = self.stage
        running = max(stage.workspace_bytes, *(tape.workspace_bytes for tape in stage.menu))
        consuming = min(tape.backward_workspace_bytes for tape in stage.menu)
        excess = self.first_pass_bytes + running - output_gradient_bytes - consuming
        return min(max(excess, 0), self.first_pass_bytes)


@dataclass(frozen=True, slots=True)
class _Aside:
    """Bytes beside carries: stored with each, of states that change, of those that do not, and held in passing."""

    stored: int
    states: int
    unmoved: int
    passing: int

    @classmethod
    def of(cls, interpreter: Interpreter) -> _Aside:
        states = interpreter.states
        return cls(interpreter.aside_bytes, states.nbytes, states.unmoved_bytes, states.passing_bytes)


@dataclass(slots=True)
class Trial:
    """One small run, ready to go: its interpreter, and what makes the gradients that arrive from outside."""

    interpreter: Interpreter
    arriving: Callable[[], tuple[list[torch.Tensor | None], list[torch.Tensor | None]]]


Start = Callable[[int], Trial]
Timed = list[tuple[Action, float]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What can be read off a step's results: bytes of outputs, of outputs and carry that need a gradient.

    `moved_bytes` are those of leaves of the carry that are not the very tensors that stood there before: where leaves
    move along, a meter sees only some of them as new, but stored carries far apart share none.
    """

    output_bytes: int
    output_gradient_bytes: int
    final_gradient_bytes: int
    moved_bytes: int = 0


def profile(
    start: Start,
    sizes: Sizes,
    gauge: Gauge,
    limit: int,
    least_bytes: Callable[[Costs], int],
    *,
    rounds: int = ROUNDS,
    selective: bool = False,
    longest: int = 0,
) -> Costs:
    """Measure one step.

    Args:
        start: makes a fresh trial of so many steps.
        sizes: what is known of the step's results.
        gauge: what measures.
        limit, least_bytes: the budget, and the smallest one by a first estimate; pairs run only where there is room.
        rounds: how often seconds are taken; with 0 they are those that a `Tape` has by default.
        selective: whether to look at selective tapes as well; not where stages change their carry in place.
        longest: ranges of up to so many steps are timed, as far as there is room and time; paces are read off these.
    """
    with recomputing(), no_collections():
        _run(start(STEPS), _SINGLY, WHOLE)  # what kernels and the step make once is made now
        whole = _Entry(start, gauge, WHOLE)
        first = whole.costs(sizes)
        tape = first.stage.menu[0]
        further_bytes = tape.tape_bytes + first.stage.carry_bytes
        room = limit - least_bytes(first)
        pairs = room >= further_bytes
        if pairs:
            whole.measure_pairs()
        entries = [whole]
        if selective and pairs:
            entries += _selective(first, start, gauge)
        for _ in range(rounds):
            for entry in entries:
                entry.take_time()
        paces = None
        if rounds and pairs and len(entries) == 1:
            stored = len(timed_ranges(longest)) * first.stage.carry_bytes
            longest = min(longest, (room - stored) // max(further_bytes, 1))
            with suppress(Exception):  # of a step that the loop itself has to come to
                paces = whole.paces(longest, rounds)
    costs = whole.costs(sizes)
    menu = menu_of(costs.stage.menu[0], (entry.tape() for entry in entries[1:]), costs.stage.forward_s)
    stage, pairs_from = msgspec.structs.replace(costs.stage, menu=menu), limit - room + further_bytes
    return replace(costs, stage=stage, paces=paces, pairs_from_bytes=0 if pairs else pairs_from)


def last_backward_bytes(start: Start, gauge: Gauge) -> int:
    """Most bytes that the backward of the last step takes, with the gradients of parameters that it makes."""
    with recomputing(), no_collections():
        _run(start(STEPS), _LAST, WHOLE)  # what is made once is made now, what arrives from outside too
        trial = start(STEPS)
        phases, _ = gauge.bytes_of(lambda mark: _run(trial, _LAST, WHOLE, mark))
    return phases[len(_LAST)].peak_bytes


def _selective(whole: Costs, start: Start, gauge: Gauge) -> list[_Entry]:
    """The second entry, if the stage can be recorded so, and then keeps less."""
    try:
        other = _Entry(start, gauge, SELECTIVE)
    except Exception:  # transforms inside, a backward of its own, ...: it has run whole, so it is the hooks
        return []
    if not keeps_less(other.tape(), whole.stage.menu[0]):
        return []
    other.measure_pairs()
    return [other]


def keeps_less(tape: Tape, whole: Tape) -> bool:
    """Whether a tape keeps enough less than the whole one to be worth a thought."""
    kept, all_ = (each.tape_bytes + max(each.entering_bytes, each.leaving_bytes) for each in (tape, whole))
    return kept <= _WORTH * all_


def menu_of(whole: Tape, others: Iterable[Tape], advance_s: float) -> tuple[Tape, ...]:
    """The whole tape, and of the others those that are not dominated by running the whole stage again."""
    again_s = advance_s + whole.forward_s + whole.backward_s
    return (whole, *(tape for tape in others if tape.forward_s + tape.backward_s < again_s))


class _Entry:
    """Measurements of one entry of the menu."""

    def __init__(self, start: Start, gauge: Gauge, entry: int) -> None:
        self._start, self._gauge, self._entry = start, gauge, entry
        self._timed: list[Timed] = []
        self._pairs: list[Reading] | None = None
        self._singly, self._parameters = self._metered(_SINGLY)
        self._aside = _Aside.of(start(STEPS).interpreter)

    def _metered(self, actions: tuple[Action, ...]) -> tuple[list[Reading], tuple[int, int]]:
        trial = self._start(STEPS)
        phases, parameters = self._gauge.bytes_of(lambda mark: _run(trial, actions, self._entry, mark))
        return phases[1 : len(actions) + 1], parameters  # the first is what comes before the first action

    def measure_pairs(self) -> None:
        """Measure two stages in one range as well."""
        self._pairs, _ = self._metered(_IN_PAIRS)

    def take_time(self) -> None:
        """Take the seconds once more, of replays: most runs of a stage are, and a first pass warms the caches."""
        actions, trial = _SINGLY if self._pairs is None else _IN_PAIRS, self._start(STEPS)
        _run(trial, actions, self._entry)
        again = (Load(0), *actions)
        spans = self._gauge.seconds_of(lambda mark: _run(trial, again, self._entry, mark))
        self._timed.append(list(zip(again, spans, strict=True)))

    def paces(self, longest: int, rounds: int) -> Paces | None:
        """Take the seconds of ranges of several lengths, shorter ones where they take long; None if all would be."""
        step_s = sum(_seconds(self._timed, kind) for kind in (Advance, Record, Backward))
        while longest > 2 and sum(timed_ranges(longest)) * step_s > _TIMED_S:
            longest //= 2
        if longest <= 2:
            return None
        actions, first, again = timed_schedule(longest), list[Timed](), list[Timed]()
        for _ in range(rounds):
            trial = self._start(sum(timed_ranges(longest)))
            for runs, done in ((first, actions), (again, (Load(0), *actions))):
                spans = self._gauge.seconds_of(partial(_run, trial, done, self._entry))
                runs.append(list(zip(done, spans, strict=True)))
        return paces_of(first, again)

    def tape(self) -> Tape:
        """What is known so far."""
        tape = _tape(self._singly, self._pairs, self._aside)
        if self._entry != WHOLE:
            tape = msgspec.structs.replace(tape, name="selective")
        return _with_seconds(tape, self._timed) if self._timed else tape

    def costs(self, sizes: Sizes) -> Costs:
        """What is known so far, with this as the only entry."""
        advance_s = _seconds(self._timed, Advance) if self._timed else 0.0
        return _costs(self.tape(), self._singly, sizes, self._parameters, self._aside, advance_s)


def _run(
    trial: Trial, actions: tuple[Action, ...], entry: int, after: Callable[[], object] = lambda: None
) -> tuple[int, int]:
    """Carry the actions out; returns the bytes of the captured tensors' gradients, dense and sparse."""
    interpreter = trial.interpreter
    backward = False
    with hooks_set_aside(interpreter.captured.tensors):
        interpreter.states.restore(interpreter.states.start)
        after()
        for action in actions:
            if isinstance(action, Backward) and not backward:
                backward = True
                interpreter.start_backward(*trial.arriving())
            interpreter.do(msgspec.structs.replace(action, entry=entry) if isinstance(action, Record) else action)
            after()
    return interpreter.captured.nbytes


def _seconds(timed: list[list[tuple[Action, float]]], kind: type) -> float:
    """Median seconds of one stage in the longest actions of a kind, where stages share what an action takes."""
    spans: dict[int, list[float]] = {}
    for action, seconds in (pair for round_ in timed for pair in round_):
        if isinstance(action, kind) and isinstance(action, Advance | Record | Backward):
            stages = action.stop - action.start
            spans.setdefault(stages, []).append(seconds / stages)
    return median(spans[max(spans)])


def _with_seconds(tape: Tape, timed: list[list[tuple[Action, float]]]) -> Tape:
    return msgspec.structs.replace(tape, forward_s=_seconds(timed, Record), backward_s=_seconds(timed, Backward))


def _tape(singly: list[Reading], pairs: list[Reading] | None, aside: _Aside) -> Tape:
    """The tape's sizes from what the phases gained; the rules of what is alive stand in `chains`.

    Args:
        singly, pairs: the phases of the two small schedules.
        aside: what there is beside carries.
    """
    carry = max(singly[0].net_bytes, 0) + aside.stored
    last = _phase(singly, Record(0, 1))  # its entering carry is the caller's: gains tape and leaving carry
    tape_bytes = max(last.net_bytes - carry, 0)
    inner = _phase(singly, Record(1, 2))  # its entering carry was live only: what remains of it is kept by the tape
    entering = min(max(inner.net_bytes - tape_bytes - aside.stored, 0), carry)
    between = carry
    if pairs is not None:
        between = min(max(_phase(pairs, Record(1, 3)).net_bytes - 2 * tape_bytes - entering - aside.stored, 0), carry)
    leaving = between if between > entering else 0
    # Through a carry that only hands on the last two values, gradients from the end reach no further than stage 2.
    inner_backwards = [Backward(1, 2), Backward(2, 3)] if pairs is None else [Backward(1, 3)]
    backward_bytes = max(_phase(singly if pairs is None else pairs, action).peak_bytes for action in inner_backwards)
    # The leaving carry goes before it begins. What the tape keeps of the entering one may go before the peak, but stays
    # where a slot or a range holds it too, as the caller holds carry 0.
    consuming = backward_bytes + carry - leaving
    held = _phase(singly, Backward(0, 1)).peak_bytes + carry - leaving
    consuming = max(consuming, min(held, consuming + entering))
    return Tape(
        tape_bytes=tape_bytes,
        entering_bytes=entering,
        leaving_bytes=leaving,
        workspace_bytes=max(last.peak_bytes - tape_bytes - carry, 0) + _SCALARS,
        # What a first pass holds in passing has room there too.
        backward_workspace_bytes=max(consuming, aside.passing) + _SCALARS,
    )


def _phase(phases: list[Reading], action: Action) -> Reading:
    """The phase of an action: the schedules name each range once."""
    actions = _SINGLY if len(phases) == len(_SINGLY) else _IN_PAIRS
    return phases[actions.index(action)]


def _costs(
    tape: Tape, singly: list[Reading], sizes: Sizes, parameters: tuple[int, int], aside: _Aside, advance_s: float = 0.0
) -> Costs:
    carry, peak = max(singly[0].net_bytes, 0), singly[0].peak_bytes
    stored = max(carry, sizes.moved_bytes) + aside.stored
    finishing = _phase(singly, Backward(0, 1)).peak_bytes + carry + aside.stored - tape.leaving_bytes
    return Costs(
        Stage(stored, (tape,), forward_s=advance_s, workspace_bytes=max(peak - carry, 0) + _SCALARS),
        sizes.output_bytes,
        sizes.output_gradient_bytes,
        sizes.final_gradient_bytes,
        parameters[0],
        2 * aside.states,
        -(-parameters[1] // STEPS),
        aside.unmoved,
        finishing + _SCALARS,
    )
