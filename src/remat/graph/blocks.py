"""The blocks of memory of a program with their lifetimes: what `arena` gives offsets to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from .arena import Lifetime
from .graphs import Graph, Program
from .liveness import Machine

RESULT: Final = "result of the forward"
AGAIN: Final = "result run again"
GRADIENT: Final = "gradient"
LEAVING: Final = "gradient of an input"
WORKSPACE: Final = "workspace"


def blocks(
    graph: Graph, program: Program, *, gradients_exist: bool = False, in_place: Mapping[int, int] | None = None
) -> list[Lifetime]:
    """Every block that a program without dead executions allocates, workspaces included; times are its steps.

    The most bytes alive at one time are the peak of `liveness` with the same arguments.
    """
    recorder = _Recorder(graph, program, gradients_exist, in_place or {})
    recorder.run_all()
    recorder.end()
    return recorder.found


class _Recorder(Machine):
    """Notes when each instance is made and freed."""

    def __init__(self, graph: Graph, program: Program, gradients_exist: bool, in_place: Mapping[int, int]) -> None:
        self.found: list[Lifetime] = []
        self.born: dict[int, tuple[int, int | None]] = {}  # instance -> step, node; no node for tangents
        self.storage: dict[int, int | None] = {}  # instance -> the storage that it is of
        self.allocated: Iterator[int] = iter(())  # storages that the running node is still to allocate
        self.running: int | None = None
        # A gradient is often a view of what was made for it, a product turned round.
        self.leaving = {s for g in graph.final_gradients for s in graph.nodes[g].storages}
        super().__init__(graph, program, gradients_exist, in_place)

    def run(self, step: int, index: int) -> None:
        self.running = index
        self.allocated = iter([s for s in self.graph.nodes[index].storages if s in self.graph.nodes[index].fresh])
        if workspace := self.workspace_bytes(step, index):
            self.found.append(Lifetime(step, step, workspace, WORKSPACE, self.graph.nodes[index].name))
        super().run(step, index)
        self.running = None

    def _new(self, size: int) -> int:
        instance = super()._new(size)
        self.born[instance] = len(self.during), self.running
        self.storage[instance] = next(self.allocated, None)
        return instance

    def _free(self, instance: int) -> None:
        # While a step runs its own entry of `during` is there already; at the turn the last one is the forward's.
        self._note(instance, max(self.born[instance][0], len(self.during) - 1))
        super()._free(instance)

    def _note(self, instance: int, last: int) -> None:
        first, node = self.born[instance]
        if self.size[instance]:
            name = "tangent" if node is None else self.graph.nodes[node].name
            self.found.append(Lifetime(first, last, self.size[instance], self._kind(instance), name))

    def _kind(self, instance: int) -> str:
        first, node = self.born[instance]
        if self.storage[instance] in self.leaving:
            return LEAVING
        if node is None or node in self.graph.backward:
            return GRADIENT
        return RESULT if first < self.program.forward_steps else AGAIN

    def end(self) -> None:
        for instance in self.size:
            self._note(instance, len(self.program.order) - 1)
