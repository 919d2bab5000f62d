"""`remat.Sequential`: `nn.Sequential` with a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .chain import chain, plan_chain
from .plans import Plan


class Sequential(nn.Sequential):
    """`nn.Sequential`, trained inside a memory budget: the same keys, the same methods, the same results bit for bit.

    Args:
        modules: the modules, or one `OrderedDict` of them.
        budget, planner, check: as in `remat.chain`.
    """

    def __init__(
        self,
        *modules: nn.Module | OrderedDict[str, nn.Module],
        budget: int | str | None = None,
        planner: str = "auto",
        check: bool = False,
    ) -> None:
        super().__init__(*modules)  # type: ignore[arg-type]  # as people call it
        self.budget, self.planner, self.check = budget, planner, check

    def forward(self, input: Any) -> Any:
        """Every module on what the one before has returned."""
        return chain(self, input, budget=self.budget, planner=self.planner, check=self.check)

    def plan(self, input: Any) -> Plan:
        """The plan that `forward` runs on such an input."""
        return plan_chain(self, input, budget=self.budget, planner=self.planner)

    def extra_repr(self) -> str:
        """The budget, in print."""
        return f"budget={self.budget!r}"

    def _of(self, modules: Iterable[nn.Module]) -> Sequential:
        return Sequential(*modules, budget=self.budget, planner=self.planner, check=self.check)

    def __getitem__(self, index: slice | int) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        named = OrderedDict(list(self._modules.items())[index])
        return Sequential(named, budget=self.budget, planner=self.planner, check=self.check)

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        return self._of([*self, *other])

    def __mul__(self, times: int) -> Sequential:
        return self._of([*self] * len(range(times)))
