"""Silence for replays: a step gives each of its warnings once, as in the plain loop.

What PyTorch logs of operators that fail on fake tensors is silenced too: the error itself says it, in one sentence.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_silence_lock = threading.Lock()
_silent: list[Any] = []  # what restores the warning filters, once per thread that wants silence
_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def silence() -> Iterator[None]:
    """Let replays repeat no warning that the first run has given, and fake tensors log no failure.

    Warning filters and loggers belong to the process: the first to come sets them aside, the last puts them back.
    """
    with _silence_lock:
        if not _silent:
            kept = warnings.catch_warnings()
            kept.__enter__()
            warnings.simplefilter("ignore")
            _silent.append(kept)
            _fake_tensors.addFilter(_nothing)
        _silent.append(None)
    try:
        yield
    finally:
        with _silence_lock:
            _silent.pop()
            if len(_silent) == 1:
                _fake_tensors.removeFilter(_nothing)
                _silent.pop().__exit__(None, None, None)


def _nothing(_record: logging.LogRecord) -> bool:
    return False
