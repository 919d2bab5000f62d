"""Programs made faster within a budget: a local search by exact bytes, whatever the programs came from.

Two moves. A second run is *left out*: what the run before made is kept until then. And what lies idle is *dropped*: the
run that made it comes again right before the next read, together with what it needs and is not there. The first spends
bytes for seconds, the second the other way round, so the search drops something, spends what that frees, and stays
where it is faster. A first run that nothing is left to read falls away: so runs are also put off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ._search import SCRATCH_ROWS, assess, spare
from .graphs import Graph, Kind, Node, Program
from .reduced import Reduced

_SHARPNESS: Final = (2.0, 16.0)
_SWEEPS: Final = 6
_EFFORT: Final = 8 * 10**7  # places looked at: about a second
_AFFORDABLE: Final = _EFFORT // 8  # one sweep of several
_BEGINNING: Final = _EFFORT // 4  # for filling the programs that are begun with
_OVERHEAD: Final = 4000  # as many places take the time of what is done around one drop
_TRIALS: Final = 60  # drops that are tried from one program
_TIGHTER: Final = (0.98, 0.95, 0.9, 0.8)
_ROUNDS: Final = 24
_AT_ONCE: Final = 3
_CHAIN: Final = 64  # so many runs at most are added for one that is dropped
_NS: Final = 1e9


class Refiner:
    """The search over one graph.

    Args:
        graph: what is run.
        gradients_exist: as in `liveness`.
        candidates: what each node may overwrite, see `inplace.plan`.
    """

    def __init__(
        self, graph: Graph, *, gradients_exist: bool = False, candidates: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.reduced = reduced = Reduced.of(graph)
        self.possible = reduced.is_whole
        nodes = [graph.nodes[k] if k >= 0 else None for k in reduced.nodes]
        final = {
            s: mine and gradients_exist for g, mine in graph.final_gradients.items() for s in graph.nodes[g].storages
        }
        sizes = [one.bytes for one in graph.storages]
        stays = [1 if s in reduced.outputs else (3 if final[s] else 2) if s in final else 0 for s in range(len(sizes))]
        costs = [(0, 0, 0, 2) if node is None else self._costs(node, final) for node in nodes]
        self.storages = np.array([sizes, stays], dtype=np.int64).T.copy()
        self.repeatable = [node is not None and node.kind.repeatable for node in nodes]
        self.draws = [node is not None and node.kind is Kind.RANDOM for node in nodes]
        self.leaving = [bool(reduced.outputs.intersection(made)) for made in reduced.fresh]
        self.final = [any(s in final for s in made) for made in reduced.fresh]
        over = tuple(self._overwritten(k, candidates or {}) for k in reduced.nodes)
        links = [reduced.needs, reduced.fresh, over]  # in the order of NEEDS, MAKES, OVER
        lists = np.array([s for rows in links for row in rows for s in row], dtype=np.int64)
        counts = np.array([[0, *map(len, rows)] for rows in links], dtype=np.int64)
        self.at = np.cumsum(counts, axis=1) + np.cumsum([0, *counts.sum(axis=1)])[:3, None]
        self.arrays = _Arrays(self.at, lists, self.storages, np.array(costs, dtype=np.int64))

    @staticmethod
    def _costs(node: Node, final: Mapping[int, bool]) -> tuple[int, int, int, int]:
        must = any(s in final for s in node.fresh) or not node.kind.repeatable
        return round(node.seconds * _NS), node.workspace_bytes, node.state_bytes, int(must)

    def _overwritten(self, node: int, candidates: Mapping[int, Sequence[int]]) -> list[int]:
        """Storages as large as what a node makes that it may overwrite, preferred ones first."""
        nodes = self.reduced.graph.nodes
        if node < 0 or len(nodes[node].fresh) != 1:
            return []
        wanted = (self.storages[nodes[node].fresh[0], 0], 0)  # as large, and staying nowhere
        found = [nodes[source].storages for source in candidates.get(node, ())]
        return [s[0] for s in found if len(s) == 1 and tuple(self.storages[s[0]]) == wanted]

    def judged(self, program: Program) -> tuple[int, float]:
        """Peak bytes and seconds of a program whose views are made as `Reduced.program` makes them."""
        order = np.array(self.reduced.units(program), dtype=np.int64)
        found = _Search(self, order, 0).state(order)
        return found.peak_bytes, found.nanoseconds / _NS

    def refined(self, programs: Sequence[Program], budget_bytes: int) -> Program:
        """As fast as the search gets within the budget from one of these; the first, at best, if it exceeds that."""
        if not self.possible:
            return programs[0]
        orders = [np.array(self.reduced.units(program), dtype=np.int64) for program in programs]
        return self.reduced.program(_Search(self, orders[0], budget_bytes).run(orders))


class _Arrays(NamedTuple):
    """The graph as compiled code reads it."""

    at: np.ndarray
    lists: np.ndarray
    storages: np.ndarray
    costs: np.ndarray


@dataclass(frozen=True)
class _State:
    """An order, what it takes."""

    order: np.ndarray
    nanoseconds: int
    during: np.ndarray

    @property
    def peak_bytes(self) -> int:
        return int(self.during.max(initial=0))


class _Search:
    """From programs that draw in one order, `first` is one of them."""

    def __init__(self, refiner: Refiner, first: np.ndarray, budget_bytes: int) -> None:
        self.refiner = refiner
        self.budget_bytes = budget_bytes
        self.effort = 0
        self.random = self._draws(first)

    def _draws(self, order: np.ndarray) -> list[int]:
        """Units that draw, in the order of their first runs, by which the generator's stream goes."""
        return [u for u in dict.fromkeys(order.tolist()) if u >= 0 and self.refiner.draws[u]]

    def _room(self, order: np.ndarray) -> np.ndarray:
        at, _, storages, costs = self.refiner.arrays
        ran = order[order >= 0]
        links = (at[:, ran + 1] - at[:, ran]).sum(axis=1)
        length = max(*links, len(order), len(storages), len(costs)) + 2
        return np.zeros((SCRATCH_ROWS, length), dtype=np.int64)

    def state(self, order: np.ndarray) -> _State:
        """What an order takes, runs that nothing needs left out."""
        during = np.zeros(len(order), dtype=np.int64)
        nanoseconds = assess(order, *self.refiner.arrays, self._room(order), during)
        return _State(order[during >= 0].copy(), nanoseconds, during[during >= 0])

    def spared(self, order: np.ndarray, sharpness: float, guarded: int = -1) -> _State:
        """Second runs left out as far as the budget allows; not the one at the place `guarded`."""
        order = order.copy()
        before, during = np.zeros((2, len(order)), dtype=np.int64)
        guards = np.zeros(len(order), dtype=np.int64)
        if guarded >= 0:
            guards[guarded] = 1
        weight, worth = np.zeros((2, len(order)))
        self.effort += 2 * self._again(order) * len(order)
        nanoseconds = spare(
            order,
            *self.refiner.arrays,
            self._room(order),
            before,
            during,
            weight,
            worth,
            guards,
            self.budget_bytes,
            _SWEEPS,
            sharpness,
        )
        return _State(order[before >= 0].copy(), nanoseconds, before[before >= 0])

    def run(self, orders: Sequence[np.ndarray]) -> list[int]:
        """The fastest order found."""
        best = self._begun(orders)
        if self._again(best.order) * len(best.order) > _AFFORDABLE:
            return list(map(int, best.order))
        if best.peak_bytes > self.budget_bytes:
            best = self._filled(self._tightened(best, self.budget_bytes))
        best = self._climbed(best)
        for share in _TIGHTER:
            if self.effort > _EFFORT:
                break
            found = self._climbed(self._filled(self._tightened(best, int(share * self.budget_bytes))))
            if self._is_better(found, best):
                best = found
        return list(map(int, best.order))

    def _begun(self, orders: Sequence[np.ndarray]) -> _State:
        """The fastest order once all have spent the bytes that they leave: one that leaves more may gain more."""
        best = self.state(orders[0])
        for order in orders:
            if self._again(order) * len(order) > _AFFORDABLE or self.effort > _BEGINNING:
                continue
            found = self._filled(self.state(order))
            if self._is_better(found, best):
                best = found
        self.effort = 0
        return best

    @staticmethod
    def _again(order: np.ndarray) -> int:
        """How many runs are not the first of their unit."""
        return len(order) - len(set(order.tolist()))

    def _is_better(self, found: _State, now: _State) -> bool:
        """Faster, no larger than it may be, and drawing in the same order."""
        if found.peak_bytes > max(self.budget_bytes, now.peak_bytes) or self._draws(found.order) != self.random:
            return False
        return found.nanoseconds < now.nanoseconds

    def _filled(self, now: _State) -> _State:
        return min((self.spared(now.order, sharp) for sharp in _SHARPNESS), key=lambda s: s.nanoseconds)

    def _climbed(self, now: _State) -> _State:
        """Up by single drops, as long as one makes it faster."""
        while self.effort < _EFFORT:
            better = self._improved(now)
            if better is None:
                break
            now = better
        return now

    def _tightened(self, now: _State, target_bytes: int) -> _State:
        """Idle results dropped until the peak is as small as this, or nothing helps."""
        for _ in range(_ROUNDS):
            if now.peak_bytes <= target_bytes or self.effort > _EFFORT:
                break
            order = now.order
            drops = [drop for _, drop in zip(range(_AT_ONCE), self._drops(now), strict=False)]
            for place, runs in sorted(drops, reverse=True):
                order = np.concatenate([order[:place], np.array(runs, dtype=np.int64), order[place:]])
            found = self.state(order)
            if not drops or self._draws(found.order) != self.random:
                break
            now = found
        return now

    def _improved(self, now: _State) -> _State | None:
        for place, runs in self._drops(now):
            trial = np.concatenate([now.order[:place], np.array(runs, dtype=np.int64), now.order[place:]])
            found = self.spared(trial, _SHARPNESS[-1], place + len(runs) - 1)
            if self._is_better(found, now):
                return found
            if self.effort > _EFFORT:
                break
        return None

    def _drops(self, now: _State) -> Iterator[tuple[int, list[int]]]:
        """What to run again before which place, those drops first that free most for their time."""
        memories = _Memories(self.refiner, now)
        limit = max(self.budget_bytes, now.peak_bytes)
        weight = (now.during / limit) ** _SHARPNESS[-1]
        found = []
        for unit, place in memories.idle():
            runs = memories.runs_for(unit, place)
            if runs is None:
                continue
            trial = np.concatenate([now.order[:place], np.array(runs, dtype=np.int64), now.order[place:]])
            during = np.zeros(len(trial), dtype=np.int64)
            added = assess(trial, *self.refiner.arrays, self._room(trial), during) - now.nanoseconds
            self.effort += len(trial) + _OVERHEAD
            same = np.concatenate([during[:place], during[place + len(runs) :]])
            freed = float((weight * (now.during - same) * (same >= 0)).sum())
            if freed > 0:
                found.append((max(added, 0) / freed, place, runs))
        found.sort(key=lambda one: one[0])
        yield from ((place, runs) for _, place, runs in found[:_TRIALS])


