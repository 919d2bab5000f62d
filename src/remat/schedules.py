"""A schedule: a flat stream of actions over a chain, to be executed, simulated, printed or saved.

The six actions are frozen values. At any moment there is at most one *live* carry (where the forward stands), some
carries in slots, some recorded ranges with their tapes, and, once backward has begun, one adjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO

import msgspec


class Advance(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`Advance(i, j)` is read as: run stages i … j−1 from the live carry i, keeping no tape; carry j is live after."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"advance {self.start} → {self.stop}"


class Store(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`Store(i)` is read as: put the live carry i into a slot; it stays live."""

    at: int

    def __str__(self) -> str:
        return f"store {self.at}"


class Load(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`Load(i)` is read as: make carry i live: from its slot, the end of a recorded range, or the caller (i = 0)."""

    at: int

    def __str__(self) -> str:
        return f"load {self.at}"


class Drop(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`Drop(i)` is read as: empty the slot of carry i."""

    at: int

    def __str__(self) -> str:
        return f"drop {self.at}"


class Record(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`Record(i, j, e)` is read as: run stages i … j−1 from the live carry i as one autograd graph with menu entry e.

    Their tapes are kept, carry j is live after, and can be loaded again for as long as the range is kept.
    """

    start: int
    stop: int
    entry: int = 0

    def __str__(self) -> str:
        return f"record {self.start} → {self.stop}" + (f" as entry {self.entry}" if self.entry else "")


class Backward(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`Backward(i, j)` is read as: consume the range recorded from i to j, newest stage first.

    Needs the adjoint of carry j; the adjoint of carry i comes out. No carry is live after.
    """

    start: int
    stop: int

    def __str__(self) -> str:
        return f"backward {self.stop} → {self.start}"


Action = Advance | Store | Load | Drop | Record | Backward


class Schedule:
    """Actions that can be iterated any number of times, made anew each time, never held as a list unless given as one.

    Args:
        length: how many stages the chain has.
        planner: the name of the planner that made it.
        actions: a tuple of actions, or a function that returns a fresh iterator over them.
    """

    __slots__ = ("_actions", "length", "planner")

    def __init__(self, length: int, planner: str, actions: Iterable[Action] | Callable[[], Iterator[Action]]) -> None:
        self.length = length
        self.planner = planner
        self._actions = actions if callable(actions) else tuple(actions)

    def __iter__(self) -> Iterator[Action]:
        return self._actions() if callable(self._actions) else iter(self._actions)

    def __repr__(self) -> str:
        return f"Schedule(length={self.length}, planner={self.planner!r})"

    def text(self, limit: int | None = None) -> str:
        """One action a line with its position; at most `limit` lines and a note that there is more."""
        stream = iter(self)
        lines = [f"{k:>6}  {action}" for k, action in enumerate(islice(stream, limit))]
        if next(stream, None) is not None:
            lines.append("     …  and so on")
        return "\n".join(lines)

    def write_json(self, file: IO[str]) -> None:
        """Stream the schedule to `file` as one JSON object, an action at a time."""
        encode = msgspec.json.Encoder().encode
        file.write(f'{{"length":{self.length},"planner":{encode(self.planner).decode()},"actions":[')
        for position, action in enumerate(self):
            file.write((",\n" if position else "\n") + encode(action).decode())
        file.write("\n]}\n")

    @classmethod
    def from_json(cls, text: bytes | str) -> Schedule:
        """A schedule from what `write_json` wrote; raises `msgspec.ValidationError` naming what is wrong."""
        saved = msgspec.json.decode(text, type=_Saved)
        return cls(saved.length, saved.planner, saved.actions)


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    length: int
    planner: str
    actions: tuple[Action, ...]
