"""State outside the carry is put back without a moment in which other threads would find it missing."""

from collections import deque
from typing import Any

import pytest
import torch

from remat.captures import Reached
from remat.mutable import mutable_sources


class Guarded(dict[str, Any]):
    def clear(self) -> None:
        raise AssertionError("emptied, although its keys are those that were kept")


class GuardedDeque(deque[int]):
    def clear(self) -> None:
        raise AssertionError("emptied, although nothing had changed")


class GuardedSet(set[int]):
    def clear(self) -> None:
        raise AssertionError("emptied, although nothing had changed")


class Holder:
    def __init__(self) -> None:
        self.count, self.other = 0, object()


@pytest.mark.parametrize("value", [Guarded(a=1, b=[2]), GuardedDeque([1, 2]), GuardedSet({1, 2}), [1, 2]])
def test_what_has_not_changed_is_left_alone(value: Any) -> None:
    (source,) = mutable_sources(Reached(changeable=[value]))
    source.set(source.get())


def test_only_what_differs_is_put_back() -> None:
    guarded = Guarded(a=1, b=2)
    (source,) = mutable_sources(Reached(changeable=[guarded]))
    kept = source.get()
    guarded["b"] = 3
    source.set(kept)
    assert guarded == {"a": 1, "b": 2}


def test_the_order_of_keys_is_put_back() -> None:
    value = {"a": 1, "b": 2}
    (source,) = mutable_sources(Reached(changeable=[value]))
    kept = source.get()
    value["a"] = value.pop("a")
    source.set(kept)
    assert list(value) == ["a", "b"]


def test_new_names_go_again() -> None:
    holder = Holder()
    (source,) = mutable_sources(Reached(changeable=[holder]))
    kept = source.get()
    holder.count, holder.new = 5, torch.ones(1)  # type: ignore[attr-defined]
    source.set(kept)
    assert vars(holder) == kept
