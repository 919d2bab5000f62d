"""Tensors that do not exist yet: what blocks hand on to each other while their loop is only being gathered.

They know shape, type and device, as code between blocks may ask for them. Any other use means that somebody beside the
next block wants the value, so that the loop is not one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn


class PendingUse(Exception):  # becomes a cut of the loop, or a sentence to the user
    """A value that does not exist yet was used outside of the blocks.

    Attributes:
        maker: the block that will make it.
    """

    def __init__(self, maker: nn.Module, user: str) -> None:
        self.maker = maker
        super().__init__(f"{user} uses the result of a {type(maker).__name__} beside the next block")


_ATTRIBUTES: Final = (
    *("shape", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
    *("ndim", "requires_grad", "itemsize", "nbytes", "is_mkldnn", "is_mps", "is_xpu"),
)
_METHODS: Final = (
    *("size", "dim", "numel", "nelement", "ndimension", "element_size", "stride", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "__len__"),
)
_METADATA: Final = frozenset(
    {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {getattr(Tensor, name) for name in _METHODS}
)


class Pending(Tensor):
    """A tensor to come, by its description alone."""

    maker: nn.Module

    @staticmethod
    def like(example: Tensor, maker: nn.Module) -> Pending:
        """What a block will return in place of `example`."""
        made: Any = Tensor._make_wrapper_subclass(
            Pending,
            example.shape,
            strides=example.stride(),
            dtype=example.dtype,
            device=example.device,
            requires_grad=example.requires_grad,
        )
        made.maker = maker
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pending(of a {type(self.maker).__name__})"

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Pending):
                raise PendingUse(leaf.maker, getattr(func, "__qualname__", str(func)))
        raise AssertionError("torch asks us for the sake of a pending argument")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Pending):
                raise PendingUse(leaf.maker, str(func))
        raise AssertionError("torch asks us for the sake of a pending argument")
