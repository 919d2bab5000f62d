"""The stages of a loop over the programs of a traced step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..loops import Loop
from ..trees import Leaves
from .ahead import Window
from .graphs import value_of
from .layouts import format_of
from .programs import Arriving
from .traced import Ready, Traced


class as_traced:  # noqa: N801  # a context, and there is one in every action
    """Autograd is off, and so is autocast: its casts are operators of the graph."""

    __slots__ = ("autocast", "grad_mode")

    def __enter__(self) -> None:
        autocast: Any = torch._C._DisableAutocast()
        self.grad_mode, self.autocast = torch.is_grad_enabled(), autocast
        autocast.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self.grad_mode)
        self.autocast.__exit__(*error)


class TracedStages:
    """A loop's stages without tapes: the traced step instead of the step.

    Args:
        traced: the step.
        loop: the loop, which slices inputs and stacks outputs.
        externals: the tensors that the step uses beside its arguments.
    """

    def __init__(self, traced: Traced, loop: Loop, externals: Sequence[torch.Tensor]) -> None:
        self.traced, self.loop = traced, loop
        loop.output_structure = traced.joint.output_structure
        with as_traced():
            self.shared = traced.shared(externals)
        of = {node: self.shared[number] for node, number in traced.hoisted.items()}
        self._ahead = [
            (ahead.leaf, ahead.steps, of[ahead.weight], None if ahead.bias is None else of[ahead.bias])
            for ahead in traced.ahead
        ]
        self._advance = {first: Step(traced.advance(outputs=first), self.shared) for first in (True, False)}

    def inputs(self, index: int, *, recording: bool) -> Leaves:  # noqa: ARG002  # tapes keep no history of inputs
        """The leaves of x at a step."""
        return self.loop.inputs(index, recording=False)

    def window(self) -> Window:
        """What the steps of a range take of products ahead."""
        return Window(self._ahead, self.loop)

    def advancing(self, *, first: bool) -> Step:
        """The program of a step without a tape."""
        return self._advance[first]

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """One step."""
        step = self._advance[first]
        columns = step.columns_of(carry, inputs)
        with torch._C._DisableAutocast():  # see `as_traced`
            found = step.run(*[carry[k] for k in step.threaded], *columns, *self.window().at(index), *step.bound)
        return step.ready.after(found, carry), step.ready.outputs(found) if first else []

    def columns(self, leaf: int, steps: range) -> list[torch.Tensor]:
        """What steps take of one leaf of x."""
        column = self.loop.columns[leaf]
        return [column.at(index % self.loop.length) for index in steps]

    def emit(self, index: int, outputs: Leaves) -> None:
        """Stack the outputs of a first run."""
        self.loop.emit(index, outputs)

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Keep the gradients of x."""
        self.loop.take_input_gradients(index, gradients)


class Step:
    """A program over tensors that are the same in every step."""

    def __init__(self, ready: Ready, shared: Sequence[torch.Tensor]) -> None:
        self.ready, self.run = ready, ready.function
        self.threaded = [number for _, number in ready.program.threaded]
        self.bound = [shared[number] for _, number in ready.program.bound]
        holders = [node for node in ready.program.graph.nodes if node.op == "placeholder"]
        values = map(value_of, holders[len(self.threaded) :])
        self.columns = [
            (*key, _maker(value))
            for key, value in zip(ready.program.columns, values, strict=False)
            if key[0] != "ahead"
        ]

    def columns_of(self, carry: Leaves, inputs: Leaves) -> list[torch.Tensor]:
        """What a step has of its own where no tape is kept: a recording program writes into passing memory.

        Without what is there ahead, which comes last.
        """
        return [
            inputs[number] if kind == "input" else carry[number] if kind == "carry" else make()
            for kind, number, make in self.columns
        ]


class Back(Step):
    """A backward program, and where its results stand.

    Attributes:
        carries: (leaf, place) of the gradients of the entering carry.
        values: (number of the term, place) of what is added step by step.
        inputs: the places of the gradients of inputs that need one, or None.
        steady: whether the same gradients arrive at the step before.
    """

    def __init__(self, ready: Ready, shared: Sequence[torch.Tensor], arriving: Arriving, wanted: Sequence[int]) -> None:
        super().__init__(ready, shared)
        results = ready.program.results
        self.carries = [(number, place) for (kind, number), place in results.items() if kind == "carry"]
        self.values = [(number, place) for (kind, number), place in results.items() if kind == "value"]
        self.inputs = [results.get(("input", k)) for k in wanted]
        self.steady = {number for number, _ in self.carries} == arriving.adjoints


def _maker(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes memory for such a value, without looking at it again."""
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    if format_of(value) is torch.contiguous_format:
        return partial(empty.new_empty, tuple(value.shape))
    return partial(empty.new_empty_strided, tuple(value.shape), value.stride())
