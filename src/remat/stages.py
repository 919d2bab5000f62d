"""What interpreter and recorders know of real stages, and of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .recorded import Boundary, Ties, needs_gradient
from .schedules import Advance, Record
from .sums import Captured
from .trees import Leaves

Needs = Callable[[int], Sequence[bool]]  # which leaves of carry i need a gradient
ByStage = Callable[[int], bool]


def needs_of(carry: Leaves, later: Sequence[bool]) -> Needs:
    """What carry 0 says itself, and the same for all carries after it."""
    first = [needs_gradient(leaf) for leaf in carry]
    return lambda boundary: later if boundary else first


def never(_: int) -> bool:
    """No stage does."""
    return False


class Stages(Protocol):
    """Real stages, as interpreter and recorders see them."""

    def inputs(self, index: int, *, recording: bool) -> Leaves:
        """What stage `index` takes beside its carry; when recording, leaves that need a gradient are fresh aliases."""
        ...

    def run(self, index: int, carry: Leaves, inputs: Leaves, *, first: bool) -> tuple[Leaves, Leaves]:
        """Stage `index` on a carry: the next carry and the outputs; `first` when it runs for the first time."""
        ...

    def emit(self, index: int, outputs: Leaves) -> None:
        """Take the outputs of a first run."""
        ...

    def take_input_gradients(self, index: int, gradients: list[torch.Tensor | None]) -> None:
        """Take the gradients of those inputs of stage `index` that need one."""
        ...


class Recording(NamedTuple):
    """What recording a range gives.

    Attributes:
        tape: what its backward needs, in whatever form the recorder likes.
        carry: leaves of the leaving carry, as the caller of the whole chain may have them.
        ties: what its leaves are besides.
    """

    tape: Any
    carry: Leaves
    ties: Ties


class Recorder(Protocol):
    """How ranges of stages are recorded, and how their tapes are consumed."""

    captured: Captured

    def advance(
        self, action: Advance, take: Callable[[], Boundary], *, first: bool, grad_mode: bool
    ) -> tuple[Leaves, Ties]:
        """Run the stages of `action` and keep nothing.

        Args:
            action: the stages.
            take: as for `record`.
            first: as for `record`.
            grad_mode: whether they run with autograd on, as they compute otherwise without.

        Returns:
            The leaving carry without autograd history, and what its leaves are besides.
        """
        ...

    def record(self, action: Record, take: Callable[[], Boundary], *, first: bool) -> Recording:
        """Run the stages of `action` and keep their tapes.

        Args:
            action: the stages, and the entry of their menus.
            take: hands over the entering carry, once; nobody else holds it then, unless a slot or a range does.
            first: whether the stages run for the first time, so that their outputs are to be emitted.
        """
        ...

    def start_backward(self, output_gradients: Sequence[Any]) -> None:
        """Take the gradients of the outputs, each stacked over stages, or None."""
        ...

    def backward(self, tape: Any, adjoint: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Consume the tapes of a range, newest stage first.

        Adds to the gradients of what is captured, and hands those of inputs to the stages.

        Args:
            tape: from `record`.
            adjoint: gradients by leaf of the carry that left the range; emptied.

        Returns:
            Those of the carry that entered it.
        """
        ...
