"""A model's forward with its loops taken out: blocks are gathered as they are called, and each loop is run as a whole.

While a loop is being gathered its blocks return tensors that do not exist yet (`pending`). At its last call everything
that its blocks were handed is known, and whoever answers for loops makes the final carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..blocks.plain import Around
from ..captures import ATOMS
from ..errors import StepError
from ..trees import Leaves, Mismatch
from .loops import BlockCall, Loop
from .pending import Pending, PendingUse


class Stage(Around):
    """A block as a stage of a chain: from one carry to the next.

    Args:
        call: the block, and how it is called; none of its parameters is copied.
        shared: for every leaf of its arguments, which of the shared tensors it is; None if it is none of them.
        values: for every leaf of its arguments, the value that it is otherwise.
    """

    def __init__(self, call: BlockCall, shared: tuple[int | None, ...], values: Leaves) -> None:
        super().__init__()
        self.block = call.block
        self._arguments, self._result = call.arguments, call.result
        self._takes, self._leaving = call.takes, call.leaving
        self._shared, self._values = shared, values
        plain = all(isinstance(value, ATOMS) for value in values)
        self.manner = (call.arguments, call.result, call.takes, call.leaving, shared, tuple(values)) if plain else None

    def forward(self, carry: tuple[Tensor, ...], *shared: Tensor) -> tuple[Tensor, ...]:
        """The next carry."""
        leaves = list(self._values)
        for place, (taken, given) in enumerate(zip(self._takes, self._shared, strict=True)):
            if taken is not None:
                leaves[place] = carry[taken]
            elif given is not None:
                leaves[place] = shared[given]
        args, kwargs = self._arguments.build(leaves)
        made = self._result.flatten(nn.Module.__call__(self.block, *args, **kwargs))
        return tuple(made[place] for place in self._leaving)


@dataclass
class Gathered:
    """A loop whose blocks have all been called.

    Attributes:
        loop: what it is.
        carry: what enters the first block.
        shared: tensors that blocks take beside, each once.
        stages: the blocks.
        own: the first block's own answer to its call.
    """

    loop: Loop
    carry: tuple[Tensor, ...] = ()
    shared: list[Tensor] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    own: Callable[[], Any] = lambda: None

    def finals(self, result: Any) -> list[Tensor]:
        """The final carry in what the last block returned."""
        last = self.loop.calls[-1]
        leaves = last.result.flatten(result)
        return [leaves[place] for place in last.leaving]


class Gathering:
    """An observer that gathers loops, and asks `answer` for the final carry of each.

    Args:
        loops: in the order of their calls.
        answer: from a gathered loop to its final carry.
    """

    def __init__(self, loops: Sequence[Loop], answer: Callable[[int, Gathered], Sequence[Tensor]]) -> None:
        self._loops, self._answer = loops, answer
        self._blocks = {id(call.block) for loop in loops for call in loop.calls}
        self._number = 0
        self._handed: tuple[Tensor, ...] = ()  # the carry that enters the next block
        self._gathered: Gathered | None = None

    @property
    def finished(self) -> bool:
        """Whether all loops have been run."""
        return self._number == len(self._loops)

    def call(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `seams.Observer`."""
        if id(module) not in self._blocks:
            return own(*args, **kwargs)
        if self.finished:
            raise _otherwise(module)
        loop = self._loops[self._number]
        if self._gathered is None:
            self._gathered = Gathered(loop, own=lambda: own(*args, **kwargs))
        gathered = self._gathered
        place = len(gathered.stages)
        call = loop.calls[place]
        if call.block is not module:
            raise _otherwise(module)
        given = self._given(call, (args, kwargs))
        if place == 0:
            entering = {taken: leaf for taken, leaf in zip(call.takes, given, strict=True) if taken is not None}
            gathered.carry = tuple(entering[number] for number in range(len(entering)))
        gathered.stages.append(_stage(call, given, gathered.shared))
        if place + 1 < len(loop.calls):
            made = _pending(call, given)
            self._handed = tuple(made[k] for k in call.leaving)
            return call.result.build(made)
        self._gathered, self._handed = None, ()
        final = self._answer(self._number, gathered)
        self._number += 1
        return call.result.build(_final(call, final))

    def _given(self, call: BlockCall, arguments: Any) -> Leaves:
        """The leaves of what a block is handed.

        Raises:
            PendingUse: it is handed what another block is to make, elsewhere than it was in the trial.
            StepError: it is called in another way than in the trial.
        """
        try:
            given = call.arguments.flatten(arguments)
        except Mismatch as error:
            raise StepError(
                f"{type(call.block).__name__} is called in another way than in the trial: {error}"
            ) from None
        for taken, leaf in zip(call.takes, given, strict=True):
            expected = self._handed[taken] if taken is not None and self._handed else None
            if isinstance(leaf, Pending) and leaf is not expected:
                raise PendingUse(leaf.maker, type(call.block).__name__)
            if expected is not None and leaf is not expected:
                raise _otherwise(call.block)
        return given


def _otherwise(module: nn.Module) -> StepError:
    return StepError(
        f"the model calls {type(module).__name__} elsewhere in its order of blocks than it did in the trial, so what "
        "was planned does not fit; fit does not take models whose blocks are chosen anew in each call"
    )


def _stage(call: BlockCall, given: Leaves, shared: list[Tensor]) -> Stage:
    numbers = {id(tensor): number for number, tensor in enumerate(shared)}
    places: list[int | None] = []
    values: Leaves = []
    for taken, leaf in zip(call.takes, given, strict=True):
        is_shared = taken is None and isinstance(leaf, Tensor)
        values.append(None if isinstance(leaf, Tensor) else leaf)
        if is_shared and id(leaf) not in numbers:
            numbers[id(leaf)] = len(shared)
            shared.append(leaf)
        places.append(numbers[id(leaf)] if is_shared else None)
    return Stage(call, tuple(places), values)


def _pending(call: BlockCall, given: Leaves) -> Leaves:
    """What a block returns while its loop is gathered."""
    made: dict[int, Tensor] = {}
    leaves: Leaves = []
    for like in call.gives:
        if isinstance(like, Tensor):
            leaves.append(made.setdefault(id(like), Pending.like(like, call.block)))
        else:
            leaves.append(like[0] if isinstance(like, tuple) else given[like])
    return leaves


def _final(call: BlockCall, final: Sequence[Tensor]) -> Leaves:
    """What the last block returns: every tensor of its result is part of the final carry."""
    leaves: Leaves = [like[0] if isinstance(like, tuple) else None for like in call.gives]
    for place, source in enumerate(call.sources):
        if source is not None:
            leaves[place] = final[source]
    return leaves
