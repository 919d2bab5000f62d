"""How tensors lie in memory: contiguous, or with channels last where a step convolves.

oneDNN convolves with channels last without rearranging anything on the way. A 3×3 convolution of 12 channels to 32 on
16×16 takes half the time for its weight's gradient then, and none of the memory for rearranged copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import fx

from .graphs import aten, name_of, value_of


def format_of(value: torch.Tensor) -> torch.memory_format:
    """The layout of memory for a value: channels last if they are so in it, otherwise contiguous."""
    last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value in the layout of another one of its shape: itself, or a copy."""
    return value.contiguous(memory_format=format_of(like))


def in_layout(graph: fx.Graph, node: fx.Node, layout: torch.memory_format) -> fx.Node:
    """A node's value in a layout: itself, or a copy behind it."""
    if format_of(value_of(node)) is layout:
        return node
    made = graph.call_function(aten.clone.default, (node,), {"memory_format": layout})
    made.meta["val"] = value_of(node).clone(memory_format=layout)
    return made


def blank(value: torch.Tensor) -> torch.Tensor:
    """Fresh memory for a value, in its layout."""
    return torch.empty_like(value, memory_format=format_of(value), requires_grad=False)


def stacking(value: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Makes fresh memory for such a value of so many steps, time first, each in its layout."""
    new, shape = torch.empty(0, dtype=value.dtype, device=value.device).new_empty, tuple(value.shape)
    if format_of(value) is torch.contiguous_format:
        return lambda steps: new((steps, *shape))
    batch, channels, height, width = shape
    return lambda steps: new((steps, batch, height, width, channels)).permute(0, 1, 4, 2, 3)


def with_channels_last(value: Any) -> bool:
    """Whether a value has channels that could lie last."""
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[1] > 1 and value[0, 0].numel() > 1


def convolves(nodes: Iterable[fx.Node]) -> bool:
    """Whether there is a convolution that runs faster with channels last: one by oneDNN, larger than 1×1."""
    return torch._C._has_mkldnn and any(
        name_of(node) == "aten.convolution.default"
        and value_of(node).dim() == 4
        and value_of(node).device.type == "cpu"
        and value_of(node).dtype is torch.float32
        and value_of(node.args[1])[0, 0].numel() > 1  # type: ignore[arg-type]
        for node in nodes
    )


def lay_out_weights(graph: fx.Graph, outside: set[fx.Node]) -> None:
    """Give convolutions weights with channels last: the copies are the same in every step, so they are made once."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        place = _WEIGHT.get(name_of(node))
        if place is None or node.args[place] not in outside or not with_channels_last(value_of(node.args[place])):
            continue
        weight = node.args[place]
        if weight not in copies:
            with graph.inserting_after(next(n for n in reversed(graph.nodes) if n.op == "placeholder")):
                made = graph.call_function(aten.clone.default, (weight,), {"memory_format": torch.channels_last})
            made.meta["val"] = value_of(weight).clone(memory_format=torch.channels_last)
            copies[weight] = made
        node.update_arg(place, copies[weight])


_WEIGHT: Final = {"aten.convolution.default": 1, "aten.convolution_backward.default": 2}
