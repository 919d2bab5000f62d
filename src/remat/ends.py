"""What the two ends of a loop take beyond the other steps, and plans that have room for it.

A chain of one repeated stage says what a step in the middle takes. The first step of a traced loop may copy the
caller's carry into the layout of its graph; the last one may copy the final carry for the caller, and its backward
finds gradients that the engine holds until all is over, where those between steps go as soon as they are used. Mostly
none of this shows, as a loop is at its fullest elsewhere. So a plan is judged with it, and made for less only if it
shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from .chains import Chain, Stage
from .errors import InfeasibleBudget
from .planners.room import smallest
from .plans import Plan
from .schedules import Action, Backward
from .simulator import Simulation, simulate

ADAPTIVE: Final = ("auto", "tight")  # planners that find a plan wherever there is one
_ATTEMPTS: Final = 7  # to leave room for what the ends take, and no more


@dataclass(frozen=True, slots=True)
class Ends:
    """Bytes at both ends of a loop, beyond those of a step in the middle.

    Attributes:
        entering_bytes: of copies of carry 0, while the first step runs.
        kept_bytes: by entry of the menu, of what the last step's tape keeps apart from the final carry.
        returned_bytes: of copies of the final carry, made as the last step ends.
        first_pass_bytes: of states that are held until the last step has run.
        held_bytes: by entry of the menu, what the last step's backward takes more than others: the gradients that came
            for the final carry stay, some may be copied, and where fewer arrive another program runs.
        finishing_bytes: of the first step's backward, after which gradients are handed out.
        handed_bytes: of the adjoint that the last step's backward hands to the one before. Between steps of a range
            there is one at any time; if none came for the final carry, the first is there from the second backward on,
            when a traced range, whose memory goes as one, still has that of all tapes.
    """

    entering_bytes: int = 0
    kept_bytes: tuple[int, ...] = ()
    returned_bytes: int = 0
    first_pass_bytes: int = 0
    held_bytes: tuple[int, ...] = ()
    finishing_bytes: int = 0
    handed_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        """So many at most lie above what the chain of equal stages says."""
        kept, held = max(self.kept_bytes, default=0), max(self.held_bytes, default=0)
        return self.entering_bytes + kept + self.returned_bytes + self.first_pass_bytes + max(held, self.handed_bytes)

    def on(self, chain: Chain, schedule: Iterable[Action] = ()) -> Chain:
        """The chain of one repeated stage with both its ends, as they are in a schedule."""
        first_backward = next((action for action in schedule if isinstance(action, Backward)), None)
        if first_backward is not None and first_backward.stop - first_backward.start > 1:
            held = self.held_bytes or (0,) * len(chain.runs[0][0].menu)
            return replace(self, held_bytes=tuple(max(h, self.handed_bytes) for h in held)).on(chain)
        stage, count = chain.runs[0]
        if count == 1:
            return msgspec.structs.replace(chain, runs=((self._last(self._first(stage)), 1),))
        runs = ((self._first(stage), 1), (stage, count - 2), (self._last(stage), 1))
        return msgspec.structs.replace(chain, runs=tuple(run for run in runs if run[1]))

    def _first(self, stage: Stage) -> Stage:
        more = self.entering_bytes
        menu = tuple(
            msgspec.structs.replace(
                tape,
                workspace_bytes=tape.workspace_bytes + more,
                backward_workspace_bytes=max(tape.backward_workspace_bytes, self.finishing_bytes),
            )
            for tape in stage.menu
        )
        return msgspec.structs.replace(stage, menu=menu, workspace_bytes=stage.workspace_bytes + more)

    def _last(self, stage: Stage) -> Stage:
        none = (0,) * len(stage.menu)
        menu = tuple(
            msgspec.structs.replace(
                tape,
                tape_bytes=tape.tape_bytes + more,
                workspace_bytes=max(tape.workspace_bytes, self.returned_bytes) + self.first_pass_bytes,
                backward_workspace_bytes=tape.backward_workspace_bytes + held,
            )
            for tape, more, held in zip(stage.menu, self.kept_bytes or none, self.held_bytes or none, strict=True)
        )
        return msgspec.structs.replace(stage, menu=menu)


Planner = Callable[[Chain, int, str], Plan]


def planned(chain: Chain, ends: Ends, limit: int, planner: str, plan: Planner) -> Plan:
    """A plan that stays within so many bytes at the ends too; its peak is that of the whole loop.

    Raises:
        InfeasibleBudget: there is none.
    """
    least = smallest(ends.on(chain))
    best: Plan | None = None
    failing, fitting, over = 0, ends.most_bytes, 0
    for attempt in range(_ATTEMPTS):
        try:
            made = plan(chain, max(limit - over, 1), planner)
        except InfeasibleBudget as error:
            if planner not in ADAPTIVE:
                raise InfeasibleBudget(
                    limit, error.smallest_budget_bytes + ends.most_bytes, error.parts_bytes
                ) from None
            if least.peak_bytes > limit:
                raise least.refusal(limit) from None
            # Its peak is `least`. The ends may want other entries of the menu than steps in the middle.
            made = replace(plan(ends.on(chain), limit, "constant"), chain=chain)
        real = ends.on(chain, made.schedule)
        found = made.simulation if real == chain else simulate(real, made.schedule)
        if found.peak_bytes <= limit:
            fitting = over
            if best is None or made.seconds < best.seconds:
                best = replace(made, budget_bytes=limit, simulation=_fuller(made.simulation, found))
        else:
            failing = over
        over = _next(over, found.peak_bytes - limit, failing, fitting, found_one=best is not None)
        if over >= ends.most_bytes or (best is None and attempt == _ATTEMPTS - 2):
            over = ends.most_bytes
        if best is not None and over in (failing, fitting):
            break
    assert best is not None, "with room for all that the ends take, every plan fits"
    return best


def _next(over: int, missing: int, failing: int, fitting: int, *, found_one: bool) -> int:
    """How many bytes to leave next: by what is missing, which may leave the peak where it is, then by more.

    Between what is too little and enough, by halves.
    """
    return (failing + fitting) // 2 if found_one else over + max(missing, over)


def _fuller(chain: Simulation, ends: Simulation) -> Simulation:
    return ends if ends.peak_bytes > chain.peak_bytes else chain


def finishing(made: Plan, chain: Chain, ends: Ends, finishing_bytes: int) -> Plan | None:
    """The plan with its peak if the backward of the first step takes so many bytes; None: more than its budget."""
    found = simulate(replace(ends, finishing_bytes=finishing_bytes).on(chain, made.schedule), made.schedule)
    if found.peak_bytes > made.budget_bytes:
        return None
    return replace(made, simulation=_fuller(made.simulation, found))


def foreseen(made: Plan, chain: Chain, ends: Ends) -> Plan:
    """The plan with its peak on a chain and ends that take no more than those it has room for."""
    found = simulate(ends.on(chain, made.schedule), made.schedule)
    return replace(made, simulation=found) if found.peak_bytes < made.peak_bytes else made
