"""Small runs of a call's step, in which it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Final, TypeVar

import torch

from .ambient import States, recomputing
from .apart import by_itself
from .arrivals import Arrivals
from .calls import Call, Nature
from .collectives import greatest
from .discovery import firsts, marked
from .errors import StepError
from .gauges import Gauge, OnDevice, page_s
from .kept import left_alone
from .loops import Loop, Outputs
from .needs import could_need
from .planners.room import smallest
from .profiler import ROUNDS, STEPS, Costs, Trial, last_backward_bytes, profile
from .recorded import copied, detached, needs_gradient
from .trees import Leaves

Value = TypeVar("Value")
_BESIDE: Final = 16  # a part of the budget that buffers may take once more while steps are timed
Gradients = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]


class Trials:
    """Makes fresh trials of a call's step, on copies of a carry.

    Args:
        call, nature: the step.
        arrivals: which gradients arrive from outside; None: all that can. They are then held until all trials are over,
            as the engine holds those that arrive for a loop.
        entry: of the step's menu, if it has one.
    """

    def __init__(self, call: Call, nature: Nature, arrivals: Arrivals | None = None, entry: int = 0) -> None:
        self.call, self.arrivals, self._entry = call, arrivals, entry
        self.outputs = Outputs(STEPS)
        self.loop = call.loop(self.outputs, call.carry, call.inputs.leaves)
        self.states = States(call.sources, nature.needed.changes)
        carry = _representative(call, nature, self.loop)
        self.carry = marked(carry if call.traced is None else call.traced.laid_out(carry), nature.needed.carry)
        most = nature.needed.carry if nature.settled else tuple(map(could_need, self.carry))
        self.nature = replace(nature, settled=True, orbit=((most, nature.needed.outputs),))  # the most there can be
        self._held: Gradients | None = None

    def start(self, steps: int) -> Trial:
        """A fresh one of so many steps."""
        self.outputs.flush()  # what waits from the trial before must not be released in the next
        if self.outputs.length != steps:
            self.loop.outputs = self.outputs = Outputs(steps)
        self.states.restart()
        run = self.call.interpreter(self.loop, self.nature, iter(()), self.carry, self.states, steps, entry=self._entry)
        return Trial(run, self._arriving)

    def _arriving(self) -> Gradients:
        if self._held is not None:
            return self._held
        outputs = zip(self.outputs.buffers, self.nature.needed.outputs, strict=True)
        adjoint = [torch.zeros_like(leaf) if needs_gradient(leaf) else None for leaf in firsts(self.carry)]
        stacked = [torch.zeros_like(buffer) if need else None for buffer, need in outputs]
        if self.arrivals is not None:
            adjoint = [each if there else None for each, there in zip(adjoint, self.arrivals.carry, strict=True)]
            stacked = [each if there else None for each, there in zip(stacked, self.arrivals.outputs, strict=True)]
            self._held = adjoint, stacked
        return adjoint, stacked

    def measured(self, job: Callable[[], Value], *, thorough: bool = False) -> Value:
        """What a job says that runs trials and leaves no trace.

        Args:
            job: the job.
            thorough: whether it goes further than the steps whose changes are known, so that more has to be put back.
        """
        call = self.call

        def watched() -> Value:
            watching = States(call.sources, call.streams | self.nature.needed.changes)
            others = self._others_undisturbed() if thorough else nullcontext()
            with torch.enable_grad(), watching.undisturbed(), left_alone(call.places), others:
                try:
                    return job()
                except RuntimeError as error:
                    if "modified by an inplace operation" not in str(error):
                        raise
                    raise StepError(
                        "a step changes its carry in place where the step before needs it for its backward; change a "
                        "clone of it"
                    ) from error

        return by_itself(watched, call.surroundings)

    @contextmanager
    def _others_undisturbed(self) -> Iterator[None]:
        """Leave what no step was seen to change as it is; untouched, if none does."""
        known = self.call.streams | self.nature.needed.changes
        sources = [source for number, source in enumerate(self.call.sources) if number not in known]
        states = [source.get() for source in sources]
        try:
            yield
        finally:
            for source, state in zip(sources, states, strict=True):
                if not source.same(state, source.get()):
                    source.set(state)


def measure_step(
    call: Call,
    nature: Nature,
    limit: int,
    input_gradient_bytes: int,
    gauge: Gauge,
    *,
    entry: int = 0,
    rounds: int = ROUNDS,
    groups: tuple[str, ...] = (),
    longest: int = 0,
) -> Costs:
    """The costs of one step, with one entry of its menu, measured in small runs on copies of the carry.

    Args:
        call, nature: the step.
        limit: bytes that there are for the whole loop.
        input_gradient_bytes: those of the gradients of all inputs.
        gauge: what measures.
        entry: which entry of the menu.
        rounds: as for `profile`.
        groups: process groups in which the step communicates; all run it equally often.
        longest: as for `profile`.
    """
    trials = Trials(call, nature, entry=entry)

    def least_bytes(costs: Costs) -> int:
        least = smallest(costs.chain(call.length, input_gradient_bytes)).peak_bytes
        return greatest(groups, [least])[0] if groups else least

    job = partial(profile, trials.start, nature.sizes, gauge, limit, least_bytes, rounds=rounds)
    further = call.traced is None  # a graph changes nothing else in any step
    if further and call.buffer_bytes * _BESIDE > limit:
        longest = 0
    costs = trials.measured(partial(job, longest=min(longest, call.length)), thorough=further and longest > STEPS)
    if costs.paces is None:
        return costs
    fresh_s = page_s(torch.get_num_threads()) if call.device.type == "cpu" else 0.0
    return replace(costs, paces=replace(costs.paces, keeping_s=_keeping_s(call, nature), page_s=fresh_s))


def _keeping_s(call: Call, nature: Nature) -> float:
    """Seconds for each carry that a first pass keeps, to see which of the states that belong to it have changed."""
    states = States(call.sources, call.streams | nature.needed.changes)
    return median(OnDevice(call.device).seconds_of(lambda mark: [(mark(), states.take()) for _ in range(ROUNDS + 2)]))


def measure_last(call: Call, nature: Nature, arrivals: Arrivals, gauge: Gauge, entry: int) -> int:
    """Most bytes that the backward of a loop's last step takes where such gradients arrive, those not counted."""
    trials = Trials(call, nature, arrivals, entry)
    return trials.measured(lambda: last_backward_bytes(trials.start, gauge))


def _representative(call: Call, nature: Nature, loop: Loop) -> Leaves:
    """A carry like those between steps: the first may share tensors, and what is in places may be anything."""
    carry = copied(detached(call.carry))
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in carry)
    if not call.places and tensors == len(call.carry_places):
        return carry
    watching = States(call.sources, call.streams | nature.needed.changes)
    with recomputing(), torch.enable_grad(), watching.undisturbed(), left_alone(call.places):
        entering = copied(marked(carry, call.needs))
        after = copied(detached(loop.run(0, entering, loop.inputs(0, recording=True), first=True)[0]))
    # Counters and such begin anew, or steps would be run that never come.
    return [new if could_need(new) else old for old, new in zip(carry, after, strict=True)]
