"""Sums of gradients over ranges: what captured tensors got so far, and where their sums begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .recorded import Boundary, Given, Ties, bytes_of, places_of, summed
from .trees import Leaves


class Captured:
    """Tensors that stages use beside carry and inputs, and the sums of their gradients.

    Args:
        tensors: all of them, each once.
        used: for every stage the numbers of those it may use; None if every stage may use all.

    Attributes:
        gradients: the sums so far, by number; what a backward is adding to is out of here meanwhile.
        copied: those of which autocast around the stages keeps one copy for all of them, by number.
        copies: the sums for these copies, by number.
        number_of: numbers by the tensors' ids, where every stage may use all.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], used: Sequence[Sequence[int]] | None = None) -> None:
        self.tensors = tuple(tensors)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.tensors)
        self._all = tuple(range(len(self.tensors)))
        self._used = used
        self.number_of = {id(tensor): number for number, tensor in enumerate(self.tensors)} if used is None else {}
        self._given: dict[tuple[int, int], list[Given]] = {}  # by tensor and output
        self.copied: Sequence[int] = ()
        self.copies: dict[int, torch.Tensor | None] = {}
        self.first: dict[int, int] = {}  # by number, the first stage that may use it; only where stages differ
        self.last: dict[int, int] = {}
        for stage, numbers in enumerate(used or ()):
            for number in numbers:
                self.first.setdefault(number, stage)
                self.last[number] = stage

    @property
    def is_alike(self) -> bool:
        """Whether every stage may use all of them."""
        return self._used is None

    def numbers(self, start: int, stop: int) -> tuple[int, ...]:
        """Of those that stages start … stop−1 may use."""
        if self._used is None:
            return self._all
        return tuple(dict.fromkeys(number for stage in range(start, stop) for number in self._used[stage]))

    def shared(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Those among them that several stages may use: their gradients are sums over ranges."""
        if self._used is None:
            return tuple(numbers)
        return tuple(number for number in numbers if self.first[number] < self.last[number])

    def begins(self, number: int, stop: int, length: int) -> bool:
        """Whether no stage from `stop` on may use it, so that its sum begins before."""
        return self.last[number] < stop if self.last else stop == length

    def take(self, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        """Sums, out of here: what is held once only can be added to in place, or become a `.grad` as it is."""
        taken = [self.gradients[number] for number in numbers]
        for number in numbers:
            self.gradients[number] = None
        return taken

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the sums, and those of the sparse ones among them, which grow with every stage that adds to them.

        Sums for autocast's copies count as if all were there at once with the others.
        """
        sums = [gradient for gradient in self.gradients if gradient is not None]
        sparse = sum(bytes_of(gradient) for gradient in sums if gradient.layout is not torch.strided)
        copies = sum(self.tensors[number].nbytes // 2 for number in self.copied)
        return copies + sum(map(bytes_of, sums)) - sparse, sparse

    # ---- captured tensors that are leaves of a carry, or outputs

    def ties(self, carry: Leaves) -> Ties:
        """Which leaves of the first carry are captured tensors."""
        return Ties(
            (), tuple((p, self.number_of[id(carry[p])]) for p in places_of(carry) if id(carry[p]) in self.number_of)
        )

    def themselves(self, boundary: Boundary) -> Leaves:
        """The leaves of a carry, and for those that are captured tensors the tensors themselves."""
        if not boundary.ties.captured:
            return boundary.leaves
        itself = {id(boundary.leaves[place]): self.tensors[number] for place, number in boundary.ties.captured}
        return [itself.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in boundary.leaves]

    def note(self, stage: int, outputs: Leaves) -> None:
        """Take notes of outputs of a first run that are captured tensors."""
        if self.number_of.keys().isdisjoint(map(id, outputs)):
            return
        for output, leaf in enumerate(outputs):
            number = self.number_of.get(id(leaf))
            if number is not None:
                items = self._given.setdefault((number, output), [])
                if items and items[-1].stop == stage:
                    items[-1] = items[-1]._replace(stop=stage + 1)
                else:
                    items.append(Given(output, stage, stage + 1, -1))

    def begin(
        self,
        returned: Sequence[tuple[int, int]],
        adjoint: Sequence[torch.Tensor | None],
        output_gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Begin the sums of those that are leaves of the final carry, or outputs, with the gradients of these."""
        starts = {number: adjoint[place] for place, number in returned}
        for number in {*starts, *(number for number, _ in self._given)}:
            items = [item for (other, _), items in self._given.items() if other == number for item in items]
            self.gradients[number] = summed(starts.get(number), items, output_gradients)
