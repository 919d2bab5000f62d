"""The true optimum of a small graph: a mixed-integer program, solved by HiGHS. The yardstick of every other planner.

The formulation of Jain et al. 2020, "Checkmate" (section 4), made exact for storages. The first executions come in the
graph's order, what is needed for a gradient only directly before it; between the t-th and the one before, in *stage* t,
earlier nodes may run again. (To let first executions be put off as well is possible, and takes the solver some hundred
times as long.) Of stage t

    R[t, k]     node k runs in it; R[t, t] = 1
    S[t, a]     storage a is alive when it begins
    F[t, k, a]  storage a is freed right after node k has run in it
    D[t, a]     storage a is made a second time while it is alive, and that second one freed at once
    U[t, k]     bytes alive before node k would run in it

Nodes are the units of `reduced`. What draws under a state that would have to be kept runs once.
Every variable but U is 0 or 1, so n nodes take some n² variables: this is for graphs of some thirty nodes that take
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import InfeasibleBudget, RematError
from .graphs import Graph, Program
from .reduced import Reduced

_GAP: Final = 1e-4  # of the time: closer than this an optimum need not be known


@dataclass(frozen=True, slots=True)
class Optimum:
    """The fastest program within a budget.

    Attributes:
        program: the order of executions.
        seconds: its time.
        gap: by what share of its objective a better solution may have been missed.
    """

    program: Program
    seconds: float
    gap: float


def optimum(graph: Graph, budget_bytes: int, *, gradients_exist: bool = False, limit_s: float | None = None) -> Optimum:
    """The fastest program whose first executions are in the graph's own order.

    (A solution may run a node for nothing, and again when it is needed. The program leaves the first run out, so that
    the node's own place is a later one, and may be faster than any that keeps to the order.)

    Args:
        graph: small, and without changes in place.
        budget_bytes: the most that may be alive at any moment, as `liveness` counts.
        gradients_exist: as in `liveness`.
        limit_s: the solver ends then with what it has.

    Raises:
        InfeasibleBudget: there is none; carries the smallest budget with which there is.
        RematError: the solver found nothing in time, or scipy is missing.
    """
    problem = _Problem.of(graph, gradients_exist)
    model = _Model(problem)
    values = model.solve(budget_bytes, limit_s)
    if values is None:
        smallest = least_bytes(graph, gradients_exist=gradients_exist)
        raise InfeasibleBudget(budget_bytes, smallest, {"values alive at once": smallest})
    program = _program(problem, model, values[0])
    return Optimum(program, graph.seconds_of(program), values[1])


def least_bytes(graph: Graph, *, gradients_exist: bool = False, limit_s: float | None = None) -> int:
    """The smallest peak of any program whose first executions are in the graph's own order.

    Raises:
        RematError: the solver found nothing in time, or scipy is missing.
    """
    model = _Model(_Problem.of(graph, gradients_exist))
    found = model.solve(None, limit_s)
    if found is None:
        raise RematError("the solver found no program for any budget in the time it had")
    peak: float = found[0][model.peak] * model.unit
    return round(peak)


# ---- the graph, reduced


@dataclass(frozen=True)
class _Problem:
    """The units of a graph, and what the formulation asks of them.

    Attributes:
        reduced: the units; places are theirs.
        seconds, workspace: what each takes.
        repeatable: whether it may run again.
        pinned_from: for storages that stay to the end, the unit after which.
    """

    reduced: Reduced
    seconds: tuple[float, ...]
    workspace: tuple[int, ...]
    repeatable: tuple[bool, ...]
    pinned_from: dict[int, int]

    @classmethod
    def of(cls, graph: Graph, gradients_exist: bool) -> _Problem:
        if any(node.writes for node in graph.nodes):
            raise RematError("the optimum is known for graphs without changes in place only")
        reduced = Reduced.of(graph)
        pinned = dict.fromkeys(reduced.outputs, reduced.turn)
        for gradient, mine in graph.final_gradients.items():
            if not (mine and gradients_exist):
                own = [s for s in graph.nodes[gradient].storages if s in reduced.producer]
                pinned.update({s: pinned.get(s, max(reduced.turn, reduced.producer[s])) for s in own})
        nodes = [None if k < 0 else graph.nodes[k] for k in reduced.nodes]
        return cls(
            reduced,
            tuple(0.0 if node is None else node.seconds for node in nodes),
            tuple(0 if node is None else node.workspace_bytes for node in nodes),
            tuple(node is not None and node.kind.repeatable and not node.state_bytes for node in nodes),
            pinned,
        )

    @property
    def needs(self) -> tuple[frozenset[int], ...]:
        return self.reduced.needs

    @property
    def fresh(self) -> tuple[tuple[int, ...], ...]:
        return self.reduced.fresh

    def bytes_of(self, storage: int) -> int:
        return self.reduced.graph.storages[storage].bytes


# ---- the mixed-integer program


class _Model:
    """Variables by number, and constraints as rows of a sparse matrix."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.count = len(problem.seconds)
        self.producer = problem.reduced.producer
        self.users: dict[int, list[int]] = {s: [] for s in self.producer}
        for k, needs in enumerate(problem.needs):
            for s in needs:
                self.users[s].append(k)
        self.names: dict[tuple[Any, ...], int] = {}
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.rows: list[tuple[list[tuple[int, float]], float, bool]] = []  # Σ c·x ≤ bound; whether the peak is added
        self.unit = max(1, max(map(problem.bytes_of, self.producer), default=1))
        self.peak = self._new(("peak",), 0, np.inf)
        self._variables()
        self._constraints()

    def _new(self, name: tuple[Any, ...], lower: float = 0, upper: float = 1) -> int:
        self.names[name] = len(self.upper)
        self.lower.append(lower)
        self.upper.append(upper)
        return self.names[name]

    def _pinned(self, t: int, storage: int) -> bool:
        return t > self.problem.pinned_from.get(storage, self.count)

    def _variables(self) -> None:
        for t in range(self.count):
            for k in range(t + 1):
                again = self.problem.repeatable[k]
                self._new(("R", t, k), k == t, k == t or again)
                self._new(("U", t, k), 0, np.inf)
                for s in self.problem.needs[k] | frozenset(self.problem.fresh[k]):
                    self._new(("F", t, k, s))
            for s, k in self.producer.items():
                if k < t:
                    self._new(("S", t, s), self._pinned(t, s), 1)
                    self._new(("D", t, s))

    def _at_most(self, terms: list[tuple[int, float]], bound: float = 0.0) -> None:
        self.rows.append((terms, bound, False))

    def _constraints(self) -> None:
        for t in range(self.count):
            self._values(t)
            self._frees(t)
            self._bytes(t)

    def _values(self, t: int) -> None:
        """Who runs has what it reads; what is alive was alive or made in the stage before."""
        x = self.names
        for k in range(t + 1):
            for s in self.problem.needs[k]:
                made = self.producer[s]
                terms = [(x["R", t, k], 1.0), (x["R", t, made], -1.0)]
                self._at_most([*terms, (x["S", t, s], -1.0)] if made < t else terms)
        for s, made in self.producer.items():
            if made < t:
                terms = [(x["S", t, s], 1.0), (x["R", t - 1, made], -1.0)]
                self._at_most([*terms, (x["S", t - 1, s], -1.0)] if made < t - 1 else terms)
                self._at_most([(x["D", t, s], 1.0), (x["R", t, made], -1.0)])
                self._at_most([(x["D", t, s], 1.0), (x["S", t, s], -1.0)])

    def _frees(self, t: int) -> None:
        """Freed is only what nothing reads later in the stage and no later stage has."""
        x = self.names
        for k in range(t + 1):
            for s in self.problem.needs[k] | frozenset(self.problem.fresh[k]):
                freed = x["F", t, k, s]
                self._at_most([(freed, 1.0), (x["R", t, k], -1.0)])
                if t + 1 < self.count:
                    self._at_most([(freed, 1.0), (x["S", t + 1, s], 1.0)], 1.0)
                elif self._pinned(t + 1, s):
                    self.upper[freed] = 0
                for user in self.users[s]:
                    if k < user <= t:
                        self._at_most([(freed, 1.0), (x["R", t, user], 1.0)], 1.0)

    def _bytes(self, t: int) -> None:
        """Bytes before each node of the stage, and while it runs."""
        x = self.names
        alive = [(x["S", t, s], self._size(s)) for s, made in self.producer.items() if made < t]
        for k in range(t + 1):
            before = x["U", t, k]
            self._at_most([*alive, (before, -1.0)])
            made = sum(map(self._size, self.problem.fresh[k]))
            workspace = self.problem.workspace[k] / self.unit
            self.rows.append(([(before, 1.0), (x["R", t, k], made + workspace)], 0.0, True))
            alive = [(before, 1.0), (x["R", t, k], made)]
            for s in self.problem.needs[k] | frozenset(self.problem.fresh[k]):
                alive.append((x["F", t, k, s], -self._size(s)))
            alive += [(x["D", t, s], -self._size(s)) for s in self.problem.fresh[k] if ("D", t, s) in x]

    def _size(self, storage: int) -> float:
        return self.problem.bytes_of(storage) / self.unit

    def solve(self, budget_bytes: int | None, limit_s: float | None) -> tuple[np.ndarray, float] | None:
        """All variables and the remaining gap: the least time for a budget, or the least peak; None if nothing fits."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError:
            raise RematError("the optimum needs scipy: pip install 'remat[optimum]'") from None
        if budget_bytes is not None:
            self.upper[self.peak] = budget_bytes / self.unit
        goal = np.zeros(len(self.upper))
        for t, k in self._runs():
            goal[self.names["R", t, k]] = self.problem.seconds[k] / sum(self.problem.seconds)
        if budget_bytes is None:
            goal[:] = 0
            goal[self.peak] = 1
        whole = np.array([name[0] not in ("U", "peak") for name in self.names], dtype=np.int64)
        found = milp(
            goal,
            integrality=whole,
            bounds=Bounds(np.array(self.lower, dtype=float), np.array(self.upper, dtype=float)),
            constraints=LinearConstraint(*self._matrix()),
            options={"mip_rel_gap": _GAP} | ({} if limit_s is None else {"time_limit": limit_s}),
        )
        if found.x is None:
            if found.status == 1:
                raise RematError(f"the solver found no program in {limit_s} s: {found.message}")
            return None
        return found.x, found.mip_gap

    def _runs(self) -> Iterator[tuple[int, int]]:
        return ((t, k) for t in range(self.count) for k in range(t + 1))

    def _matrix(self) -> tuple[Any, np.ndarray, np.ndarray]:
        from scipy.sparse import csr_array

        places, columns, values = [], [], []
        for place, (terms, _, peak) in enumerate(self.rows):
            for column, value in [*terms, (self.peak, -1.0)] if peak else terms:
                places.append(place)
                columns.append(column)
                values.append(value)
        matrix = csr_array((values, (places, columns)), shape=(len(self.rows), len(self.upper)))
        bounds = np.array([bound for _, bound, _ in self.rows])
        return matrix, np.full(len(bounds), -np.inf), bounds


def _program(problem: _Problem, model: _Model, values: np.ndarray) -> Program:
    """Executions stage by stage."""
    return problem.reduced.program([k for t, k in model._runs() if values[model.names["R", t, k]] > 0.5])
