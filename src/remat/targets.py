"""What a command is about when it is the user's own: MODULE:FUNCTION, and the inputs that it is called with."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import typer

if TYPE_CHECKING:
    import torch

_INPUT: Final = re.compile(r"(?P<shape>\d+(?:[x,]\d+)*)(?::(?P<dtype>\w+))?")
FORM: Final = "8x3x32x32 or 8,128:int64"


class Input(NamedTuple):
    """What to call a model with.

    Attributes:
        shape: of the tensor.
        dtype: by its name in torch.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def tensor(self, device: str = "cpu") -> torch.Tensor:
        """Such a tensor: of normal random numbers, or of zeros where it is of integers, as indices may not be large.

        Its numbers come from a generator of its own, so that the random stream is left as it was.
        """
        import torch

        dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point or device == "meta":
            return torch.zeros(self.shape, dtype=dtype, device=device)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def __str__(self) -> str:
        """As it is written."""
        shape = "x".join(map(str, self.shape))
        return shape if self.dtype == "float32" else f"{shape}:{self.dtype}"


def parse_input(text: str) -> Input:
    """A shape, its sizes separated by x or commas, and after a colon the dtype if that is not float32."""
    import torch

    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"must be a shape like {FORM}, not {text!r}")
    dtype = match["dtype"] or "float32"
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise typer.BadParameter(f"{text!r} names no dtype of torch after its colon; int64 is one")
    return Input(tuple(map(int, re.split("[x,]", match["shape"]))), dtype)


def load(target: str, device: str = "cpu") -> Any:
    """What MODULE:FUNCTION returns; a module is found as Python finds it, the current directory included.

    Args:
        target: the module, or the path of its file, and after the colon the name of a function without arguments,
            perhaps of an attribute of something, or of what is wanted itself.
        device: where tensors are made that say nothing else.
    """
    import torch

    module, _, name = target.rpartition(":")
    if not module or not name:
        raise typer.TyperException(f"{target!r} must be MODULE:FUNCTION, or FILE.py:FUNCTION")
    try:
        found: Any = _module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, OSError) as error:
        raise typer.TyperException(f"{target}: {error}") from None
    if isinstance(found, torch.nn.Module) or not callable(found):
        return found
    with torch.device(device):
        return found()


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return import_module(name)
        finally:
            sys.path.remove("")
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where pickle and inspect look for it
    spec.loader.exec_module(module)
    return module
