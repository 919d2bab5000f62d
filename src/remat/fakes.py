"""Functions and values with fake tensors for their own: what they would do can be looked at, and nothing runs."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .blocks.block import Block
from .errors import StepError
from .trees import leaves_of


class Fakes:
    """Fake tensors for real ones, the same for the same."""

    def __init__(self, mode: FakeTensorMode, device_type: str) -> None:
        # Autograd cannot run on fake tensors of a device that this build of PyTorch lacks: then the CPU stands in.
        here = device_type == "cpu" or torch.cuda.is_available()
        self._mode, self._device = mode, device_type if here else "cpu"
        self._memo: dict[int, Any] = {}  # as copy.deepcopy takes it
        self._originals: list[Any] = []  # which it refers to by number only

    def take(self, functions: Sequence[Callable[..., Any]], others: Any) -> None:
        """Make the fakes of all tensors in sight."""
        for tensor in (leaf for leaf in leaves_of(others) if isinstance(leaf, torch.Tensor)):
            self._take(tensor)
        for function in functions:
            for tensor in Block(function).tensors:
                self._take(tensor)

    def _take(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._memo:
            self._originals.append(tensor)
            self._memo[id(tensor)] = self._fake(tensor)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like it; on the device that is planned for where the tensor is on none."""
        if tensor.layout is not torch.strided:
            raise StepError(f"a tensor of layout {tensor.layout} cannot be worked out on paper; profile on the device")
        device = self._device if tensor.device.type == "meta" else tensor.device
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = torch.empty_like(made)
        return made

    def copy(self, value: Any) -> Any:
        """A value with its tensors replaced; a function with those that it closes over."""
        if isinstance(value, types.FunctionType):
            return self._copy_of_function(value)
        try:
            return copy.deepcopy(value, self._memo)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise StepError(
                f"{type(value).__name__} cannot be copied ({error}), so it cannot be worked out on paper; profile it "
                "on its device"
            ) from None

    def _copy_of_function(self, function: types.FunctionType) -> types.FunctionType:
        made: types.FunctionType | None = self._memo.get(id(function))
        if made is None:
            cells = tuple(types.CellType() for _ in function.__closure__ or ())
            made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
            self._memo[id(function)] = made
            self._originals.append(function)
            made.__defaults__ = self.copy(function.__defaults__)
            made.__kwdefaults__ = self.copy(function.__kwdefaults__)
            for cell, old in zip(cells, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # it has nothing in it yet
                    cell.cell_contents = self.copy(old.cell_contents)
        return made
