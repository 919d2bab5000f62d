"""How functions are compiled: once per machine, for one list of types each, and for little time.

Left to itself numba compiles a function again for every mixture of constants and variables that is passed, and for
every one a way in from Python. Most of the time goes into functions that make arrays, so none does: their callers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

types: Final[Any] = numba.types
INT: Final[Any] = types.int64
BOOL: Final[Any] = types.boolean
LIST: Final[Any] = INT[::1]
ROWS: Final[Any] = INT[:, ::1]


def compiled(result: Any, *arguments: object, inner: bool = True) -> Callable[[Function], Function]:
    """Compile for these types only; what only other compiled functions call (`inner`) gets no way in from Python.

    Numba keeps the result in the directory that NUMBA_CACHE_DIR names, beside the source, or in the user's cache.
    """
    signature = result(*arguments)
    options = {"error_model": "numpy", "no_cpython_wrapper": inner, "no_cfunc_wrapper": True}
    jit: Any = numba.njit

    def compile_it(function: Function) -> Function:
        try:
            return cast(Function, jit(signature, cache=True, **options)(function))
        except RuntimeError:  # none of the three can be written: compiled anew in every process
            return cast(Function, jit(signature, **options)(function))

    return compile_it
