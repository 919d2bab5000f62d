"""What a recorded graph reaches that the walk from a step or block (`captures`) missed, so that no gradient is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .errors import StepError


class MissedTensors(Exception):  # never reaches the user
    """A recorded graph reaches leaves that the walk had missed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class Lookout(NamedTuple):
    """Looks for what a step or block uses and nobody knew of.

    Attributes:
        who: uses it, as a sentence begins.
        way_out: what to do about it.
        captured: the tensors whose gradients are asked for.
        used_up: newest nodes of graphs that a backward has let go of.
    """

    who: str
    way_out: str
    captured: Sequence[torch.Tensor]
    used_up: Container[Any] = ()

    def look(
        self, roots: Iterable[Any], own: Iterable[torch.Tensor], first_sequence: int, limit: int | None = None
    ) -> None:
        """Report, or refuse, what a recorded graph reaches.

        Args:
            roots: autograd nodes to walk from.
            own: leaves that belong to the recording.
            first_sequence: nodes of this thread with a smaller sequence number were made before the recording.
            limit: how many nodes to look at; all, if None.

        Raises:
            MissedTensors: leaves that nobody knew of.
            StepError: the result of something outside, or one whose graph is gone.
        """
        leaves = []
        for item in _unseen(roots, [*self.captured, *own], first_sequence, limit):
            if isinstance(item, torch.Tensor):
                leaves.append(item)
            elif item in self.used_up:
                raise StepError(
                    f"{self.who} uses a result of {type(item).__name__} from an earlier run, through whose graph no "
                    "gradient can go any more: a backward has gone through it already, or what it keeps was changed in "
                    "place since; compute it anew, or reset or detach it, before the loop"
                )
            else:
                raise StepError(
                    f"{self.who} uses the result of {type(item).__name__}, computed outside of it, in a way that "
                    f"cannot be seen, so its gradient would be lost; {self.way_out}"
                )
        if leaves:
            raise MissedTensors(leaves)

    def look_late(self, roots: Iterable[Any], own: Iterable[torch.Tensor], first_sequence: int) -> None:
        """The same in a backward, where it is too late to begin again.

        Raises:
            StepError: it reaches what nobody knew of.
        """
        try:
            self.look(roots, own, first_sequence)
        except MissedTensors as missed:
            raise StepError(
                f"{self.who} uses a tensor of shape {tuple(missed.tensors[0].shape)} in a way that cannot be seen, and "
                f"did not when it was first looked at, so its gradient would be lost; {self.way_out}"
            ) from None


def _unseen(roots: Iterable[Any], known: Iterable[torch.Tensor], first_sequence: int, limit: int | None) -> list[Any]:
    """Leaves, and nodes made outside of the recording, that nobody knew of; see `Lookout.look`."""
    leaves = {id(tensor) for tensor in known if tensor.is_leaf}
    outside = {tensor.grad_fn for tensor in known if not tensor.is_leaf}
    unseen: list[Any] = []
    seen: set[Any] = set()
    queue = deque(roots)
    while queue and (limit is None or len(seen) < limit):
        node = queue.popleft()
        if node is None or node in seen or node in outside:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in leaves:
                unseen.append(variable)
        elif node._sequence_nr() < first_sequence:
            unseen.append(node)
        else:
            queue.extend(following for following, _ in node.next_functions)
    return unseen
