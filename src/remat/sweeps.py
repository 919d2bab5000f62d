"""Recurrent layers over chunks of time as stages for the interpreter: one fused kernel call is one stage.

A *sweep* is one direction of one layer, or several layers in one direction at once, from one end of time to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

import torch

from .trees import Leaves


@dataclass(frozen=True, slots=True)
class Kernel:
    """PyTorch's fused recurrent kernel, over some layers, forward in time and without dropout.

    Attributes:
        name: of torch's function: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        layers: how many.
        bias: whether they have biases.
        train: as the module is.
    """

    name: str
    layers: int
    bias: bool
    train: bool

    def __call__(
        self, x: torch.Tensor, batch_sizes: torch.Tensor | None, states: Leaves, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Leaves]:
        """Outputs and states after x, whose dimension 0 is time, or packed rows where there are batch sizes."""
        function: Any = getattr(torch, self.name)
        state = tuple(states) if self.name == "lstm" else states[0]
        flags = (self.bias, self.layers, 0.0, self.train, False)
        if batch_sizes is None:
            result = function(x, state, weights, *flags, False)
        else:
            result = function(x, batch_sizes, state, weights, *flags)
        return result[0], list(result[1:])


@dataclass(frozen=True, slots=True)
class Cut:
    """Time cut into chunks.

    Attributes:
        pieces: the chunks, in order of time, as slices of dimension 0 of the data.
        batch_sizes: those of every chunk if the data is packed, else nothing.
    """

    pieces: tuple[slice, ...]
    batch_sizes: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, steps: int, batch_sizes: torch.Tensor | None, chunk: int) -> Cut:
        """Chunks of at most `chunk` steps, as equal as can be; packed ones of at most that many full steps of rows."""
        if batch_sizes is None:
            count = -(-steps // chunk)
            bounds = [index * steps // count for index in range(count + 1)]
            return cls(tuple(slice(start, stop) for start, stop in pairwise(bounds)))
        rows = batch_sizes.tolist()
        limit, starts, filled = chunk * rows[0], [0], 0
        for step, size in enumerate(rows):
            if filled + size > limit:
                starts.append(step)
                filled = 0
            filled += size
        starts.append(len(rows))
        before = list(accumulate(rows, initial=0))
        pieces = tuple(slice(before[start], before[stop]) for start, stop in pairwise(starts))
        return cls(pieces, tuple(batch_sizes[start:stop] for start, stop in pairwise(starts)))

    @classmethod
    def same(cls, count: int, chunk: int, batch_sizes: torch.Tensor | None) -> Cut:
        """The same full chunk again and again, to be measured."""
        if batch_sizes is None:
            return cls((slice(0, chunk),) * count)
        batch = int(batch_sizes[0])
        return cls((slice(0, chunk * batch),) * count, (torch.full((chunk,), batch),) * count)

    def backwards(self) -> Cut:
        """The same chunks in reverse order."""
        return Cut(self.pieces[::-1], self.batch_sizes[::-1])


class Pieces:
    """A tensor over time, chunk by chunk: indexed and unbound like a tensor whose first dimension is chunks."""

    def __init__(self, whole: torch.Tensor, pieces: tuple[slice, ...]) -> None:
        self._whole, self._pieces = whole, pieces

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Pieces: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Pieces:
        if isinstance(index, slice):
            return Pieces(self._whole, self._pieces[index])
        return self._whole[self._pieces[index]]

    def unbind(self) -> tuple[torch.Tensor, ...]:
        """The chunks."""
        return tuple(self._whole[piece] for piece in self._pieces)


class Sweep:
    """One direction of some layers over time: `interpreter.Stages`.

    Args:
        kernel: what a chunk is run with.
        weights: the kernel's.
        cut: the chunks.
        x: what goes in, dimension 0 being time or packed rows.
        needs: whether x needs a gradient.
        reverse: whether time runs backwards; results stand where their inputs stand.
    """

    def __init__(
        self,
        kernel: Kernel,
        weights: Sequence[torch.Tensor],
        cut: Cut,
        x: torch.Tensor,
        *,
        needs: bool,
        reverse: bool,
    ) -> None:
        self.kernel, self.weights, self.needs, self.reverse = kernel, weights, needs, reverse
        self.cut = cut.backwards() if reverse else cut
        self._x = Pieces(x.detach(), self.cut.pieces)
        self.output: Pieces | None = None
        self.gradient: Pieces | None = None

    def write_to(self, output: torch.Tensor) -> None:
        """Leave the outputs of first runs there."""
        self.output = Pieces(output, self.cut.pieces)

    def add_to(self, gradient: torch.Tensor) -> None:
        """Add the gradients of x there."""
        self.gradient = Pieces(gradient, self.cut.pieces)

    # ---- what the interpreter asks for

    def inputs(self, index: int, *, recording: bool) -> Leaves:
        """The chunk of x; when recording, a fresh leaf if it needs a gradient."""
        return [self._x[index].requires_grad_(recording and self.needs)]

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:  # noqa: ARG002
        """The kernel over one chunk."""
        (x,) = inputs
        if not self.cut.batch_sizes:
            out, after = self.kernel(x.flip(0) if self.reverse else x, None, carry, self.weights)
            return after, [out.flip(0) if self.reverse else out]
        sizes = self.cut.batch_sizes[index]
        rows = int(sizes[0])
        order = _reversed_rows(sizes).to(x.device) if self.reverse else None
        running = [leaf[:, :rows].contiguous() for leaf in carry]
        out, after = self.kernel(x if order is None else x[order], sizes, running, self.weights)
        # Sequences that are over, or in reverse not begun, keep their state.
        after = [torch.cat([new, old[:, rows:]], 1) for new, old in zip(after, carry, strict=True)]
        return after, [out if order is None else out[order]]

    def emit(self, index: int, outputs: Leaves) -> None:
        """Put the outputs of a first run where they belong."""
        if self.output is not None:
            self.output[index].copy_(outputs[0].detach())

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Add the gradient of a chunk of x."""
        if self.gradient is not None and gradients[0] is not None:
            self.gradient[index].add_(gradients[0])


def _reversed_rows(batch_sizes: torch.Tensor) -> torch.Tensor:
    """For packed rows: where each sequence's rows stand if every sequence is reversed in its own length.

    Reversed so, they are packed with the same batch sizes, and the kernel, which knows only forward, can take them.
    """
    starts = batch_sizes.cumsum(0) - batch_sizes
    step = torch.repeat_interleave(batch_sizes)
    sequence = torch.arange(len(step)) - starts[step]
    length = torch.searchsorted(-batch_sizes, -sequence)  # how many batch sizes are larger than its number
    return starts[length - 1 - step] + sequence
