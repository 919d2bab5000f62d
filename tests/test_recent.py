"""What is remembered: the latest results, each made once."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.recent import Recent


@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=30))
def test_the_latest_are_kept_and_made_once(most: int, asked: list[int]) -> None:
    recent: Recent[int, int] = Recent(most)
    latest: list[int] = []
    made: list[int] = []
    expected: list[int] = []
    for key in asked:

        def make(key: int = key) -> int:
            made.append(key)
            return -key

        assert recent.recall(key, make) == -key
        if key in latest:
            latest.remove(key)
        else:
            expected.append(key)
        latest = [*latest, key][-most:]
        assert list(recent) == latest
    assert made == expected


def test_what_fails_is_made_again() -> None:
    recent: Recent[str, int] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        recent.recall("a", lambda: 1 // 0)
    assert recent == OrderedDict()
    assert recent.recall("a", lambda: 3) == 3
