"""The graphs that are run: a step advanced, recorded, and its backward.

Every program takes what goes from step to step (*threaded*), what each step has of its own (*columns*: inputs, slots of
tapes, arriving gradients) and what all steps share (*bound*), in this order. Tapes lie in slots that are given to the
program and written by it, so that a range's values of many steps stand in one piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .deferring import Branch, Link, Operand, Term, deferred
from .graphs import ancestors, aten, is_random, name_of, nbytes, placeholder, value_of
from .layouts import blank, format_of, in_layout
from .products import through_onednn
from .splitting import Entry, Parts
from .tracing import Joint

Key = tuple[str, int]  # what a placeholder stands for


@dataclass
class Program:
    """A graph, what its inputs stand for, and what its results are.

    Attributes:
        graph: its output is a flat tuple without repetitions.
        threaded, columns, bound: what the placeholders stand for, in order.
        results: by name of a result its place in the output.
        live: the deferred terms that a backward contributes to.
    """

    graph: fx.Graph
    threaded: list[Key] = field(default_factory=list)
    columns: list[Key] = field(default_factory=list)
    bound: list[Key] = field(default_factory=list)
    results: dict[Key, int] = field(default_factory=dict)
    live: list[Term] = field(default_factory=list)


class Builder:
    """Puts a program together: placeholders first, then copies of nodes, then results.

    Args:
        parts: of the joint graph.
        hoisted: invariant nodes that are computed beforehand, by number.
    """

    def __init__(self, parts: Parts, hoisted: Mapping[fx.Node, int]) -> None:
        self.parts, self.hoisted = parts, hoisted
        self.program = Program(fx.Graph())
        self.known: dict[fx.Node, fx.Node] = {}
        self.zeros: set[fx.Node] = set()

    def take(self, where: list[Key], key: Key, like: fx.Node, *, stands_for: fx.Node | None = None) -> fx.Node:
        """A placeholder with the value of a node; laid out in one of our ways, unless it stands for an input."""
        value = value_of(like)
        if key[0] not in ("input", "shared"):
            value = _in_layout(value)
        made = placeholder(self.program.graph, f"{key[0]}_{key[1]}", value)
        where.append(key)
        if stands_for is not None:
            self.known[stands_for] = made
        return made

    def bind(self, nodes: Iterable[fx.Node]) -> None:
        """Placeholders for what the nodes use that is the same in every step."""
        used = {argument for node in nodes for argument in node.all_input_nodes if argument in self.parts.invariant}
        used |= {node for node in nodes if node in self.parts.invariant}
        for node in sorted(used, key=lambda n: self.hoisted[n]):
            self.take(self.program.bound, ("shared", self.hoisted[node]), node, stands_for=node)

    def copy(self, wanted: set[fx.Node]) -> None:
        """Copy nodes in their order, leaving out what is zero."""
        for node in self.parts.joint.graph.nodes:
            if node in wanted and node not in self.known and node.op == "call_function":
                self._copy(node, wanted)

    def _copy(self, node: fx.Node, wanted: set[fx.Node]) -> None:
        if node in self.zeros:
            return
        zero = [argument for argument in node.all_input_nodes if argument in self.zeros]
        if zero and name_of(node) == "aten.add.Tensor" and not node.kwargs and len(zero) == 1:
            other = next(a for a in node.args if a not in self.zeros)
            if isinstance(other, fx.Node) and value_of(other).shape == value_of(node).shape:
                self.known[node] = in_layout(self.program.graph, self.known[other], format_of(value_of(node)))
                return
        for argument in zero:
            value = value_of(argument)
            self.known[argument] = made = self.program.graph.call_function(
                aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device}
            )
            made.meta["val"] = value.new_empty(value.shape)
        made = self.program.graph.node_copy(node, lambda argument: self.known[argument])
        if name_of(node) == "aten.convolution_backward.default":
            used = {user.args[1] for user in node.users if user in wanted}
            mask = [bool(flag) and k in used for k, flag in enumerate(node.args[-1])]  # type: ignore[arg-type]
            made.args = (*made.args[:-1], mask)
        self.known[node] = made

    def applied(self, link: Link, value: fx.Node) -> fx.Node:
        """A linear operator on another value than the one it stands behind."""
        before = link.node.args[link.place]
        return self.program.graph.node_copy(link.node, lambda a: value if a is before else self.known[a])

    def write(self, slot: fx.Node, value: fx.Node) -> fx.Node:
        """Write a value into a slot at the end (read from there earlier, Inductor may read before it writes)."""
        made = self.program.graph.call_function(aten.copy_.default, (slot, value))
        made.meta["val"] = value_of(slot)
        return made

    def finish(self, results: Mapping[Key, fx.Node]) -> Program:
        """The program with these results."""
        program = self.program
        unique = list(dict.fromkeys(results.values()))
        program.results = {key: unique.index(node) for key, node in results.items()}
        program.graph.output(tuple(unique))
        remove_dead_but_writes(program.graph)
        through_onednn(program.graph)
        return program


def remove_dead_but_writes(graph: fx.Graph) -> None:
    """Remove what is not used, but for draws and writes."""
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and not is_random(node)
            and name_of(node) != "aten.copy_.default"
        ):
            graph.erase_node(node)


def _in_layout(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_contiguous(memory_format=format_of(value)) else blank(value)


def hoisted_nodes(parts: Parts) -> dict[fx.Node, int]:
    """Invariant nodes that steps use, numbered."""
    used = [
        node
        for node in parts.joint.graph.nodes
        if node in parts.invariant and any(user not in parts.invariant for user in node.users)
    ]
    return {node: number for number, node in enumerate(used)}


def shared_program(joint: Joint, hoisted: Mapping[fx.Node, int], extra: Sequence[fx.Node] = ()) -> Program:
    """What is the same in every step, from the tensors that the step reaches."""
    program = Program(fx.Graph())
    known: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate((*joint.externals, *joint.constants)):
        known[node] = placeholder(program.graph, f"external_{number}", value_of(node))
        program.bound.append(("external", number))
    wanted = ancestors([*hoisted, *extra])
    for node in joint.graph.nodes:
        if node in wanted and node not in known:
            known[node] = program.graph.node_copy(node, lambda argument: known[argument])
    program.graph.output(tuple(known[node] for node in hoisted))
    return program


def forward_program(
    parts: Parts, hoisted: Mapping[fx.Node, int], entry: Entry | None, ahead: Sequence[fx.Node], *, outputs: bool
) -> Program:
    """A step: advanced, or recorded if an entry says what to keep; with its outputs, or without.

    Values that are there `ahead` are its last columns.
    """
    joint, build = parts.joint, Builder(parts, hoisted)
    program = build.program
    kept = entry.carries if entry else ()
    results: dict[Key, Any] = {("after", place): node for place, node in enumerate(joint.after) if _is_node(node)}
    if outputs:
        results |= {("output", number): node for number, node in enumerate(joint.outputs) if _is_node(node)}
    saved = entry.saved if entry else ()
    draws = [node for node in joint.graph.nodes if is_random(node)]
    wanted = ancestors([*results.values(), *saved, *draws], stop=ahead)
    for place, node in joint.carries.items():
        if place not in kept:
            build.take(program.threaded, ("carry", place), node, stands_for=node)
    for place in kept:
        build.take(program.columns, ("carry", place), joint.carries[place], stands_for=joint.carries[place])
    for place, node in joint.inputs.items():
        build.take(program.columns, ("input", place), node, stands_for=node)
    slots = {node: build.take(program.columns, ("saved", k), node) for k, node in enumerate(saved)}
    following = {place: build.take(program.columns, ("next", place), joint.carries[place]) for place in kept}
    for number, node in enumerate(ahead):
        build.take(program.columns, ("ahead", number), node, stands_for=node)
    build.bind([*(n for n in wanted if n not in parts.invariant and n not in ahead), *results.values()])
    build.copy({node for node in wanted if node not in parts.invariant})
    for node, slot in slots.items():
        build.write(slot, build.known[node])
    found = {key: build.known[node] for key, node in results.items()}
    for place, slot in following.items():
        found["after", place] = build.write(slot, found["after", place])
    return build.finish(found)


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


# ---- backward


@dataclass
class Plan:
    """How the gradients of one entry come about.

    Attributes:
        branches: by number of the captured tensor.
        terms: those that are deferred, in order.
        values: those that are added step by step, in order.
        sources: where operands of many steps stand: inputs, stacks of a tape, or slots.
        slots: operands that have slots of their own.
        given: operands that are written over a saved value that is not needed any more, by its number.
    """

    branches: dict[int, tuple[Branch, ...]]
    terms: list[Term]
    values: list[Term]
    sources: dict[Operand, Key]
    slots: list[Operand]
    given: dict[Operand, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a step's slots."""
        return sum(nbytes(operand.node) for operand in self.slots)


