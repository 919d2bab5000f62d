"""A training graph as a value: nodes, the storages they allocate, alias and change, and what may be run again.

The graph is the *joint* one, forward and backward together, in an order that can be run. A *node* is one operator call;
its *value* is what it returns. A value keeps *storages* alive: those that the node allocates (`fresh`) and those of its
inputs that it aliases, so a view is a node with storages and none fresh. Storages of inputs, parameters and constants
exist before and cost nothing (`external`). A node that returns several tensors is followed by one projection per tensor
that is used (`getitem`), a view of one of its storages.

A *program* is an order of executions in which a node may occur more than once: a later execution makes its value anew,
and every use means the newest one. Whatever is not used any more is freed, so a program says everything about memory.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

import msgspec


class Kind(StrEnum):
    """What a node is, as far as running it again is concerned."""

    INPUT = "input"  # an argument or a constant: there from the start
    VIEW = "view"  # an alias of its input, or a number: neither time nor bytes
    CHEAP = "cheap"  # elementwise, reductions, normalisation: time of one pass over memory
    EXPENSIVE = "expensive"  # matrix products, convolutions, attention
    RANDOM = "random"  # draws from a generator: again only under the state it first drew from
    MUTATION = "mutation"  # changes a tensor that others see: never again
    COLLECTIVE = "collective"  # other processes take part: never again
    OPAQUE = "opaque"  # reads what is changed later, or a custom operator of which nothing is known: never again

    @property
    def repeatable(self) -> bool:
        """Whether a second execution gives the same value and does nothing else."""
        return self not in (Kind.MUTATION, Kind.COLLECTIVE, Kind.OPAQUE)


class Storage(msgspec.Struct, frozen=True, gc=False):
    """Memory that one or several values live in.

    Attributes:
        bytes: as the allocator counts them, rounded up to its unit.
        external: there before the call (inputs, parameters, constants): never counted, never freed.
    """

    bytes: int
    external: bool = False


class Node(msgspec.Struct, frozen=True, gc=False):
    """One operator call.

    Attributes:
        name: unique in the graph.
        op: the operator, as text.
        kind: what it means to run it again.
        inputs: the nodes whose values it reads, each once.
        storages: what its value keeps alive, by index.
        fresh: those of them that it allocates.
        writes: storages that it changes in place.
        seconds: time of one execution.
        workspace_bytes: allocated and freed again within it, beyond `fresh`.
        state_bytes: the state of its generator, kept from its first execution to its last where there are several.
        projection: whether it takes one tensor out of the tuple that its only input returns.
    """

    name: str
    op: str
    kind: Kind
    inputs: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    seconds: float = 0.0
    workspace_bytes: int = 0
    state_bytes: int = 0
    projection: bool = False


class Graph(msgspec.Struct, frozen=True, dict=True):
    """A joint forward-backward graph.

    Attributes:
        nodes: in an order that can be run; inputs first.
        storages: what nodes refer to.
        inputs: nodes that are arguments of the forward.
        tangents: nodes that are gradients of the outputs, arguments of the backward.
        outputs: nodes whose values the forward returns, in order; a value may be returned twice.
        gradients: for each input, the node with its gradient, or None.
        parameters: those inputs that are parameters: their gradients go to `.grad` as soon as they exist, those of the
            others are handed back and stay.
    """

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[int, ...]
    tangents: tuple[int, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int | None, ...]
    parameters: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, those that read its value, in order."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in node.inputs:
                users[source].append(index)
        return tuple(map(tuple, users))

    @cached_property
    def backward(self) -> frozenset[int]:
        """Nodes that need a tangent: they can run in the backward only."""
        found = set(self.tangents)
        for index, node in enumerate(self.nodes):
            if any(source in found for source in node.inputs):
                found.add(index)
        return frozenset(found)

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """Nodes that the forward has to run, inputs aside: what outputs need, and every change in place.

        All tensors that such a node returns belong to it, those that only the backward uses as well.
        """
        mutations = (k for k, node in enumerate(self.nodes) if node.kind is Kind.MUTATION and k not in self.backward)
        found = set(self.needed_for((*self.outputs, *mutations)))
        found |= {k for k, node in enumerate(self.nodes) if node.projection and node.inputs[0] in found}
        return tuple(sorted(found))

    def needed_for(self, targets: tuple[int, ...]) -> tuple[int, ...]:
        """The nodes that `targets` are computed from, themselves included, inputs aside, in order."""
        found, todo = set(targets), list(targets)
        while todo:
            for source in self.nodes[todo.pop()].inputs:
                if source not in found:
                    found.add(source)
                    todo.append(source)
        return tuple(k for k in sorted(found) if self.nodes[k].kind is not Kind.INPUT)

    @cached_property
    def final_gradients(self) -> dict[int, bool]:
        """Nodes that are gradients of inputs, and whether all they belong to are parameters."""
        final: dict[int, bool] = {}
        for source, gradient in zip(self.inputs, self.gradients, strict=True):
            if gradient is not None:
                final[gradient] = final.get(gradient, True) and source in self.parameters
        return final

    @property
    def plain(self) -> Program:
        """Every node once, in the graph's own order: what PyTorch does without recomputation."""
        forward = self.forward
        once = set(forward)
        needed = self.needed_for(tuple(self.final_gradients))
        return Program((*forward, *(k for k in needed if k not in once)), len(forward))

    def seconds_of(self, program: Program) -> float:
        """Time of all executions."""
        return sum(self.nodes[k].seconds for k in program.order)


class Program(msgspec.Struct, frozen=True):
    """An order of executions.

    Attributes:
        order: nodes, each as often as it is run; inputs do not occur.
        forward_steps: so many of them belong to the forward.
    """

    order: tuple[int, ...]
    forward_steps: int
