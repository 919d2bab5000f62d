"""One call of `chain`, taken apart: blocks, carry, what they share, what is known of them, and the plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec
import torch

from ..ambient import Surroundings
from ..apart import by_itself
from ..budgets import agreed_budget_bytes
from ..chains import Chain, Stage
from ..gauges import OnDevice
from ..plans import Plan, plan
from ..recent import Recent
from ..recorded import needs_gradient, places_of
from ..streams import random_sources
from ..sums import Captured
from ..trees import Leaves, Structure
from .block import Block, Blocks
from .survey import Known, survey, used_by

_PLANS: Final = 256
_SCALARS: Final = 8  # bytes: a node's token, the scalar that a range begins with
_plans: Recent[Hashable, Plan] = Recent(_PLANS)


class ChainCall:
    """One call of chain.

    Attributes:
        blocks: the blocks.
        structure, carry: of carry 0.
        arguments, keywords: what every block takes beside its carry.
        shared: tensors among those that need a gradient.
        captured: all tensors whose gradients are asked for beside the carry's.
        used: by block the numbers of those it may use.
        summed: ids of those that several blocks may use, so that their gradients are sums over blocks.
        streams: random streams that blocks may draw from.
        device: whose memory counts.
        made_bytes: bytes of carry 0 if it was made within the call.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | Block],
        carry: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        check: bool = False,
        missed: Sequence[torch.Tensor] = (),
    ) -> None:
        self.blocks = [each if isinstance(each, Block) else Block(each) for each in functions]
        self.structure = Structure(carry)
        self.carry = self.structure.flatten(carry)
        self.carry_places = places_of(self.carry)
        self.arguments, self.keywords, self.check = arguments, keywords, check
        self.made_bytes = 0
        around = Structure((arguments, keywords)).flatten((arguments, keywords))
        reached = [tensor for tensor in around if isinstance(tensor, torch.Tensor)]
        unique = {id(tensor): tensor for tensor in (*reached, *missed) if tensor.requires_grad}
        self.shared = list(unique.values())
        tensors = [leaf for leaf in self.carry if isinstance(leaf, torch.Tensor)] + reached
        devices = {tensor.device for tensor in tensors}.union(*(block.devices for block in self.blocks))
        self.device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self.surroundings = Surroundings({device.type for device in devices})
        self.streams = random_sources(devices, [g for block in self.blocks for g in block.generators])
        self._number()

    def _number(self) -> None:
        number_of: dict[int, int] = {}
        several = set(map(id, self.shared))
        for block in self.blocks:
            ids = {id(tensor) for tensor in block.captured}
            several.update(ids & number_of.keys())
            number_of.update(dict.fromkeys(ids, 0))
        self.summed = frozenset(several)
        number_of.clear()
        self.captured: list[torch.Tensor] = []
        self.used: list[list[int]] = []
        for block in self.blocks:
            numbers = []
            for tensor in used_by(block, self.shared, self.summed) if several else block.captured:
                number = number_of.setdefault(id(tensor), len(number_of))
                if number == len(self.captured):
                    self.captured.append(tensor)
                numbers.append(number)
            self.used.append(numbers)

    @property
    def length(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    def surveyed(self, seen: Callable[[], object] = lambda: None) -> list[Known]:
        """What is known of every block, by looking at those that are new; calls `seen` after each.

        Raises:
            StepError, MissedTensors: as `survey`.
        """
        job = lambda: survey(  # noqa: E731
            self.blocks,
            self.structure,
            self.carry,
            arguments=self.arguments,
            keywords=self.keywords,
            shared=self.shared,
            summed=self.summed,
            streams=self.streams,
            surroundings=self.surroundings,
            gauge=OnDevice(self.device),
            seen=seen,
        )
        with torch.enable_grad():
            return by_itself(job, self.surroundings)

    def planned(self, known: Sequence[Known], budget: int | str | None, planner: str) -> Plan:
        """The plan within a budget, made or remembered.

        Raises:
            InfeasibleBudget: the budget is too small.
        """
        limit = agreed_budget_bytes(budget, self.device)
        chain = self.chain(known)
        return _plans.recall((chain, limit, planner), lambda: plan(chain, limit, planner))

    def chain(self, known: Sequence[Known]) -> Chain:
        """What the blocks cost in this call."""
        captured = Captured(self.captured, self.used)
        states, watching = self._state_bytes(known), self._watching_bytes()
        copies = copied_stages(known)
        last = known[-1]
        made: dict[Hashable, Stage] = {}
        stages = [
            self._stage(index, of, captured, states, watching, made, copies=copies[index])
            for index, of in enumerate(known)
        ]
        return Chain(
            tuple((stage, len(list(equal))) for stage, equal in groupby(stages)),
            final_carry_bytes=last.leaving_bytes,
            output_bytes=2 * states
            + sum(of.state_bytes for of in known)  # as before the first runs; those of now are in a block's workspace
            + _SCALARS * (self.length + 4)
            + self.made_bytes,
            output_gradient_bytes=last.leaving_bytes if any(last.leaving.needs) else 0,
        )

    def _watching_bytes(self) -> int:
        """Bytes of random states: held through a first pass to see whether anything draws from them."""
        states = [stream.get() for stream in self.streams]
        return sum(state.nbytes for state in states if isinstance(state, torch.Tensor))

    def _state_bytes(self, known: Sequence[Known]) -> int:
        """Bytes of the random states that belong to each carry."""
        drawn = frozenset[int]().union(*(of.draws for of in known))
        states = [self.streams[number].get() for number in drawn]
        return sum(state.nbytes for state in states if isinstance(state, torch.Tensor))

    def _stage(
        self,
        index: int,
        of: Known,
        captured: Captured,
        states: int,
        watching: int,
        made: dict[Hashable, Stage],
        *,
        copies: bool,
    ) -> Stage:
        """What a block costs here; `made` holds stages made before, by what they follow from."""
        stays = begun = 0
        for number, size in zip(self.used[index], of.gradients, strict=True):
            tensor = captured.tensors[number]
            summed = id(tensor) in self.summed
            if captured.last[number] == index and (summed or not tensor.is_leaf or tensor.grad is None):
                stays += size
                begun += size if summed else 0  # measured with a sum that had begun before
        key = id(of), stays, begun, index == self.length - 1, copies
        if key in made:
            return made[key]
        forward = watching * (2 if index == self.length - 1 else 1)
        menu = tuple(
            msgspec.structs.replace(
                tape,
                workspace_bytes=tape.workspace_bytes + forward,
                backward_workspace_bytes=tape.backward_workspace_bytes + begun,
            )
            for tape in of.stage.menu[: 1 if copies else None]
        )
        stage = msgspec.structs.replace(
            of.stage,
            carry_bytes=of.carry_bytes * (2 if copies else 1) + states,
            menu=menu,
            workspace_bytes=of.stage.workspace_bytes + watching,
            gradient_bytes=stays,
        )
        made[key] = _without_clock(stage) if several_processes() else stage
        return made[key]

    def stages(self, known: Sequence[Known]) -> Blocks:
        """The blocks, ready to be run."""
        changes = [block.sources_of(of.changes) for block, of in zip(self.blocks, known, strict=True)]
        functions = [block.function for block in self.blocks]
        return Blocks(functions, self.structure, changes, self.arguments, self.keywords, check=self.check)


def copied_stages(known: Sequence[Known]) -> list[bool]:
    """Which blocks change their carry in place, themselves or through a view of it that they hand on; no one after."""
    copies, after = [False] * (len(known) + 1), False
    for index in reversed(range(len(known))):
        after = known[index].copies or (known[index].aliases and after)
        copies[index] = after
    return copies


def several_processes() -> bool:
    """Whether other processes must plan the same."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _without_clock(stage: Stage) -> Stage:
    """Seconds from bytes: processes that measure other seconds must plan the same all the same."""
    tape = stage.menu[0]
    forward_s = 1e-9 * (1 + stage.carry_bytes + tape.tape_bytes)
    tape = msgspec.structs.replace(tape, forward_s=forward_s, backward_s=2 * forward_s)
    return msgspec.structs.replace(stage, menu=(tape,), forward_s=forward_s)


def in_need(leaves: Leaves) -> bool:
    """Whether anything among some leaves needs a gradient."""
    return any(map(needs_gradient, leaves))