class _Memories:
    """Who reads what when in an order."""

    def __init__(self, refiner: Refiner, state: _State) -> None:
        self.refiner = refiner
        self.order: list[int] = state.order.tolist()
        self.turn = self.order.index(refiner.reduced.turn)
        self.reads: dict[tuple[int, int], list[int]] = {}  # (place of a run, storage) -> places that read
        self.runs: dict[int, list[int]] = {}  # unit -> its places
        newest: dict[int, int] = {}
        for place, unit in enumerate(self.order):
            for s in refiner.reduced.needs[unit]:
                self.reads.setdefault((newest[s], s), []).append(place)
            self.runs.setdefault(unit, []).append(place)
            for s in refiner.reduced.fresh[unit]:
                newest[s] = place

    def idle(self) -> Iterator[tuple[int, int]]:
        """Units whose result is read, lies idle, and is read again, with the place of that read."""
        refiner = self.refiner
        for place, unit in enumerate(self.order):
            if not refiner.repeatable[unit]:
                continue
            reads = sorted({r for s in refiner.reduced.fresh[unit] for r in self.reads.get((place, s), ())})
            for before, after in zip([place, *reads], reads, strict=False):
                if after > before + 1 and not (refiner.leaving[unit] and after <= self.turn):
                    yield unit, after

    def runs_for(self, unit: int, place: int) -> list[int] | None:
        """What has to run before a place for a unit to run again there, itself last; None if that is too much."""
        found: dict[int, None] = {}

        def visit(unit: int) -> bool:
            for s in self.refiner.reduced.needs[unit]:
                maker = self.refiner.reduced.producer[s]
                if maker in found or self._is_there(maker, s, place) or not self.refiner.repeatable[maker]:
                    continue
                if self.refiner.leaving[maker] or self.refiner.final[maker]:
                    continue
                if not visit(maker):
                    return False
            found[unit] = None
            return len(found) <= _CHAIN

        return list(found) if visit(unit) else None

    def _is_there(self, maker: int, storage: int, place: int) -> bool:
        if maker == self.refiner.reduced.turn:
            return True
        run = max((p for p in self.runs[maker] if p < place), default=-1)
        return self.reads.get((run, storage), [run])[-1] >= place
