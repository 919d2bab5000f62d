"""How many bytes there are: budgets as people give them, and what is free on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from .errors import StepError
from .sizes import parse_bytes

_SHARE = 0.9  # of what is free, when no budget is given: the rest is for what the caller does meanwhile
_CGROUP = Path("/sys/fs/cgroup")


def budget_bytes(budget: int | str | None, device: torch.device) -> int:
    """A budget in bytes; None takes 90 % of what is free, rounded down to three binary digits so that plans repeat."""
    if budget is not None:
        return parse_bytes(budget)
    share = int(free_bytes(device) * _SHARE)
    return share & ~((1 << max(share.bit_length() - 3, 0)) - 1)


def agreed_budget_bytes(budget: int | str | None, device: torch.device) -> int:
    """The same where several processes must plan the same.

    Raises:
        StepError: there are several, and no budget.
    """
    if budget is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise StepError(
            "give budget= when there are several processes: what is free differs between them, and so would their plans"
        )
    return budget_bytes(budget, device)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on the CPU the limits of containers count."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min([int(psutil.virtual_memory().available), *_container_room()])


def _container_room() -> Iterator[int]:
    """What control groups leave, version 2 and 1, where they limit memory."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield max(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()), 0)
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
