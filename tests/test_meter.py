"""The meter: to the byte where the sum can be done by hand, and against the process as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import remat
from remat.meter import metering

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // 4)


def test_nothing() -> None:
    measured = remat.measure(lambda: 7)
    assert (measured.peak_bytes, measured.net_bytes, measured.value) == (0, 0, 7)
    assert measured.seconds >= 0


def test_a_case_by_hand() -> None:
    """64 kept; 64 + 100 + 28 at the worst moment; 64 + 16 at the end."""

    def work() -> list[torch.Tensor]:
        kept = floats(64)
        temporary = floats(100)
        short = floats(28)
        del short
        del temporary
        return [kept, floats(16)]

    measured = remat.measure(work)
    assert measured.peak_bytes == 192 * KIB
    assert measured.net_bytes == 80 * KIB
    assert [size for _, size in measured.timeline] == [k * KIB for k in (64, 164, 192, 164, 64, 80)]
    seconds = [second for second, _ in measured.timeline]
    assert seconds == sorted(seconds)


def test_a_forward_and_backward_by_hand() -> None:
    """y = (x·w).sum() with 1 KiB each: product and sum; gradients of the product (expanded) and of x and w."""
    x, w = (torch.ones(256).requires_grad_() for _ in range(2))

    def work() -> None:
        (x * w).sum().backward()

    measured = remat.measure(work)
    assert measured.net_bytes == 2 * KIB  # the two gradients
    assert 2 * KIB <= measured.peak_bytes <= 2 * KIB + 16  # the product is gone by then


def test_what_kernels_allocate_inside_themselves_is_seen() -> None:
    """A sort along another dimension copies; the product of transposed matrices may pack."""
    x = torch.randn(64, 64)
    measured = remat.measure(lambda: x.sort(0))
    assert measured.net_bytes == 64 * 64 * (4 + 8)
    assert measured.peak_bytes >= measured.net_bytes


def test_what_is_freed_inside_counts_against_what_was_allocated_inside() -> None:
    def work() -> None:
        for _ in range(10):
            floats(50)

    assert remat.measure(work).peak_bytes == 50 * KIB


def test_sessions_nest() -> None:
    inner_peaks = []

    def inner() -> torch.Tensor:
        floats(30)
        return floats(10)

    def outer() -> list[torch.Tensor]:
        kept = [floats(5)]
        measured = remat.measure(inner)
        inner_peaks.append((measured.peak_bytes, measured.net_bytes))
        kept.append(measured.value)
        kept.append(floats(7))
        return kept

    measured = remat.measure(outer)
    assert inner_peaks == [(30 * KIB, 10 * KIB)]
    assert (measured.peak_bytes, measured.net_bytes) == (35 * KIB, 22 * KIB)


def test_an_exception_passes_through_and_ends_the_session() -> None:
    def work() -> None:
        floats(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        remat.measure(work)
    assert remat.measure(lambda: floats(1)).peak_bytes == KIB


def test_phases() -> None:
    with metering() as session:
        kept = floats(4)
        session.mark("first")
        floats(8)
        session.mark("second")
        del kept
        session.mark("third")
    assert [(p.name, p.net_bytes, p.peak_bytes) for p in session.phases[:3]] == [
        ("first", 4 * KIB, 4 * KIB),
        ("second", 0, 8 * KIB),
        ("third", -4 * KIB, 0),
    ]


def test_another_profiler_on_this_thread_is_refused() -> None:
    with (
        torch.autograd.profiler.profile(use_kineto=False, profile_memory=True),
        pytest.raises(remat.RematError, match="another profiler"),
    ):
        remat.measure(lambda: None)


_PROCESS = """
import re, torch, remat
torch.set_num_threads(1)

def high_water():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def now():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

w = torch.randn(1024, 1024, requires_grad=True)
x = torch.randn(1024, 1024)

def work():
    h = x
    for _ in range(24):
        h = torch.tanh(h * w)
    h.sum().backward()

remat.measure(lambda: torch.tanh(x[:64] * w[:64]).sum().backward())  # libraries are loaded
w.grad = None
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts from here
before = now()
measured = remat.measure(work)
print(measured.peak_bytes, high_water() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_agrees_with_the_peak_of_a_fresh_process() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    counted, resident = map(int, done.stdout.split())
    assert counted > 100 * 2**20
    assert abs(counted - resident) <= 0.04 * resident


def test_a_picture(tmp_path: Path) -> None:
    measured = remat.measure(lambda: torch.zeros(1000))
    measured.plot(tmp_path / "measured.svg", budget="8KiB")
    text = (tmp_path / "measured.svg").read_text()
    assert "measured: peak 3.91 KiB" in text
    assert "budget: 8 KiB" in text
    with pytest.raises(remat.RematError, match="allocates nothing"):
        remat.measure(lambda: None).plot(tmp_path / "nothing.png")
