"""The latest results of something dear, by key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """So many results at most: those that were asked for least recently are forgotten first.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def recall(self, key: Key, make: Callable[[], Value], will_do: Callable[[Value], bool] = lambda _: True) -> Value:
        """What is remembered and will do, or is made and remembered from now on; what making it raises is not."""
        found = self.get(key, self)  # itself: nothing, also if another thread forgets it meanwhile
        value = cast("Value", found)
        if found is self or not will_do(value):
            value = make()
        self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remember a result."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)
