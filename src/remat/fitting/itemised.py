"""The books of a training step, itemised: what the bytes of its fullest moment are for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ..estimate import Ledger, Rates

_NEVER: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Items:
    """Bytes alive at the fullest moment of a training step, over those at its start.

    Attributes:
        gradient_bytes: gradients of parameters and inputs that were there by then.
        activation_bytes: what the forward left for the backward and for the caller.
        workspace_bytes: the rest: gradients on their way, and what operators take in passing.
    """

    gradient_bytes: int
    activation_bytes: int
    workspace_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of them."""
        return self.gradient_bytes + self.activation_bytes + self.workspace_bytes


@dataclass(slots=True)
class _Life:
    """Of a storage: its size, and from when to when it was there."""

    size: int
    born: int
    died: int = _NEVER


class Itemised(Ledger):
    """A ledger that remembers when each storage came and went."""

    def __init__(self, rates: Rates) -> None:
        self._clock = self._peak_clock = self._forward_end = 0
        self._lives: list[_Life] = []
        self._living: dict[int, _Life] = {}
        self._gradients: list[_Life] = []
        super().__init__(rates)

    def _enter(self, tensor: Tensor, *, counted: bool) -> None:
        self._clock += 1
        before = self.live_bytes
        super()._enter(tensor, counted=counted)
        if self.live_bytes > before:
            life = _Life(self.live_bytes - before, self._clock)
            self._lives.append(life)
            self._living[tensor.untyped_storage()._cdata] = life

    def _leave(self, key: int) -> None:
        self._clock += 1
        super()._leave(key)
        if (life := self._living.pop(key, None)) is not None:
            life.died = self._clock

    def _reach(self, size: int) -> None:
        if size > self.peak_bytes:
            self._peak_clock = self._clock
        super()._reach(size)

    def end_forward(self) -> None:
        """The forward ends here."""
        self._forward_end = self._clock

    def end_step(self, gradients: Iterable[Tensor]) -> None:
        """The backward has ended, with these gradients."""
        found = (self._living.get(gradient.untyped_storage()._cdata) for gradient in gradients)
        self._gradients = [life for life in found if life is not None]

    def items(self) -> Items:
        """What the fullest moment is made of."""
        there = [life for life in self._lives if life.born <= self._peak_clock < life.died]
        wanted = set(map(id, self._gradients))
        gradients = sum(life.size for life in there if id(life) in wanted)
        left = (life for life in there if id(life) not in wanted and life.born <= self._forward_end < life.died)
        activations = sum(life.size for life in left)
        return Items(gradients, activations, self.peak_bytes - gradients - activations)
