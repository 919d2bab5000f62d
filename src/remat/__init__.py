"""remat: train any network inside a memory budget, at the least extra compute, bit for bit.

The public names are loaded when first used, so that planning needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .chains import Chain as Chain
    from .chains import Stage as Stage
    from .chains import Tape as Tape

_HOMES = {
    "Chain": "chains",
    "Stage": "chains",
    "Tape": "chains",
}

__all__ = ["Chain", "Stage", "Tape", "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'remat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
