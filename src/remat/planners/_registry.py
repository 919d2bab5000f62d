"""Strategies by name, each the function `plan` of a module that is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def plan_of(package: str, homes: Mapping[str, str], name: str, kind: str) -> Any:
    """The function of this name; `homes` says which module of the package each lives in.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in homes:
        raise ValueError(f"no {kind} is called {name!r}; there are {', '.join(homes)}")
    return import_module(f".{homes[name]}", package).plan
