"""The graphs in which one model is captured, and the budget that they share.

Dynamo hands over a model in one graph, or, where it meets what it cannot trace, in several, one by one while the first
step runs. A graph that is alone gets the whole budget. Graphs of which there are more run their first step each by its
smallest plan; then it is known which are called in what order, and before the next step the budget is divided among
them and those are compiled anew whose share lets them run faster.

What Inductor's pieces take is only known when they run. So their first calls are weighed, and where one exceeds its
budget it is planned again with that much less.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import InfeasibleBudget
from ..sizes import format_bytes
from .compilation import Compilation, Options, is_leaf
from .gates import Run
from .liveness import liveness
from .planning import GraphPlan, Planner, reserve_bytes
from .segments import root_bytes
from .sharing import Take, shared, smallest_bytes, step_peak_bytes
from .weighing import Weighing

_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the way from the smallest plan to none recomputed: on offer
_TRIALS: Final = 3  # calls that are weighed, and planned again if they take too much


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a training step of one model is planned to do.

    Attributes:
        budget_bytes: for the whole step.
        plans: of its graphs, in the order in which the step calls them.
        takes: what each call takes.
    """

    budget_bytes: int
    plans: tuple[GraphPlan, ...]
    takes: tuple[Take, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes at any moment of the step."""
        return step_peak_bytes(self.takes)

    def explain(self) -> str:
        """A line for each graph."""
        peak, budget = format_bytes(self.peak_bytes), format_bytes(self.budget_bytes)
        lines = [f"{len(self.plans)} graphs in a step take {peak} of a budget of {budget}"]
        for number, (plan, take) in enumerate(zip(self.plans, self.takes, strict=True), 1):
            own, kept = format_bytes(plan.peak_bytes), format_bytes(take.kept_bytes)
            lines.append(
                f"graph {number:<3} {len(plan.graph.nodes):>6} nodes, {own} at most by itself, "
                f"{kept} kept for its backward, {plan.time_ratio:.3f} × the time"
            )
        return "\n".join(lines)


class Model:
    """What one `torch.compile` has compiled so far.

    Args:
        options: what was asked for.
        asked: the same as it was given: graphs compiled with one and the same are of one model.

    Attributes:
        steps: the kinds of steps that the plans are made for: parts in the order of their forwards.
    """

    def __init__(self, options: Options, asked: object = None) -> None:
        self.options = options
        self.asked = asked
        self.steps: list[tuple[Part, ...]] = []
        self.lock = threading.RLock()
        self._frames: set[object] = set()
        self._followed = self._more = False
        self._calls: list[Part] = []  # of the step under way
        self._live: list[tuple[weakref.ref[Run], Part]] = []

    def part(self, module: fx.GraphModule, inputs: Sequence[Any], frame: object, *, followed: bool) -> Part:
        """A graph of the model, compiled.

        Args:
            module: as Dynamo hands it over.
            inputs: real or fake.
            frame: of which Python frame it is a part; graphs of one frame take each other's place.
            followed: whether more graphs are to come.
        """
        with self.lock:
            self._frames.add(frame)
            self._more = followed
            self._followed = self._followed or followed
        return Part(self, module, inputs)

    @property
    def is_shared(self) -> bool:
        """Whether several graphs share the budget."""
        return self.options.budget_bytes is not None and (self._followed or len(self._frames) > 1)

    @property
    def room_bytes(self) -> int:
        """What a step may take."""
        budget = self.options.budget_bytes or 0
        return budget - reserve_bytes(budget)

    def enter(self, part: Part) -> None:
        """A part is called. Where a step begins, that before is over, and what it called is known."""
        with self.lock:
            self._live = self._alive()
            if not self._live:
                self._settle(tuple(self._calls))
                self._calls = []
            self._calls.append(part)

    def began(self, run: Run, part: Part) -> None:
        """The forward of a part is about to run."""
        with self.lock:
            self._live.append((weakref.ref(run), part))

    def _alive(self) -> list[tuple[weakref.ref[Run], Part]]:
        return [(ref, each) for ref, each in self._live if (run := ref()) is not None and not run.closed]

    def provisional(self, planner: Planner) -> GraphPlan:
        """The plan of a part of which it is not known yet what else a step calls: the smallest.

        Raises:
            InfeasibleBudget: what has been called so far leaves too little.
        """
        found = planner.plan(planner.smallest_bytes)
        before = [each for _, each in self._alive()]
        if all(each.is_provisional for each in before):
            peak = step_peak_bytes([*(each.take for each in before), take_of(found, planner)])
            if peak > self.room_bytes:
                raise self._infeasible(peak, len(before) + 1, more=self._more)
        return found

    def _infeasible(self, peak_bytes: int, count: int, *, more: bool = False) -> InfeasibleBudget:
        budget = self.options.budget_bytes or 0
        smallest = peak_bytes + 2 * reserve_bytes(peak_bytes)  # the second for the reserve's own reserve
        name = "1 graph of the model" if count == 1 else f"{count} graphs of one model together"
        if more:  # of which nothing is known before this one has run
            name += ", not counting those still to be captured, which need more:"
        return InfeasibleBudget(budget, smallest, {name: peak_bytes})

    def step(self) -> StepPlan | None:
        """The newest kind of step, or what has been called of one so far; None before there is any."""
        calls = self.steps[-1] if self.steps else tuple(self._calls)
        if not calls or self.options.budget_bytes is None:
            return None
        plans = tuple(part.plan for part in calls if part.plan is not None)
        return StepPlan(self.options.budget_bytes, plans, tuple(part.take for part in calls))

    def _settle(self, calls: tuple[Part, ...]) -> None:
        """Divide the budget for one more kind of step, if it is one and what there is will not do."""
        if not calls or not self.is_shared:
            return
        known = calls in self.steps
        waiting = any(part.is_provisional for part in calls)
        fits = step_peak_bytes([part.take for part in calls]) <= self.room_bytes
        if not known:
            self.steps.append(calls)
        if fits and not waiting:
            return
        parts = tuple(dict.fromkeys(part for step in self.steps for part in step))
        menus = {part: part.menu() for part in parts}
        takes = {part: [take for _, take in menu] for part, menu in menus.items()}
        chosen = shared(takes, self.steps, self.room_bytes)
        if chosen is None:
            raise self._infeasible(smallest_bytes(takes, self.steps), len(parts))
        for part, place in chosen.items():
            part.assign(menus[part][place][0])


class Part:
    """One graph of a model: compiled, called, and compiled anew when its plan changes.

    Attributes:
        is_provisional: whether its plan was made before it was known what else a step calls.
        excess_bytes: by how much it was weighed to take more than its plan says.
    """

    def __init__(self, model: Model, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.model = model
        self.module = module
        self.is_provisional = False
        self.excess_bytes = 0
        self._assigned: GraphPlan | None = None
        self._stale = False
        self._trials = _TRIALS if model.options.lowering == "inductor" and model.options.budget_bytes else 0
        self._compilation: Compilation | None = None
        self._compile(list(inputs))

    def __call__(self, *args: Any) -> Any:
        """The graph's results."""
        if self.plan is not None and torch.is_grad_enabled():
            self.model.enter(self)
            if self._stale:
                self._compile(list(args))
        return self._call(*args)

    @property
    def plan(self) -> GraphPlan | None:
        """What runs; None where nothing needs a gradient."""
        return self._compilation.plan if self._compilation is not None else None

    @property
    def take(self) -> Take:
        """What a call takes under its present plan."""
        planner, plan = self._planned()
        return take_of(plan, planner, self.excess_bytes)

    def menu(self) -> list[tuple[GraphPlan, Take]]:
        """Plans on offer, from the smallest to the fastest."""
        planner, _ = self._planned()
        least, most = planner.smallest_bytes, planner.plain_bytes
        found: dict[Any, GraphPlan] = {}
        for share in _SHARES:
            plan = planner.plan(round(least + share * (most - least)))
            found.setdefault(plan.program, plan)
        return [(plan, take_of(plan, planner, self.excess_bytes)) for plan in found.values()]

    def assign(self, plan: GraphPlan) -> None:
        """Its share of the budget: compiled at the next call, if that is another plan."""
        _, now = self._planned()
        self.is_provisional = False
        self._assigned = plan
        self._stale = plan.program != now.program

    def _planned(self) -> tuple[Planner, GraphPlan]:
        made = self._compilation
        assert made is not None
        assert made.planner is not None
        assert made.plan is not None
        return made.planner, made.plan

    def _compile(self, inputs: list[Any]) -> None:
        from torch._dynamo.backends.common import aot_autograd

        known = self._compilation.planner if self._compilation is not None else None
        made = Compilation(
            self.model.options, [is_leaf(x) for x in inputs], choose=self._choose, watch=self._watch, known=known
        )
        context = torch._guards.TracingContext.try_get()
        surroundings: AbstractContextManager[object] = nullcontext()
        if context is None:  # while a step runs, without the compiler's front end around
            surroundings = torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode()))
        with surroundings:
            self._call = made.gated(aot_autograd(**made.parts)(self.module, inputs))
        self._compilation = made
        self._stale = False
        devices = {x.device for x in inputs if isinstance(x, torch.Tensor)}
        self._device = max(devices, key=lambda device: device.type == "cuda", default=torch.device("cpu"))

    def _choose(self, planner: Planner) -> GraphPlan:
        budget = self.model.options.budget_bytes
        if budget is None:
            return planner.plan(planner.plain_bytes)
        if self._assigned is not None:
            return self._assigned
        if self.model.is_shared:
            self.is_provisional = True
            return self.model.provisional(planner)
        if self.excess_bytes and budget - self.excess_bytes < planner.smallest_bytes:
            return planner.plan(planner.smallest_bytes)
        return planner.plan(budget - self.excess_bytes)

    def _watch(self, run: Run) -> AbstractContextManager[object]:
        self.model.began(run, self)
        if not self._trials:
            return nullcontext()
        graph = self._planned()[0].graph
        exist = self.model.options.gradients_exist
        passing = frozenset(n for n, k in enumerate(graph.inputs) if exist and k in graph.parameters)
        run.weighing = Weighing(self._device, root_bytes(graph, graph.tangents), passing, self._weighed)
        return run.weighing.forward()

    def _weighed(self, weighing: Weighing) -> None:
        """What a call took is known: less is asked of the plan if that was too much."""
        planner, plan = self._planned()
        with self.model.lock:
            self._trials = max(0, self._trials - 1)
            self.excess_bytes = max(self.excess_bytes, weighing.peak_bytes - plan.peak_bytes)
            if self.model.is_shared:
                return  # the step as a whole is judged when the next one begins
            if weighing.peak_bytes <= self.model.room_bytes:
                self._trials = 0
                return
            least = planner.plan(planner.smallest_bytes)
            if self._trials and plan.program != least.program:
                self._stale = True
                return
            self._trials = 0
        warnings.warn(
            f"pieces compiled by Inductor took {format_bytes(weighing.peak_bytes)}, more than the budget of "
            f"{format_bytes(self.model.options.budget_bytes or 0)}, and there is no smaller plan to be tried; "
            'lowering "eager" keeps to it',
            stacklevel=2,
        )


def take_of(plan: GraphPlan, planner: Planner, excess_bytes: int = 0) -> Take:
    """What a call takes under a plan, `excess_bytes` more at its worst than the plan says."""
    graph, exist = plan.graph, planner.gradients_exist
    found = liveness(graph, plan.program, gradients_exist=exist, in_place=plan.in_place)
    steps = plan.program.forward_steps
    stay = [g for g, mine in graph.final_gradients.items() if mine and not exist]
    return Take(
        max(found.during[:steps], default=0) + excess_bytes,
        found.after[steps - 1] if steps else 0,
        max(found.during[steps:], default=0) + excess_bytes,
        root_bytes(graph, stay),
        plan.seconds,
    )
