"""What does a byte budget cost an LSTM loop, and does it hold?

LSTM cell, hidden 256, input 64, batch 16, T = 1000, a loss every step; budgets as shares of the plain loop's measured
peak, gradients of parameters allocated before. Also the growth of a fresh process's peak RSS at T = 10^4.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

import remat
from harness import fresh_process, interleaved, publish, ratio
from remat.simulator import simulate

SHARES = (0.5, 0.2, 0.1, 0.05, 0.03)
HIDDEN, INPUT, BATCH = 256, 64, 16
Carry = tuple[torch.Tensor, torch.Tensor]


class Job:
    """The training iteration, plain or under a budget."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.cell = torch.nn.LSTMCell(INPUT, HIDDEN)
        self.xs = torch.randn(steps, BATCH, INPUT)
        self.carry = (torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN))
        for parameter in self.cell.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, carry: Carry, x: torch.Tensor) -> tuple[Carry, torch.Tensor]:
        hidden, cell = self.cell(x, carry)
        return (hidden, cell), hidden.square().mean()

    def plain(self) -> None:
        carry, losses = self.carry, []
        for x in self.xs:
            carry, loss = self.step(carry, x)
            losses.append(loss)
        torch.stack(losses).sum().backward()

    def budgeted(self, budget_bytes: int) -> None:
        _, losses = remat.scan(self.step, self.carry, self.xs, budget=budget_bytes)
        losses.sum().backward()

    def gradients(self, run: Callable[[], None]) -> list[torch.Tensor]:
        for parameter in self.cell.parameters():
            parameter.grad.zero_()
        run()
        return [parameter.grad.clone() for parameter in self.cell.parameters()]


def table(steps: int, rounds: int) -> None:
    job = Job(steps)
    job.plain()
    plain_peak = remat.measure(job.plain).peak_bytes
    wanted = job.gradients(job.plain)
    jobs: dict[str, Callable[[], None]] = {"plain": job.plain}
    rows, plans = {}, {}
    for share in SHARES:
        budget_bytes = int(plain_peak * share)
        try:
            made = remat.plan_scan(job.step, job.carry, job.xs, budget=budget_bytes)
        except remat.InfeasibleBudget as error:
            rows[share] = [f"{share:.0%}", f"{budget_bytes:,}", f"infeasible below {error.smallest_budget_bytes:,}"]
            continue
        run = partial(job.budgeted, budget_bytes)
        jobs[f"{share}"], plans[share] = run, made
        peak = remat.measure(run).peak_bytes
        same = all(map(torch.equal, wanted, job.gradients(run)))
        off = (made.peak_bytes - peak) / budget_bytes
        rows[share] = [f"{share:.0%}", f"{budget_bytes:,}", f"{peak:,}", "yes" if peak <= budget_bytes else "NO"]
        rows[share] += [f"{off:+.2%}", f"{made.forward_runs / steps:.3f}", "yes" if same else "NO"]
    gc.collect()
    spent = interleaved(jobs, rounds)
    seconds = stage_seconds(job, min(steps, 200))
    for share, made in plans.items():
        cpu, wall = ratio(spent, f"{share}", "plain"), ratio(spent, f"{share}", "plain", "wall_s")
        against = median(s.wall_s for s in spent[f"{share}"]) / predicted_seconds(made, seconds)
        rows[share] += [f"{cpu:.3f}", f"{wall:.3f}", f"{against:.3f}"]
    columns = ["budget", "bytes", "measured peak", "within", "predicted − measured", "forward runs a step"]
    columns += ["gradients equal", "CPU time / plain", "wall time / plain", "wall / predicted"]
    notes = [
        f"Plain loop: peak {plain_peak:,} bytes, median {median(s.cpu_s for s in spent['plain']):.3f} s CPU, "
        f"{median(s.wall_s for s in spent['plain']):.3f} s wall. {rounds} rounds, interleaved, "
        f"{torch.get_num_threads()} threads.",
        "",
        f"Stage seconds, measured in the same run: advance {seconds['advance']:.2e}, record {seconds['record']:.2e}, "
        f"backward {seconds['backward']:.2e}. Prediction: the schedule's counts times these.",
    ]
    publish("scan", f"A byte budget for an LSTM loop of {steps} steps", columns, list(rows.values()), notes)


