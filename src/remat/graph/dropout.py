"""Dropout as eager computes it, in parts of which the mask is one byte a number.

Tracing turns dropout into `native_dropout`. On CUDA that is what eager runs too. On the CPU eager draws a noise tensor
of zeros and 1/(1 − p), keeps it for the backward, and multiplies; `native_dropout` multiplies by a factor that may be
rounded otherwise. Here the mask is drawn as booleans from the same stream, and the noise is made from it again where it
is needed, to the same bits: a quarter of the memory, and nothing but the mask has to be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

aten = torch.ops.aten


def _noise(mask: torch.Tensor, like: torch.Tensor, kept: float) -> torch.Tensor:
    factor = (
        1 / kept if like.dtype == torch.float64 else float(np.float32(1) / np.float32(kept))
    )  # as the kernel divides
    if like.dtype == torch.get_default_dtype():
        return mask * factor  # one pass: a product of booleans with a number has the default type
    return mask.to(like.dtype) * factor


def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> Any:
    """The result and the mask, on the CPU."""
    if input.device.type != "cpu" or not train or not 0 < p < 1:
        return NotImplemented
    mask = aten.bernoulli.p(torch.empty_like(input, dtype=torch.bool), 1 - p)
    return input * _noise(mask, input, 1 - p), mask


def native_dropout_backward(grad_output: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """The gradient, on the CPU."""
    if grad_output.device.type != "cpu" or scale <= 1:
        return NotImplemented
    return grad_output * _noise(mask, grad_output, 1 / scale)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For AOTAutograd."""
    return {
        aten.native_dropout.default: native_dropout,
        aten.native_dropout_backward.default: native_dropout_backward,
    }
