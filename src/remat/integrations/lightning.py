"""Lightning: a budget for `lightning.Trainer`.

trainer = Trainer(callbacks=[BudgetCallback("8GiB", module="model")])
"""

from __future__ import annotations

from typing import Any

from torch import nn

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError("remat.integrations.lightning needs Lightning: remat[lightning]") from error

from ..errors import FitError
from ..fit import fit


class BudgetCallback(Callback):  # type: ignore[misc]  # seen without its annotations
    """Trains a module inside a memory budget, from the start of training on.

    Args:
        budget: as `remat.fit` takes it; None takes 90 % of what is free on the device when training begins.
        module: which attribute of the `LightningModule` its training step calls; None: its only child that has
            parameters.
    """

    def __init__(self, budget: int | str | None = None, module: str | None = None) -> None:
        self.budget, self.module = budget, module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fit the module; its optimizers' state counts."""
        optimizers = trainer.optimizers
        fit(self._module(pl_module), budget=self.budget, optimizer=optimizers[0] if len(optimizers) == 1 else None)

    def _module(self, owner: nn.Module) -> nn.Module:
        if self.module is not None:
            return owner.get_submodule(self.module)
        children = {name: child for name, child in owner.named_children() if any(True for _ in child.parameters())}
        if len(children) != 1:
            raise FitError(
                f"{type(owner).__name__} has {len(children)} children with parameters ({', '.join(children)}); say "
                "which one the training step calls: BudgetCallback(budget, module=...)"
            )
        return next(iter(children.values()))
