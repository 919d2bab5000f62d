"""How long does planning take, beside its peers, and how far from the best are plans that cannot be exact?

Rows: a repeated stage by recurrence and by closed form, with every action consumed; unequal chains with menus of two
entries and 500 units of memory, each in a fresh process for its peak RSS; a periodic network; inputs of unknown length.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from harness import RESULTS, fresh_process, publish, where
from remat.chains import Chain, Stage, Tape
from remat.planners import hsm, planner
from remat.planners.online import OnlinePlanner
from remat.planners.room import in_paper_units
from remat.planners.unequal import solve
from remat.simulator import simulate

MIB = 2**20


def network(length: int) -> Chain:
    """Random stages: carries of 1 … 8 MiB, whole tapes of 4 … 30 MiB, lean ones a third of that and slower."""
    random = np.random.default_rng(length)
    stages = []
    for _ in range(length):
        carry, tape, forward = (
            int(random.integers(1, 8 * MIB)),
            int(random.integers(4, 30) * MIB),
            random.uniform(0.5, 2),
        )
        common = {"entering_bytes": carry, "backward_workspace_bytes": carry + int(random.integers(0, 4 * MIB))}
        whole = Tape(tape, forward_s=forward, backward_s=2 * forward, **common)
        lean = Tape(tape // 3, forward_s=forward, backward_s=2.4 * forward, **common)
        stages.append((Stage(carry, (whole, lean), forward_s=forward), 1))
    return Chain(tuple(stages), 3 * MIB)


def resnet(groups: int) -> Chain:
    """A thousand layers: bottleneck blocks of three, in groups of halving carries, as in networks for CIFAR."""
    stages = []
    for group in range(groups):
        size = 4 * MIB >> group
        block = [
            Stage(carry, (Tape(2 * carry, carry, 0, time, 2 * time, 0, carry),), forward_s=time)
            for carry, time in ((4 * size, 1.0), (size, 2.0), (size, 1.0))
        ]
        stages += block * (333 // groups)
    return Chain(tuple((stage, 1) for stage in [*stages, stages[-1]]), stages[-1].carry_bytes)


def unequal(kind: str, size: int, share: float) -> dict[str, object]:
    """Plan a chain in this process, once to compile and once to measure."""
    solve(network(8), 60 * MIB)
    chain = network(size) if kind == "network" else resnet(size)
    budget = int(share * sum(stage.menu[0].tape_bytes + stage.carry_bytes for stage, _ in chain.runs))
    wall, cpu = time.perf_counter(), time.process_time()
    solution = solve(chain, budget)
    spent = time.perf_counter() - wall, time.process_time() - cpu
    simulation = simulate(chain, solution.schedule)
    assert simulation.peak_bytes <= budget
    return {
        "wall_s": spent[0],
        "cpu_s": spent[1],
        "gap": simulation.seconds / solution.lower_bound_s - 1,
        "exact": solution.exact,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def timed(job: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - wall, time.process_time() - cpu


def consume(actions: Iterable[object]) -> None:
    for _ in actions:
        pass


def peer_hsm(steps: int, slots: int) -> Callable[[], None]:
    """checkpoint-schedules' Multistage, planned and consumed. It stores one carry less than our slots count."""
    peers = import_module("checkpoint_schedules")
    consume(peers.MultistageCheckpointSchedule(10, 2, 0))  # it compiles too
    return lambda: consume(peers.MultistageCheckpointSchedule(steps, slots - 1, 0))