def plan_deferral(parts: Parts, entry: Entry, *, in_pieces: bool = False) -> Plan:
    """Where the operands of deferred gradients stand; `in_pieces`: see `deferred`."""
    branches = deferred(parts, in_pieces=in_pieces)
    every = list(dict.fromkeys(t for group in branches.values() for branch in group for t in branch.terms))
    terms = [term for term in every if term.kind != "value"]
    plan = Plan(branches, terms, [term for term in every if term.kind == "value"], {}, [], {})
    operands = list(dict.fromkeys(operand for term in terms for operand in term.operands))
    place_of = {node: place for place, node in parts.joint.carries.items()}
    leaf_of = {node: leaf for leaf, node in parts.joint.inputs.items()}
    leaving = {parts.joint.after[place]: place for place in entry.leaving}
    by_node: dict[fx.Node, Key] = {}
    for operand in operands:
        node = operand.node
        if operand.swapped or operand.batch:
            continue
        if node in leaf_of:
            by_node[node] = ("input", leaf_of[node])
        elif place_of.get(node) in entry.carries:
            by_node[node] = ("carry", place_of[node])
        elif node in leaving:
            by_node[node] = ("leaving", leaving[node])
        elif node in entry.saved:
            by_node[node] = ("saved", entry.saved.index(node))
    taken = {key[1] for key in by_node.values() if key[0] == "saved"}
    for operand in operands:
        key = None if operand.swapped or operand.batch else by_node.get(operand.node)
        if key is None:
            key = _own_place(operand, parts, entry, taken, plan)
            if not operand.swapped and not operand.batch:
                by_node[operand.node] = key
        plan.sources[operand] = key
    return plan


