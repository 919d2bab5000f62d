"""Hugging Face accelerate: `Accelerator.prepare` with a budget.

model, optimizer, loader = prepare(accelerator, model, optimizer, loader, budget="8GiB")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("remat.integrations.accelerate needs accelerate: remat[accelerate]") from error

from ..fit import fit


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any, budget: int | str | None = None) -> Any:
    """What `accelerator.prepare(model, *others)` returns, the model trained inside a memory budget.

    Args:
        accelerator: moves, wraps and casts as always; mixed precision and several processes are its affair.
        model: what is trained.
        others: what else to prepare: optimizer, loaders, scheduler.
        budget: as `remat.fit` takes it; None takes 90 % of what is free on the device now.
    """
    if accelerator.device_placement:
        model = model.to(accelerator.device)  # so that the budget is that of the device
    optimizers = [other for other in others if isinstance(other, torch.optim.Optimizer)]
    fit(model, budget=budget, optimizer=optimizers[0] if len(optimizers) == 1 else None)
    return accelerator.prepare(model, *others)