def repeated_rows() -> list[list[str]]:
    rows = []
    chain, budget = in_paper_units("tight", 10_000, 1000, 5)
    planner("tight")(*in_paper_units("tight", 100, 10, 5))
    jobs: list[tuple[str, str, Callable[[], object]]] = [
        ("repeated stage, T = 10⁴, 1000 units, α = 5, exact", "remat tight", lambda: planner("tight")(chain, budget))
    ]
    for steps in (10_000, 1_000_000):
        question = f"repeated stage, T = {steps:,}, 100 slots, every action consumed"
        jobs += [
            (question, "remat hsm", lambda n=steps: consume(planner("hsm")(*in_paper_units("hsm", n, 100)))),
            (question, "checkpoint-schedules Multistage", peer_hsm(steps, 100)),
        ]
    for question, who, job in jobs:
        wall, cpu = timed(job)
        rows.append([question, who, f"{wall:.2f}", f"{cpu:.2f}", "optimal"])
    return rows


def unequal_rows() -> list[list[str]]:
    rows = []
    for kind, size, share, name in (
        ("network", 100, 0.2, "unequal chain, L = 100"),
        ("network", 336, 0.2, "unequal chain, L = 336"),
        ("network", 1000, 0.2, "unequal chain, L = 1000"),
        ("resnet", 1, 0.1, "periodic chain of 1000 layers"),
        ("resnet", 3, 0.1, "the same in three groups"),
    ):
        found = fresh_process(__file__, "--one", kind, str(size), str(share))
        gap = f"at most {found['gap']:.1%} over the best schedule there is"
        quality = f"nothing rounded, {gap}" if found["exact"] else gap
        question, spent = f"{name}, {share:.0%} of all bytes", (f"{found['wall_s']:.2f}", f"{found['cpu_s']:.2f}")
        rows.append([question, "remat unequal", *spent, f"{quality}; peak RSS {found['rss_mib']} MiB"])
    return rows


def compile_row() -> list[str]:
    """The first plan on a machine, which compiles."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        wall, _ = timed(
            lambda: subprocess.run(
                [sys.executable, __file__, "--one", "network", "20", "0.3"], check=True, env=environment, stdout=-3
            )
        )
        again, _ = timed(
            lambda: subprocess.run(
                [sys.executable, __file__, "--one", "network", "20", "0.3"], check=True, env=environment, stdout=-3
            )
        )
    return ["compiling, once per machine", "remat unequal", f"{wall - again:.1f}", "", "imports not counted"]


def online_table() -> tuple[list[str], list[list[str]]]:
    """Forward runs over those of HSM, which knows the length."""
    lengths = (10, 30, 100, 300, 1000, 3000, 10_000)
    rows = []
    for slots in (2, 3, 5, 10, 20, 50, 100):
        online = OnlinePlanner(Stage(1, (Tape(1),)), slots)
        ratios = []
        for k in range(lengths[-1]):
            online.before_step(k)
            ratios.append(online.forward_runs(k + 1) / hsm.cost(k + 1, slots))
        worst = max(ratios[99:])
        rows.append([str(slots), *(f"{ratios[n - 1]:.3f}" for n in lengths), f"{worst:.3f}"])
    return ["slots", *(f"T = {n:,}" for n in lengths), "worst, T ≥ 100"], rows


def versions() -> list[str]:
    notes = []
    for peer in ("checkpoint-schedules", "pyrevolve"):
        try:
            notes.append(f"* {peer} {version(peer)}")
        except PackageNotFoundError:
            notes.append(f"* {peer} could not be installed here: no row")
    return notes


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--one", nargs=3, metavar=("KIND", "SIZE", "SHARE"), help="plan one chain, print JSON")
    one = arguments.parse_args().one
    if one:
        print(json.dumps(unequal(one[0], int(one[1]), float(one[2]))))
        return
    columns = ["problem", "planner", "wall s", "CPU s", "quality"]
    rows = [*repeated_rows(), *unequal_rows(), compile_row()]
    publish("planning", "Planning seconds", columns, rows, versions())
    online_columns, online_rows = online_table()
    title = "Unknown length: forward runs over the optimum for a known length"
    publish("online", title, online_columns, online_rows, ["The last step, run once more, is counted."])
    everything = {"where": where(), "planning": [columns, *rows], "online": [online_columns, *online_rows]}
    Path(RESULTS / "planning.json").write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
