"""A job in a thread of its own, where nothing that watches this one can see it; Ctrl-C stops it too."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from .ambient import Surroundings
from .meter import is_metering
from .silence import silence

T = TypeVar("T")


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
    results: list[T] = []
    errors: list[BaseException] = []
    unwanted = threading.Event()

    def work() -> None:
        try:
            if not unwanted.is_set():
                with surroundings.entered():
                    results.append(job())
        except BaseException as error:  # carried over to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, name="remat: measuring a step")
    try:
        thread.start()
        thread.join()
    except BaseException as error:  # Ctrl-C, which Python hands to the main thread alone
        unwanted.set()
        _raise_in(thread, type(error))
        raise
    if errors:
        raise errors.pop()
    return results.pop()


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Stop a thread with an error at its next line of Python, and wait until it has put everything back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))
    while thread.is_alive():
        with suppress(KeyboardInterrupt):  # impatience changes nothing: state must not be left half-way
            thread.join()
