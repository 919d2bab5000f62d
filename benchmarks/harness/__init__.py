"""What the benchmarks share: interleaved timing, fresh processes, and results that say where they come from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import remat

RESULTS = Path(__file__).parent.parent / "results"


class Spent(NamedTuple):
    """Seconds of one call."""

    wall_s: float
    cpu_s: float


def interleaved(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Spent]]:
    """Run all jobs once to warm up, then `rounds` times in turn; so that what disturbs one disturbs its neighbours."""
    for job in jobs.values():
        job()
    spent: dict[str, list[Spent]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            spent[name].append(timed(job))
    return spent


def timed(job: Callable[[], object]) -> Spent:
    """What one call takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def ratio(spent: Mapping[str, Sequence[Spent]], name: str, base: str, field: str = "cpu_s") -> float:
    """Median over the rounds of one job's time over another's in the same round."""
    return median(getattr(a, field) / getattr(b, field) for a, b in zip(spent[name], spent[base], strict=True))


def fresh_process(script: str, *arguments: str, timeout_s: float | None = None) -> Any:
    """What a Python script prints as JSON on its last line, run in a process of its own."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
    )
    return json.loads(done.stdout.splitlines()[-1])


def where() -> dict[str, str]:
    """Machine, versions, date."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, shared",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "remat": remat.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def publish(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    *,
    show: bool = True,
) -> None:
    """Print a table, unless it is not to be shown yet, and keep it, as text for people, under `results/`."""
    lines = [f"# {title}", "", ", ".join(f"{key} {value}" for key, value in where().items()), ""]
    lines += table(columns, rows)
    lines += ["", *notes] if notes else []
    text = "\n".join(lines) + "\n"
    if show:
        print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
