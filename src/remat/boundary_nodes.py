"""The autograd nodes at both ends of a recorded graph, made with as little ado as can be, as every range has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch


class autograd_on:  # noqa: N801  # a context, and there is one around every range
    """`torch.enable_grad` for the body of a `with`, without its checks, which take longer than an operator."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What applies a function: `Function.apply`, without what that does for the tensors of `torch.func` if it can.

    Looking for these takes 3 µs a time. They are there while a transform is at work, and where PyTorch does not say
    whether one is, or keeps its own `apply` elsewhere, the public one is called.
    """
    public: Callable[..., Any] = function.apply
    plain = getattr(super(torch.autograd.Function, function), "apply", None)
    is_transforming = getattr(torch._C, "_are_functorch_transforms_active", None)
    if plain is None or is_transforming is None:
        return public

    def apply(*inputs: Any) -> Any:
        return public(*inputs) if is_transforming() else plain(*inputs)

    return apply


class Enter(torch.autograd.Function):
    """Aliases of tensors as outputs of one node, where gradients of a range come out; it never runs backward."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, needs: Sequence[bool], *leaves: torch.Tensor) -> Any:
        aliases = tuple([leaf.detach() for leaf in leaves])
        if not all(needs):
            ctx.mark_non_differentiable(*(a for a, need in zip(aliases, needs, strict=True) if not need))
        return aliases

    @staticmethod
    def backward(_ctx: Any, *_: torch.Tensor) -> Any:
        raise AssertionError("the engine stops at the edges of this node")


class Resume(torch.autograd.Function):
    """Applied last, run first: gives each tensor the gradient that its sum starts with."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], anchor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        ctx.set_materialize_grads(False)
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.box)
        ctx.box.clear()  # what only the engine holds can be added to in place
        return None, None, *gradients


enter: Final = applied(Enter)
_resume: Final = applied(Resume)


class Resumption:
    """Hands sums of gradients in before all else: a node newer than those of the graphs that it is used with.

    It can be used again and again, for any graph whose nodes are older.

    Args:
        anchor: a tensor that needs a gradient.
        tensors: what the sums are of.

    Attributes:
        root: what makes it run, as a root of a backward.
        sequence: the sequence number of its node.
    """

    __slots__ = ("_box", "root", "sequence")

    def __init__(self, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._box: list[torch.Tensor | None] = []
        self.root: torch.Tensor = _resume(self._box, anchor, *tensors)
        node: Any = self.root.grad_fn
        self.sequence: int = node._sequence_nr()

    def give(self, sums: Sequence[torch.Tensor | None]) -> bool:
        """Fill in what it hands in, just before the backward, which empties it; whether there is anything."""
        if all(each is None for each in sums):
            return False
        self._box[:] = sums
        return True
