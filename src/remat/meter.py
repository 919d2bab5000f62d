"""The scale: how many bytes a call really had allocated at its worst moment, and how long it took.

On CUDA the caching allocator keeps count. On CPU nobody does unless a profiler listens, so we listen with PyTorch's
light-weight profiler, with all events but allocations switched off: starting costs tens of microseconds, and what
kernels allocate inside themselves is seen too, as a dispatch mode cannot. The profiler is bound to a thread and cannot
be nested; our own sessions can: an inner one pauses the outer one and hands it its totals. It has one blind spot: the
release of CPU memory that was allocated before any session is not seen, so that such a call is measured too high.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Final, Generic, TypeVar

import torch
from torch._C import _autograd, _profiler  # the only way to the allocation events

from .errors import RematError
from .report import draw_memory, measured_curve
from .sizes import parse_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What a call took.

    Attributes:
        peak_bytes: most bytes allocated at any moment, over those at the start.
        net_bytes: bytes allocated at the end, over those at the start.
        seconds: wall time, the meter's own start and stop not counted.
        value: what the call returned.
        timeline: (seconds, bytes) after each allocation and release; empty on CUDA.
    """

    peak_bytes: int
    net_bytes: int
    seconds: float
    value: T = field(repr=False)
    timeline: tuple[tuple[float, int], ...] = field(repr=False)

    def plot(self, path: str | PathLike[str], budget: int | str | None = None) -> None:
        """Draw memory over time into a picture file (.png, .svg, .pdf).

        Args:
            path: the file; its ending says its kind.
            budget: drawn as a line, if given.

        Raises:
            OSError: the file cannot be written.
            RematError: there is nothing to draw, since CUDA's allocator only keeps the peak.
            ValueError: matplotlib does not know the kind of file, or the budget is not a size.
        """
        if not self.timeline:
            raise RematError(
                "nothing was allocated over time to be drawn; CUDA's allocator only keeps the peak, "
                "and a run on CPU that allocates nothing has no curve"
            )
        budget_bytes = None if budget is None else parse_bytes(budget)
        draw_memory(path, {"measured": measured_curve(self.timeline)}, budget_bytes)


def measure(fn: Callable[[], T], *, device: torch.device | str | None = None) -> Measurement[T]:
    """Run `fn()` and say what it took: peak bytes over those at its start, and seconds.

    Counts what is allocated by the calling thread and by the autograd work it starts, on one device.

    Args:
        fn: called once, without arguments.
        device: the device whose memory counts; the CPU unless CUDA is given.

    Raises:
        RematError: another profiler is active on this thread and holds the place of ours.
    """
    with metering(device) as session:
        begin = time.perf_counter()
        value = fn()
        session.synchronize()
        seconds = time.perf_counter() - begin
    return Measurement(session.peak_bytes, session.net_bytes, seconds, value, tuple(session.timeline))


@dataclass(frozen=True)
class Phase:
    """What happened since the mark before: bytes gained, and the most over those at the phase's start."""

    name: str
    net_bytes: int
    peak_bytes: int


class Session:
    """Bytes counted between entry and exit of `metering`; read it after the exit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.net_bytes = 0
        self.peak_bytes = 0
        self.timeline: list[tuple[float, int]] = []
        self.phases: list[Phase] = []
        self._begin = time.perf_counter()
        self._phase_start_bytes = 0
        self._phase_peak_bytes = 0

    def synchronize(self) -> None:
        """Wait for the device, so that seconds are its seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mark(self, name: str) -> None:
        """End a phase here and call it `name`; phases can be read after the exit."""
        if self.device.type == "cuda":
            self.close_phase(name)
            return
        _autograd._enable_record_function(True)
        with _profiler._RecordFunctionFast(_MARK + name):
            pass
        _autograd._enable_record_function(False)

    def close_phase(self, name: str) -> None:
        if self.device.type == "cuda":
            self._read_cuda()
        net, peak = self.net_bytes - self._phase_start_bytes, self._phase_peak_bytes - self._phase_start_bytes
        self.phases.append(Phase(name, net, max(peak, 0)))
        self._phase_start_bytes = self._phase_peak_bytes = self.net_bytes

    def absorb(self, inner: Session) -> None:
        """Count what an inner session has counted."""
        self._reach(self.net_bytes + inner.peak_bytes)
        offset = inner._begin - self._begin
        self.timeline.extend((offset + second, self.net_bytes + size) for second, size in inner.timeline)
        self.net_bytes += inner.net_bytes

    def add(self, second: float, size: int) -> None:
        self.net_bytes += size
        self._reach(self.net_bytes)
        self.timeline.append((second, self.net_bytes))

    def _reach(self, size: int) -> None:
        self.peak_bytes = max(self.peak_bytes, size)
        self._phase_peak_bytes = max(self._phase_peak_bytes, size)

    def start_cuda(self) -> None:
        self.synchronize()
        self._cuda_start_bytes = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def _read_cuda(self) -> None:
        self.net_bytes = torch.cuda.memory_allocated(self.device) - self._cuda_start_bytes
        self._reach(torch.cuda.max_memory_allocated(self.device) - self._cuda_start_bytes)
        torch.cuda.reset_peak_memory_stats(self.device)


_MARK: Final = "remat phase: "
_open = threading.local()  # .sessions: the CPU sessions of this thread, innermost last


def is_metering() -> bool:
    """Whether a session of ours is open in this thread."""
    return bool(getattr(_open, "sessions", ()))


@contextmanager
def metering(device: torch.device | str | None = None) -> Iterator[Session]:
    """Count bytes in the body of a `with`; sessions may be nested."""
    session = Session(torch.device(device or "cpu"))
    if session.device.type == "cuda":
        session.start_cuda()
        try:
            yield session
        finally:
            session.close_phase("")
        return
    sessions: list[Session] = _open.__dict__.setdefault("sessions", [])
    if sessions:
        _stop_listening(sessions[-1])
    _start_listening()
    sessions.append(session)
    try:
        yield session
    finally:
        sessions.pop()
        _stop_listening(session)
        if sessions:
            sessions[-1].absorb(session)
            _start_listening()


def _start_listening() -> None:
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.CPU,
        False,  # no shapes
        True,  # memory
        False,
        False,
        False,
        _profiler._ExperimentalConfig(),
    )
    try:
        _autograd._enable_profiler_legacy(config)
    except RuntimeError as error:
        raise RematError(
            "bytes cannot be counted while another profiler is active on this thread; make this call outside of it"
        ) from error
    _autograd._enable_record_function(False)  # operators would be logged too, a hundred times the cost


def _stop_listening(session: Session) -> None:
    _autograd._enable_record_function(True)
    now = time.perf_counter() - session._begin
    threads = _autograd._disable_profiler_legacy()
    events = [event for thread in threads for event in thread]
    if not events:
        return
    stop = events[-1]
    if len(threads) > 1:
        events.sort(key=lambda event: -event.cpu_elapsed_us(stop))
    for event in events:
        kind = str(event.kind())
        if kind == "memory_alloc" and event.cpu_memory_usage():
            session.add(now - event.cpu_elapsed_us(stop) * 1e-6, event.cpu_memory_usage())
        elif kind == "push" and event.name().startswith(_MARK):
            session.close_phase(event.name().removeprefix(_MARK))
