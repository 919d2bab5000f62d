"""Which places of a carry may hold one storage from step to step, so that a change in place shows elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from .trees import Leaves


class Aliases:
    """What a step does with storages, place by place, as far as it was seen.

    A place is *overwritten later* if a step changes what lies there, or in a place that this is handed on to or shares
    its storage with.

    Attributes:
        handed: (from, to), places of the carry before and after a step that hold one storage.
        shared: pairs of places of the carry after a step that do.
        returned: places after a step whose storage is an output's.
        read: places before a step whose storage is an output's.
        foreign: places after a step that hold an input, or a tensor from outside of the loop.
    """

    def __init__(self) -> None:
        self.handed: set[tuple[int, int]] = set()
        self.shared: set[tuple[int, int]] = set()
        self.returned: set[int] = set()
        self.read: set[int] = set()
        self.foreign: set[int] = set()

    def note(self, before: Leaves, after: Leaves, outputs: Leaves, outside: Iterable[torch.Tensor]) -> None:
        """Look at one step: its carry before and after, its outputs, its inputs and what is outside."""
        old, new = [_storage(leaf) for leaf in before], [_storage(leaf) for leaf in after]
        emitted, others = ({_storage(leaf) for leaf in leaves} - {None} for leaves in (outputs, outside))
        self.handed |= {(p, q) for p, one in enumerate(old) for q, other in enumerate(new) if one and one == other}
        self.shared |= {(p, q) for p, one in enumerate(new) for q, other in enumerate(new) if one and one == other}
        self.returned |= {place for place, storage in enumerate(new) if storage in emitted}
        self.read |= {place for place, storage in enumerate(old) if storage in emitted}
        self.foreign |= {place for place, storage in enumerate(new) if storage in others}

    def overwritten(self, changed: Collection[int]) -> set[int]:
        """Places after a step of which a later step changes the storage, if every step changes what is in `changed`."""
        found, links = set(changed), self.handed | self.shared
        while more := {place for place, to in links if to in found} - found:
            found |= more
        return found

    def spoil_outputs(self, changed: Collection[int]) -> bool:
        """Whether later steps change outputs."""
        found = self.overwritten(changed)
        held = self.read | {place for place, other in self.shared if other in self.read}
        return bool(self.returned & found) or any(place in held and to in found for place, to in self.handed)


def _storage(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return int(leaf.untyped_storage()._cdata)
    return None
