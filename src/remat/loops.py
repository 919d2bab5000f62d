"""A loop over time as stages: the user's step, checked, with its inputs sliced and its outputs stacked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from .errors import StepError
from .inputs import Column
from .needs import SeenNeeds, could_need
from .trees import Leaves, Mismatch, Structure

Step = Callable[[Any, Any], tuple[Any, Any]]
_TINY: Final = 16  # bytes
_TOGETHER: Final = 32  # steps whose tiny outputs are stacked at once


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
        inputs: columns over time.
        length: how many steps the inputs hold.
        outputs: where first runs leave their outputs.
        fingerprints: what each step returned in its first run, for replays to be compared with; None: no comparison.
        becoming: how many of the carry's last leaves may be anything before the first step.

    Attributes:
        seen: what takes notes of which results of first runs need gradients; None: nobody does.
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
        fingerprints: list[Any] | None = None,
        becoming: int = 0,
    ) -> None:
        self.step, self.structure, self.length = step, structure, length
        self.outputs = outputs
        self.output_structure: Structure | None = None
        self._kinds = [kind_of(leaf) for leaf in carry]
        self._begin = [None if could_need(leaf) else leaf for leaf in carry]
        self._becoming = becoming
        self.seen: SeenNeeds | None = None
        self._output_kinds: list[Any] = []
        self._input_structure = input_structure
        self._fingerprints = fingerprints
        self.columns = [Column(leaf) for leaf in inputs]
        self._wanted = [column for column in self.columns if column.needs]

    # ---- what the interpreter asks for

    def inputs(self, index: int, *, recording: bool) -> Leaves:
        """The leaves of x at a step; when recording, those that need a gradient are fresh leaves."""
        index %= self.length  # profiling may ask for more steps than there are
        return [column.at(index, differentiable=recording) for column in self.columns]

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """One step, its results taken apart and checked; a replay may not differ either."""
        if index >= self.length:  # only where steps are looked at: counters and such must not run on beyond the end
            carry = [leaf if could_need(leaf) else old for leaf, old in zip(carry, self._begin, strict=True)]
        result = self.step(self.structure.build(carry), self._input_structure.build(inputs))
        if type(result) is not tuple or len(result) != 2:
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise StepError(f"step {index} returned {what}; a step returns (carry, y), with y None if there is none")
        after, y = result
        if self.output_structure is None:
            self.output_structure = Structure(y)
            self._output_kinds = [kind_of(leaf) for leaf in self.output_structure.flatten(y)]
        try:
            leaves = self.structure.flatten(after)
        except Mismatch as error:
            raise StepError(f"step {index} returned a carry of another structure than it was given: {error}") from None
        try:
            outputs = self.output_structure.flatten(y)
        except Mismatch as error:
            raise StepError(f"step {index} returned outputs of another structure than step 0: {error}") from None
        if self._becoming:
            self._kinds[-self._becoming :] = map(kind_of, leaves[-self._becoming :])
            self._becoming = 0
        if any(map(_differs, self._kinds, leaves)):
            self._refuse(index, "a carry", self.structure, self._kinds, leaves)
        if any(map(_differs, self._output_kinds, outputs)):
            self._refuse(index, "outputs", self.output_structure, self._output_kinds, outputs)
        if first and self.seen is not None:
            self.seen.note(index + 1, leaves, outputs)
        if self._fingerprints is not None and index < self.length:
            self._compare(index, leaves, outputs, first=first)
        return leaves, outputs

    def emit(self, index: int, outputs: Leaves) -> None:
        """Stack the outputs of a first run."""
        if self.outputs is not None:
            self.outputs.emit(index % self.outputs.length, outputs)

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Keep the gradients of x."""
        for column, gradient in zip(self._wanted, gradients, strict=True):
            column.take(index % self.length, gradient)

    def input_gradients(self) -> list[torch.Tensor | None]:
        """The gradients of the columns that need one."""
        return [column.gradient for column in self._wanted]

    # ---- checks

    def _compare(self, index: int, carry: Leaves, outputs: Leaves, *, first: bool) -> None:
        assert self._fingerprints is not None
        assert self.output_structure is not None
        found = [*map(fingerprint, carry), *map(fingerprint, outputs)]
        wanted = self._fingerprints[index]
        if first or wanted is None:
            self._fingerprints[index] = found
            return
        names = [f"carry{path}" for path in self.structure.paths()] + [
            f"y{path}" for path in self.output_structure.paths()
        ]
        for name, then, now in zip(names, wanted, found, strict=True):
            if then != now:
                raise StepError(
                    f"a replay of step {index} gives another {name} than its first run; the step is not deterministic: "
                    "it reads something that has changed meanwhile, or uses a kernel that is not deterministic"
                )

    @staticmethod
    def _refuse(index: int, what: str, structure: Structure, kinds: Sequence[Any], leaves: Leaves) -> None:
        for place, (kind, leaf) in enumerate(zip(kinds, leaves, strict=True)):
            if kind_of(leaf) != kind:
                raise StepError(
                    f"step {index} returned {what} whose leaf {structure.paths()[place] or 'value'} is "
                    f"{described(kind_of(leaf))} instead of {described(kind)}; shapes, dtypes and devices must stay "
                    "as they are from step to step"
                )


def fingerprint(leaf: Any) -> bytes | None:
    """A digest of a tensor's bits."""
    if not isinstance(leaf, torch.Tensor):
        return None
    flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).digest()


def kind_of(leaf: Any) -> Any:
    """What must not change from step to step."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else isinstance(leaf, torch.Tensor)


def _differs(kind: Any, leaf: Any) -> bool:
    """Whether a leaf is of another kind; what `kind_of` would say, sooner."""
    if isinstance(leaf, torch.Tensor):
        return not kind or leaf.dtype is not kind[1] or leaf.shape != kind[0] or leaf.device != kind[2]
    return bool(kind)


def described(kind: Any) -> str:
    """A kind as people write it."""
    if not kind:
        return "no tensor"
    shape, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}" + ("" if device.type == "cpu" else f" on {device}")
