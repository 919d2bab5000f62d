"""Leaves that stand in for results from outside of a loop which other tensors that it uses went into.

A step may use a weight and, made once before the loop, its transpose or normalised form. Gradients are asked for of
both. But where they are asked for of the weight too, autograd does not stop at what was made of it: it goes on to the
weight, as it will again when the loop's gradients flow on, and uses up the graph in between. So the loop runs with a
leaf of the same values under the names of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .bindings import Binding
from .nodes import computed_from
from .trees import Structure


class StandIns:
    """What stands in for some of the tensors that a step can reach.

    Args:
        tensors: those that need a gradient.
        bindings: the names by which they are found.
        given: those that a step is given, so that they need no name.

    Attributes:
        tensors: the same, with stand-ins. What should have one and is neither named nor given is left out: should the
            step use it, that is seen.
        bindings: the names of these.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], bindings: Iterable[Binding], given: Iterable[torch.Tensor] = ()
    ) -> None:
        self.tensors, self.bindings = list(tensors), list[Binding]()
        self._original: dict[int, torch.Tensor] = {}
        self._leaf_of: dict[int, torch.Tensor] = {}
        made_of = computed_from(tensors)
        if not made_of:
            return
        leaf_of = self._leaf_of = {id(tensors[number]): _leaf(tensors[number]) for number in made_of}
        self.bindings = [each._replace(value=leaf_of[id(each.value)]) for each in bindings if id(each.value) in leaf_of]
        bound = {id(binding.value) for binding in self.bindings}
        bound.update(id(leaf_of[id(tensor)]) for tensor in given if id(tensor) in leaf_of)
        self.tensors = [leaf_of.get(id(tensor), tensor) for tensor in tensors]
        self.tensors = [t for t, old in zip(self.tensors, tensors, strict=True) if t is old or id(t) in bound]
        self._original = {id(leaf_of[id(old)]): old for old in tensors if id(old) in leaf_of}

    def originals(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors with what the stand-ins among them stand for."""
        return [self._original.get(id(tensor), tensor) for tensor in tensors]

    def within(self, value: Any) -> Any:
        """A pytree with the stand-ins for what is among its leaves."""
        structure = Structure(value)
        return structure.build([self._leaf_of.get(id(leaf), leaf) for leaf in structure.flatten(value)])

    def among(self, bindings: Iterable[Binding]) -> list[Binding]:
        """All bindings, those of what is stood in for to the stand-ins."""
        stands = {binding.identity: binding for binding in self.bindings}
        return [stands.get(binding.identity, binding) for binding in bindings] if stands else list(bindings)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same values, of which autocast keeps no copy either: it does of leaves that are no views."""
    with torch.no_grad():
        return tensor.detach().view_as(tensor).requires_grad_()
