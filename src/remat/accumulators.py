"""Gradient accumulators of leaves are kept while a call lasts, so that threads that share weights cannot block.

From PyTorch 2.10 on, making a leaf's `AccumulateGrad` holds the leaf's mutex while it waits for the GIL, if the
operator that needs it has let the GIL go; `Function.apply` in another thread waits for that mutex and holds the GIL.
Neither goes on. `apply` itself makes accumulators with the GIL in hand, which is safe, and where one exists nobody
waits: so each call first makes those of all tensors it knows, and keeps them until its own node does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class _Keeper(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *_leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing flows through what only keeps accumulators")


def keep_accumulators(tensors: Iterable[torch.Tensor]) -> object:
    """The accumulators of those tensors that are leaves and need a gradient live as long as what this returns."""
    leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
    if not leaves or not torch.is_grad_enabled():
        return None
    return _Keeper.apply(*leaves)  # type: ignore[no-untyped-call]
