"""Silence for replays: a step gives each of its warnings once, as in the plain loop."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_silence_lock = threading.Lock()
_silent: list[Any] = []  # what restores the warning filters, once per thread that wants silence


@contextmanager
def silence() -> Iterator[None]:
    """Let replays repeat no warning that the first run has given.

    Warning filters belong to the process: the first to come sets them aside and the last to go puts them back.
    """
    with _silence_lock:
        if not _silent:
            kept = warnings.catch_warnings()
            kept.__enter__()
            warnings.simplefilter("ignore")
            _silent.append(kept)
        _silent.append(None)
    try:
        yield
    finally:
        with _silence_lock:
            _silent.pop()
            if len(_silent) == 1:
                _silent.pop().__exit__(None, None, None)
