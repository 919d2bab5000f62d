"""A loop over time as stages: the user's step, checked, with its inputs sliced and its outputs stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from .errors import StepError
from .recorded import needs_gradient
from .trees import Leaves, Mismatch, Structure

Step = Callable[[Any, Any], tuple[Any, Any]]
_TINY: Final = 16  # bytes
_TOGETHER: Final = 32  # steps whose tiny outputs are stacked, or whose inputs are sliced, at once


class Inputs:
    """Inputs over time: tensors with a leading dimension for time; other leaves are the same in every step."""

    def __init__(self, xs: Any, length: int | None) -> None:
        self.structure = Structure(xs)
        self.leaves = self.structure.flatten(xs)
        self.length = _length(self.structure, self.leaves, length)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def at(self, index: int) -> Leaves:
        """The leaves of x at a step."""
        return [leaf[index] if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]


def _length(structure: Structure, leaves: Leaves, length: int | None) -> int:
    lengths = {}
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0:
                raise StepError(f"xs{path} has no dimension for time; give it one, or let the step close over it")
            lengths[f"xs{path}"] = leaf.shape[0]
    if length is not None:
        if not isinstance(length, int) or isinstance(length, bool):
            raise StepError(f"length must be a number of steps, not {length!r}")
        lengths["length="] = length
    if not lengths:
        raise StepError("xs holds no tensor, so the number of steps is unknown; give xs or length=")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise StepError(f"inputs differ in their number of steps: {found}; the first dimension of each is time")
    count = next(iter(lengths.values()))
    if count < 1:
        raise StepError(f"there are {count} steps to run; a loop needs at least one")
    return count


class Outputs:
    """Outputs stacked over time as they come, each in a buffer that is allocated once.

    Tiny ones, such as losses, wait until there are enough of them: stacking many costs little more than copying one.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.buffers: list[Any] = []
        self._waiting: list[list[torch.Tensor]] = []
        self._first = 0  # the step of the first that waits

    def emit(self, index: int, leaves: Leaves) -> None:
        """Keep the outputs of step `index`."""
        if not self.buffers:
            self.buffers = [self._buffer(leaf) for leaf in leaves]
            self._waiting = [[] for _ in leaves]
        if index % _TOGETHER == 0 or index < self._first:
            self.flush()
            self._first = index
        for buffer, waiting, leaf in zip(self.buffers, self._waiting, leaves, strict=True):
            if not isinstance(buffer, torch.Tensor):
                if buffer is not None:
                    buffer[index] = leaf
            elif leaf.nbytes <= _TINY:
                waiting.append(leaf.detach())
            else:
                buffer[index].copy_(leaf.detach())

    def flush(self) -> None:
        """Stack what waits."""
        with torch.no_grad():
            for buffer, waiting in zip(self.buffers, self._waiting, strict=True):
                if waiting:
                    torch.stack(waiting, out=buffer[self._first : self._first + len(waiting)])
                    waiting.clear()

    def _buffer(self, leaf: Any) -> torch.Tensor | list[Any] | None:
        if isinstance(leaf, torch.Tensor):
            return torch.empty((self.length, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
        return None if leaf is None else [None] * self.length


class Loop:
    """The stages of a time loop, for one pass over its inputs.

    Args:
        step: `(carry, x) -> (carry, y)`.
        structure: of the carry.
        carry: leaves of the initial carry, which say what must not change.
        input_structure: of x.
        inputs: leaves of xs.
        length: how many steps the inputs hold.
        outputs: where first runs leave their outputs.
    """

    def __init__(
        self,
        step: Step,
        structure: Structure,
        carry: Leaves,
        input_structure: Structure,
        inputs: Leaves,
        length: int,
        outputs: Outputs | None,
    ) -> None:
        self.step, self.structure, self.length = step, structure, length
        self.outputs = outputs
        self.output_structure: Structure | None = None
        self._kinds = [_kind(leaf) for leaf in carry]
        self._output_kinds: list[Any] = []
        self._input_structure = input_structure
        self._needs = [needs_gradient(leaf) for leaf in inputs]
        self._inputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
        self._any_needs = any(self._needs)
        self._first = -1
        self._slices: list[tuple[Any, bool]] = []  # a block of x: views by step, or a value that is no tensor
        self.input_gradients: list[torch.Tensor | None] = [None] * sum(self._needs)

    # ---- what the interpreter asks for

    def inputs(self, index: int, *, recording: bool) -> Leaves:
        """The leaves of x at a step; when recording, those that need a gradient are fresh leaves."""
        index %= self.length  # profiling may ask for more steps than there are
        first = index - index % _TOGETHER
        if first != self._first:
            self._first, self._slices = first, [self._sliced(leaf, first) for leaf in self._inputs]
        index -= first
        if not recording or not self._any_needs:
            return [leaf[index] if is_tensor else leaf for leaf, is_tensor in self._slices]
        leaves = [leaf[index].detach() if is_tensor else leaf for leaf, is_tensor in self._slices]
        for leaf, need in zip(leaves, self._needs, strict=True):
            if need:
                leaf.requires_grad_()
        return leaves

    @staticmethod
    def _sliced(leaf: Any, first: int) -> tuple[Any, bool]:
        if isinstance(leaf, torch.Tensor):
            return leaf[first : first + _TOGETHER].unbind(), True
        return leaf, False

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """One step, its results taken apart and, the first time, checked."""
        result = self.step(self.structure.build(carry), self._input_structure.build(inputs))
        if type(result) is not tuple or len(result) != 2:
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise StepError(f"step {index} returned {what}; a step returns (carry, y), with y None if there is none")
        after, y = result
        if self.output_structure is None:
            self.output_structure = Structure(y)
            self._output_kinds = [_kind(leaf) for leaf in self.output_structure.flatten(y)]
        try:
            leaves = self.structure.flatten(after)
        except Mismatch as error:
            raise StepError(f"step {index} returned a carry of another structure than it was given: {error}") from None
        try:
            outputs = self.output_structure.flatten(y)
        except Mismatch as error:
            raise StepError(f"step {index} returned outputs of another structure than step 0: {error}") from None
        if first:
            self._check(index, "a carry", self.structure, self._kinds, leaves)
            self._check(index, "outputs", self.output_structure, self._output_kinds, outputs)
        return leaves, outputs

    def emit(self, index: int, outputs: Leaves) -> None:
        """Stack the outputs of a first run."""
        if self.outputs is not None:
            self.outputs.emit(index % self.outputs.length, outputs)

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Stack the gradients of x."""
        wanted = [leaf for leaf, need in zip(self._inputs, self._needs, strict=True) if need]
        for place, (leaf, gradient) in enumerate(zip(wanted, gradients, strict=True)):
            if gradient is not None:
                buffer = self.input_gradients[place]
                if buffer is None:
                    buffer = self.input_gradients[place] = torch.zeros_like(leaf)
                buffer[index % self.length].copy_(gradient)

    # ---- checks

    @staticmethod
    def _check(index: int, what: str, structure: Structure, kinds: Sequence[Any], leaves: Leaves) -> None:
        for place, (kind, leaf) in enumerate(zip(kinds, leaves, strict=True)):
            if _kind(leaf) != kind:
                raise StepError(
                    f"step {index} returned {what} whose leaf {structure.paths()[place] or 'value'} is "
                    f"{_described(_kind(leaf))} instead of {_described(kind)}; shapes, dtypes and devices must stay "
                    "as they are from step to step"
                )


def _kind(leaf: Any) -> Any:
    """What must not change from step to step."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else isinstance(leaf, torch.Tensor)


def _described(kind: Any) -> str:
    if not kind:
        return "no tensor"
    shape, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}" + ("" if device.type == "cpu" else f" on {device}")
