"""What a trial run's bytes and seconds are read off: a device's meter and clock, or what stands in for them."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple, Protocol, TypeVar

import torch

from .meter import metering

T = TypeVar("T")
_FRESH_BYTES: Final = 1 << 22
_TRIES: Final = 3
Job = Callable[[Callable[[], object]], T]


class Reading(NamedTuple):
    """What happened between two marks: bytes gained, the most over those at the first, and seconds; its name if any."""

    net_bytes: int
    peak_bytes: int
    seconds: float
    name: str = ""


class Gauge(Protocol):
    """What bytes and seconds are read off."""

    def bytes_of(self, job: Job[T]) -> tuple[list[Reading], T]:
        """What happened before and between the marks that the job makes by calling what it is given; its result."""
        ...

    def seconds_of(self, job: Job[object]) -> list[float]:
        """The seconds between the marks."""
        ...


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The meter and the clock of a device."""

    device: torch.device

    def bytes_of(self, job: Job[T]) -> tuple[list[Reading], T]:
        """See `Gauge`; the seconds have some of the meter's own in them."""
        starts, ends = [time.perf_counter()], list[float]()
        with metering(self.device) as session:

            def mark() -> None:
                session.synchronize()
                ends.append(time.perf_counter())
                session.mark("")
                starts.append(time.perf_counter())

            value = job(mark)
        spans = (end - start for start, end in zip(starts, ends, strict=False))
        return [Reading(p.net_bytes, p.peak_bytes, s) for p, s in zip(session.phases, spans, strict=False)], value

    def seconds_of(self, job: Job[object]) -> list[float]:
        """See `Gauge`."""
        marks: list[float] = []
        on_device = self.device.type == "cuda"
        clock = time.perf_counter if on_device else _clock(torch.get_num_threads())

        def mark() -> None:
            if on_device:
                torch.cuda.synchronize(self.device)
            marks.append(clock())

        job(mark)
        return [after - before for before, after in pairwise(marks)]


def page_s(threads: int) -> float:
    """Seconds for each byte of memory that comes fresh from the system, which clears it when it is first used.

    Whether memory that was given back comes fresh is up to the C library, and differs between processes: half of it is
    as good a guess as any.
    """
    clock, spans = _clock(threads), list[float]()
    for _ in range(_TRIES):
        with mmap.mmap(-1, _FRESH_BYTES) as memory:
            block = torch.frombuffer(memory, dtype=torch.uint8)
            marks = [clock()]
            for _ in range(2):
                block.zero_()
                marks.append(clock())
            del block
        spans.append((marks[1] - marks[0]) - (marks[2] - marks[1]))
    return max(median(spans), 0.0) / _FRESH_BYTES / 2


def _clock(threads: int) -> Callable[[], float]:
    """Where one thread does all the work, its own seconds, which stand still while others have the processor."""
    return time.thread_time if threads == 1 else time.perf_counter


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection meanwhile: what it frees would be counted as freed by the step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