def stage_seconds(job: Job, steps: int) -> dict[str, float]:
    """Seconds of one step run without autograd, run with it, and of its backward, in plain loops."""

    def advance() -> None:
        carry = job.carry
        with torch.no_grad():
            for x in job.xs[:steps]:
                carry, _ = job.step(carry, x)

    losses: list[torch.Tensor] = []

    def record() -> None:
        losses.clear()
        carry = job.carry
        for x in job.xs[:steps]:
            carry, loss = job.step(carry, x)
            losses.append(loss)

    def backward() -> None:
        torch.stack(losses).sum().backward()

    spent = interleaved({"advance": advance, "record": record, "backward": backward}, 15)
    return {name: median(item.wall_s for item in items) / steps for name, items in spent.items()}


def predicted_seconds(made: remat.Plan, seconds: dict[str, float]) -> float:
    counted = simulate(made.chain, made.schedule)
    advanced = counted.forward_runs - counted.recorded_runs
    return advanced * seconds["advance"] + counted.recorded_runs * (seconds["record"] + seconds["backward"])


def process_peaks(steps: int) -> None:
    plain = fresh_process(__file__, "--child", "plain", "--steps", str(steps))
    budget_bytes = int(0.03 * plain["peak_bytes"])
    budgeted = fresh_process(__file__, "--child", str(budget_bytes), "--steps", str(steps))
    share = budgeted["growth_bytes"] / plain["growth_bytes"]
    rows = [
        ["plain loop", f"{plain['growth_bytes'] / 2**20:.0f}", "100 %"],
        [
            f"scan, budget {budget_bytes / 2**20:.1f} MiB (3 %)",
            f"{budgeted['growth_bytes'] / 2**20:.0f}",
            f"{share:.1%}",
        ],
    ]
    title = f"Growth of a process's peak RSS, LSTM loop of {steps} steps"
    publish("scan_rss", title, ["", "MiB over the RSS before the call", "share"], rows)


def long_loop(steps: int) -> None:
    """A small cell for very many steps: bounded memory, constant stack."""
    rows = []
    for budget in ("1MiB", "16MiB"):  # planning for 64 KiB alone takes minutes
        told = fresh_process(__file__, "--long", budget, "--steps", str(steps))
        rows.append([budget, f"{told['peak_bytes']:,}", f"{told['growth_bytes'] / 2**20:.0f}"])
        rows[-1] += [f"{told['forward_runs'] / steps:.3f}", f"{told['seconds'] / steps * 1e6:.0f}"]
    title = f"A small cell (hidden 16, batch 4, loss at the end) for {steps:,} steps, in a fresh process"
    columns = ["budget", "measured peak bytes", "growth of peak RSS, MiB", "forward runs a step", "µs a step"]
    publish("scan_long", title, columns, rows)


def long_child(budget: str, steps: int) -> None:
    """One iteration of the small cell, the second one measured in bytes."""
    torch.manual_seed(0)
    cell = torch.nn.RNNCell(1, 16)
    xs, start = torch.randn(1, 4, 1).expand(steps, 4, 1), torch.zeros(4, 16)

    def run(length: int = steps) -> None:
        hidden, _ = remat.scan(lambda h, x: (cell(x, h), None), start, xs[:length], budget=budget)
        hidden.sum().backward()

    run(1000)  # libraries are loaded
    made = remat.plan_scan(lambda h, x: (cell(x, h), None), start, xs, budget=budget)
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = status("VmRSS"), time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    growth = status("VmHWM") - before
    peak = remat.measure(run).peak_bytes
    told = {"growth_bytes": growth, "seconds": seconds, "peak_bytes": peak, "forward_runs": made.forward_runs}
    print(json.dumps(told))


def child(how: str, steps: int) -> None:
    """In a fresh process: load what a call loads on short loops, then the growth of peak RSS over one iteration."""
    short, job = Job(100), Job(steps)
    short.plain()
    short.budgeted(remat.measure(short.plain).peak_bytes // 2)  # plans, so the planner's compiled code is there
    run = job.plain if how == "plain" else partial(job.budgeted, int(how))
    peak_bytes = remat.measure(Job(1000).plain).peak_bytes * steps // 1000 if how == "plain" else 0
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    run()
    print(json.dumps({"growth_bytes": status("VmHWM") - before, "peak_bytes": peak_bytes}))


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--long", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.steps)
        return
    if options.long:
        long_child(options.long, options.steps)
        return
    table(options.steps or 1000, options.rounds)
    process_peaks(options.steps or 10_000)
    long_loop(100 * options.steps or 100_000)


if __name__ == "__main__":
    main()