def _own_place(operand: Operand, parts: Parts, entry: Entry, taken: set[int], plan: Plan) -> Key:
    """A saved value's slots, to be written over, or slots of its own."""
    wanted = value_of(operand.node)
    if operand.node in parts.backward and not operand.swapped and not operand.batch:
        for number, node in enumerate(entry.saved):
            value = value_of(node)
            if number not in taken and value.shape == wanted.shape and value.dtype == wanted.dtype:
                taken.add(number)
                plan.given[operand] = number
                return ("saved", number)
    plan.slots.append(operand)
    return ("slot", len(plan.slots) - 1)


@dataclass(frozen=True)
class Arriving:
    """Which gradients arrive at a step: by leaf of its leaving carry, and by output."""

    adjoints: frozenset[int]
    outputs: frozenset[int]


def backward_program(
    parts: Parts, hoisted: Mapping[fx.Node, int], entry: Entry, plan: Plan, arriving: Arriving
) -> Program:
    """A step's backward, for gradients that arrive at some of its results only."""
    joint, build = parts.joint, Builder(parts, hoisted)
    program, width = build.program, len(joint.after)
    present = arriving.adjoints | {width + number for number in arriving.outputs}
    build.zeros = zeros_of(parts, arriving)
    for number, node in joint.tangents.items():
        if number in present and number < width:
            build.take(program.threaded, ("adjoint", number), node, stands_for=node)
    results: dict[Key, fx.Node] = {("carry", place): node for place, node in joint.carry_gradients.items()}
    results |= {("input", place): node for place, node in joint.input_gradients.items()}
    results |= {("value", k): term.node for k, term in enumerate(plan.values)}
    written = {operand: ("slot", k) for k, operand in enumerate(plan.slots)}
    written |= {operand: ("saved", k) for operand, k in plan.given.items()}
    stop = {*entry.saved, *(joint.carries[place] for place in entry.carries), *parts.free}
    stop |= {joint.after[place] for place in entry.leaving}
    program.live = [term for term in plan.terms if term.node not in build.zeros]
    written = {o: key for o, key in written.items() if any(o in term.operands for term in program.live)}
    wanted = ancestors([*results.values(), *(operand.node for operand in written)], stop=stop)
    slots = _take_columns(build, entry, present)
    slots |= {key: _take_slot(build, operand, key) for operand, key in written.items() if key[0] == "slot"}
    varying = {node for node in wanted if node not in parts.invariant}
    build.bind([*(node for node in varying if node not in stop), *results.values(), *(o.node for o in written)])
    build.copy({node for node in varying if node not in stop})
    live = {key: node for key, node in results.items() if node not in build.zeros}
    found = {key: build.known[node] for key, node in live.items()}
    for operand, key in written.items():
        value = build.known[operand.node]
        if operand.swapped:
            value = build.program.graph.call_function(aten.transpose.int, (value, -1, -2))
            value.meta["val"] = value_of(operand.node).transpose(-1, -2)
        build.write(slots[key], value)
    return build.finish(found)


