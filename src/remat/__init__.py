"""remat: train any network inside a memory budget, at the least extra compute, bit for bit.

The public names are loaded when first used, so that planning needs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .ambient import is_recomputing as is_recomputing
    from .chain import chain as chain
    from .chain import plan_chain as plan_chain
    from .chains import Chain as Chain
    from .chains import Stage as Stage
    from .chains import Tape as Tape
    from .check import Check as Check
    from .check import check as check
    from .errors import FitError as FitError
    from .errors import InfeasibleBudget as InfeasibleBudget
    from .errors import RematError as RematError
    from .errors import StepError as StepError
    from .errors import UnsupportedChain as UnsupportedChain
    from .estimate import Rates as Rates
    from .explain import Explanation as Explanation
    from .explain import explain as explain
    from .fit import fit as fit
    from .meter import Measurement as Measurement
    from .meter import measure as measure
    from .plans import Plan as Plan
    from .plans import plan as plan
    from .profiling import profile as profile
    from .recurrent import recurrent as recurrent
    from .scan import plan_scan as plan_scan
    from .scan import scan as scan
    from .sequential import Sequential as Sequential
    from .tradeoff import tradeoff as tradeoff

_HOMES: Final = {
    "explain": "explain",
    "is_recomputing": "ambient",
    "Chain": "chains",
    "Check": "check",
    "Explanation": "explain",
    "FitError": "errors",
    "InfeasibleBudget": "errors",
    "Measurement": "meter",
    "Plan": "plans",
    "Rates": "estimate",
    "RematError": "errors",
    "Sequential": "sequential",
    "Stage": "chains",
    "StepError": "errors",
    "Tape": "chains",
    "UnsupportedChain": "errors",
    "chain": "chain",
    "check": "check",
    "fit": "fit",
    "measure": "meter",
    "plan": "plans",
    "profile": "profiling",
    "plan_chain": "chain",
    "plan_scan": "scan",
    "recurrent": "recurrent",
    "scan": "scan",
    "tradeoff": "tradeoff",
}

__all__ = [
    "Chain",
    "Check",
    "Explanation",
    "FitError",
    "InfeasibleBudget",
    "Measurement",
    "Plan",
    "Rates",
    "RematError",
    "Sequential",
    "Stage",
    "StepError",
    "Tape",
    "UnsupportedChain",
    "__version__",
    "chain",
    "check",
    "explain",
    "fit",
    "is_recomputing",
    "measure",
    "plan",
    "plan_chain",
    "plan_scan",
    "profile",
    "recurrent",
    "scan",
    "tradeoff",
]


class _Package(ModuleType):
    """This package as a module.

    Importing a submodule makes it an attribute of its package. Where a public name is called like its home
    (`remat.scan` lives in `remat/scan.py`), the name people call has to win, whoever imported the submodule first.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value
    raise AttributeError(f"module 'remat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
