"""A job in a thread of its own, where nothing that watches this one can see it; Ctrl-C stops it too."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

import torch

from .ambient import Surroundings
from .meter import is_metering
from .silence import silence

T = TypeVar("T")
_LOOK_S: Final = 0.1  # between looks at signals, while a job runs elsewhere


def by_itself(job: Callable[[], T], surroundings: Surroundings) -> T:
    """Run a job where no hook for saved tensors, no profiler and no running engine can see it: in a thread of its own.

    Only if there is one of these; else it runs here.
    """
    with silence():  # the first run of the step will say what there is to say
        return _by_itself(job, surroundings)


def _by_itself(job: Callable[[], T], surroundings: Surroundings) -> T:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    profiled = torch._C._autograd._profiler_enabled() and not is_metering()
    if hooks is None and not profiled and torch._C._current_graph_task_id() == -1:
        return job()
    outcomes = SimpleQueue[tuple[T] | BaseException]()
    unwanted = threading.Event()

    def work() -> None:
        try:
            if not unwanted.is_set():
                with surroundings.entered():
                    found = job()
                outcomes.put((found,))
        except BaseException as error:  # carried over to the thread that waits
            outcomes.put(error)

    thread = threading.Thread(target=work, name="remat: measuring a step")
    try:
        thread.start()
        outcome = _wait(thread, outcomes)
    except BaseException as error:  # Ctrl-C, which Python hands to the main thread alone
        unwanted.set()
        _raise_in(thread, type(error))
        while thread.is_alive():
            with suppress(KeyboardInterrupt):  # impatience changes nothing: state must not be left half-way
                _wait(thread, outcomes)
        raise
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None, "a thread ended and said nothing"
        return outcome[0]
    finally:
        del outcome  # an error holds this frame


def _wait(thread: threading.Thread, outcomes: SimpleQueue[T]) -> T | None:
    """What a thread hands over at its end; None if it ended before it could.

    Not `join`, which Ctrl-C makes take a running thread for one that has ended (Python 3.11), and not for long at a
    time: a signal that comes just before a wait begins is only heard after it.
    """
    while thread.is_alive():
        with suppress(Empty):
            outcome = outcomes.get(timeout=_LOOK_S)
            thread.join()  # it has put everything back, and is as good as over
            return outcome
    with suppress(Empty):
        return outcomes.get_nowait()
    return None


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Stop a thread with an error at its next line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))