def zeros_of(parts: Parts, arriving: Arriving) -> set[fx.Node]:
    """The nodes that are zero because no gradient arrives where they come from: each is linear in what arrives."""
    width = len(parts.joint.after)
    present = arriving.adjoints | {width + number for number in arriving.outputs}
    zeros = {node for number, node in parts.joint.tangents.items() if number not in present}
    for node in parts.joint.graph.nodes:
        if node in parts.backward and node.op == "call_function":
            sources = [argument for argument in node.all_input_nodes if argument in parts.backward]
            if all(argument in zeros for argument in sources):
                zeros.add(node)
    return zeros


def _take_slot(build: Builder, operand: Operand, key: Key) -> fx.Node:
    slot = build.take(build.program.columns, key, operand.node)
    if operand.swapped:
        slot.meta["val"] = value_of(operand.node).transpose(-1, -2).contiguous()
    return slot


def _take_columns(build: Builder, entry: Entry, present: frozenset[int]) -> dict[Key, fx.Node]:
    joint, columns = build.parts.joint, build.program.columns
    slots: dict[Key, fx.Node] = {}
    width = len(joint.after)
    for place in entry.carries:
        build.take(columns, ("carry", place), joint.carries[place], stands_for=joint.carries[place])
    for place in entry.leaving:
        build.take(columns, ("leaving", place), joint.after[place], stands_for=joint.after[place])
    for place, node in joint.inputs.items():
        build.take(columns, ("input", place), node, stands_for=node)
    for number, node in enumerate(entry.saved):
        slots["saved", number] = build.take(columns, ("saved", number), node, stands_for=node)
    for number, node in joint.tangents.items():
        if number >= width and number in present:
            build.take(columns, ("tangent", number - width), node, stands_for=node)
    return slots


def finish_program(
    parts: Parts, hoisted: Mapping[fx.Node, int], plan: Plan, reached: frozenset[Term]
) -> tuple[Program, list[tuple[Term, ...]]]:
    """Gradients of captured tensors from the sums of terms: the program, and the groups of terms that share a sum."""
    build = Builder(parts, hoisted)
    groups: dict[tuple[Term, ...], int] = {}
    live = {}
    for number, branches in plan.branches.items():
        pairs = [(tuple(t for t in branch.terms if t in reached), branch.links) for branch in branches]
        live[number] = [(terms, links) for terms, links in pairs if terms]
        for terms, _ in live[number]:
            groups.setdefault(terms, len(groups))
    holders = {terms: build.take(build.program.threaded, ("sum", k), terms[0].node) for terms, k in groups.items()}
    links = [link.node for pairs in live.values() for _, chain in pairs for link in chain]
    build.bind(links)
    results: dict[Key, fx.Node] = {}
    made: dict[Any, fx.Node] = {}
    for number, pairs in live.items():
        for terms, chain in pairs:
            node = holders[terms]
            for link in chain:
                key = (node, link.key())
                if key not in made:
                    made[key] = build.applied(link, node)
                node = made[key]
            if ("gradient", number) in results:
                total = build.program.graph.call_function(aten.add.Tensor, (results["gradient", number], node))
                total.meta["val"] = value_of(node)
                node = total
            results["gradient", number] = node
    return build.finish(results), list(groups)
