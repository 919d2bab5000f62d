"""Compiled functions: where nothing can be kept on disk they still compile."""

from __future__ import annotations

import pytest
from numba.core.caching import CacheImpl

from remat.planners._compiled import INT, compiled


def test_no_directory_for_the_cache_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    @compiled(INT, INT, inner=False)
    def twice(x: int) -> int:
        return 2 * x

    assert twice(3) == 6
