"""Hugging Face: a budget for `transformers.Trainer`.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[BudgetCallback("8GiB")])

Leave `gradient_checkpointing` off: the budget decides what is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("remat.integrations.transformers needs Hugging Face's library: remat[transformers]") from error

from ..fit import fit


class BudgetCallback(TrainerCallback):  # type: ignore[misc]  # the library has no annotations
    """Trains the model inside a memory budget, from the start of training on.

    Args:
        budget: as `remat.fit` takes it: bytes for a training step of one batch and for what the optimizer has still to
            make; None takes 90 % of what is free on the device when training begins.
    """

    def __init__(self, budget: int | str | None = None) -> None:
        self.budget = budget

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit the model; a cache of keys and values, of no use in training, is turned off."""
        del args, state, control
        model: nn.Module = kwargs["model"]
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
        optimizer = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))  # accelerate wraps it
        fit(model, budget=self.budget, optimizer=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
