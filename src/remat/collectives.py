"""Steps that communicate: processes that run one together must run the same steps in the same order.

Otherwise one would wait in a collective that the others do not call. So what a plan follows from is agreed upon: the
processes that are seen to communicate in a step measure it all together or not at all, and plan for the greatest of
what they find. What tells that a step communicates are the sequence numbers of the process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from .chains import Chain, Stage, Tape

_SIZES = {
    kind: tuple(name for name in kind.__struct_fields__ if name.endswith("_bytes")) for kind in (Chain, Stage, Tape)
}


def calls_so_far() -> dict[str, int]:
    """How many collectives every process group has seen, by name."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    return {name: group._get_sequence_number_for_group() for group, name in _world().pg_names.items()}


def groups_used(before: dict[str, int]) -> tuple[str, ...]:
    """The names of the groups that have been used since, in the same order everywhere."""
    return tuple(sorted(name for name, count in calls_so_far().items() if count > before.get(name, 0)))


def greatest(groups: Sequence[str], numbers: Sequence[int]) -> list[int]:
    """The greatest of each number among the processes of the groups; all of them must ask."""
    group_of = {name: group for group, name in _world().pg_names.items()}
    for name in groups:
        group = group_of[name]
        device = torch.device("cpu")
        if torch.distributed.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        sent = torch.tensor(numbers, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, group=group)
        numbers = sent.tolist()
    return list(numbers)


def agreed_chain(groups: Sequence[str], chain: Chain) -> Chain:
    """The chain with the greatest sizes among the processes, and no seconds: those differ."""
    stages = [stage for stage, _ in chain.runs]
    parts: list[Any] = [chain, *stages, *(tape for stage in stages for tape in stage.menu)]
    sizes = iter(greatest(groups, [getattr(part, name) for part in parts for name in _SIZES[type(part)]]))
    chain, *rest = [
        msgspec.structs.replace(part, **{name: next(sizes) for name in _SIZES[type(part)]}) for part in parts
    ]
    tapes = iter(rest[len(stages) :])
    runs = [
        (_without_clock(stage, tuple(next(tapes) for _ in stage.menu)), count)
        for stage, (_, count) in zip(rest[: len(stages)], chain.runs, strict=True)
    ]
    return msgspec.structs.replace(chain, runs=tuple(runs))


def _without_clock(stage: Stage, menu: tuple[Tape, ...]) -> Stage:
    timeless = tuple(msgspec.structs.replace(tape, forward_s=1.0, backward_s=2.0) for tape in menu)
    return msgspec.structs.replace(stage, menu=timeless, forward_s=1.0)


def _world() -> Any:
    return torch.distributed.distributed_c10d._world
