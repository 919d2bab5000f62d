"""Is a traced loop inside a small budget as fast as the loop that keeps everything?

LSTM and GRU with dropout (hidden 256, input 64, batch 16), a spiking network, a neural cellular automaton and a small
transformer-like step, with a loss in each step. Plain loop, PyTorch's fused layer, the plain loop over a step through
torch.compile, `torch.utils.checkpoint` over segments and nested, and remat as it is and compiled, interleaved in one
fresh process for each workload and number of threads; budgets as shares of the plain loop's measured peak. Where JAX is
installed (here, or for the Python named by JAX_PYTHON), its scans train the LSTM and the GRU in a process of their own.
With --whole-loop it is torch.compile of the whole loop that is tried, and nothing else: it takes minutes, if it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from harness import RESULTS, Spent, fresh_process, publish, ratio, timed, where

SHARES = {True: (0.5, 0.2, 0.1, 0.05, 0.02), False: (0.5, 0.2, 0.05)}  # compiled, and as it is
STEPS = {"lstm": 1000, "gru": 500, "spiking": 500, "automaton": 150, "transformer": 150}
HIDDEN, INPUT, BATCH = 256, 64, 16
LONG_S = 10  # a call that takes longer is not timed
WHOLE, PATIENCE_S, SOME_STEPS = "torch.compile of the whole loop", 400, 100
Step = Callable[[Any, Any], tuple[Any, Tensor]]


class Spike(torch.autograd.Function):
    """A step function with the derivative of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, potential: Tensor) -> Tensor:
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return gradient / (1 + 10 * potential.abs()).square()


class Job:
    """A workload: parameters, inputs, a step, and one training iteration in several ways."""

    def __init__(self, name: str, steps: int) -> None:
        torch.manual_seed(0)
        self.xs: Any = torch.randn(steps, BATCH, INPUT)
        self.modules: list[nn.Module] = []
        self.step, self.carry = getattr(self, name)()
        self.layer = {"lstm": nn.LSTM, "gru": nn.GRU}.get(name, lambda *_: None)(INPUT, HIDDEN)
        for module in (*self.modules, *filter(None, [self.layer])):
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)

    # ---- workloads

    def lstm(self) -> tuple[Step, Any]:
        cell = nn.LSTMCell(INPUT, HIDDEN)
        self.modules.append(cell)

        def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[Any, Tensor]:
            carry = cell(x, carry)
            return carry, carry[0].square().mean()

        return step, (torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN))

    def gru(self) -> tuple[Step, Any]:
        cell = nn.GRUCell(INPUT, HIDDEN)
        self.modules.append(cell)

        def step(h: Tensor, x: Tensor) -> tuple[Any, Tensor]:
            h = F.dropout(cell(x, h), 0.1)
            return h, h.square().mean()

        return step, torch.zeros(BATCH, HIDDEN)

    def spiking(self) -> tuple[Step, Any]:
        into, back = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.modules += [into, back]

        def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[Any, Tensor]:
            potential, spikes = carry
            potential = 0.9 * potential * (1 - spikes) + into(x) + back(spikes)
            spikes = Spike.apply(potential - 1)
            return (potential, spikes), spikes.mean()

        return step, (torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN))

    def automaton(self) -> tuple[Step, Any]:
        seen, rule = nn.Conv2d(12, 32, 3, padding=1), nn.Conv2d(32, 12, 1)
        self.modules += [seen, rule]
        self.xs = torch.zeros(len(self.xs), 1)

        def step(grid: Tensor, _: Tensor) -> tuple[Any, Tensor]:
            grid = grid + 0.1 * rule(F.relu(seen(grid)))
            return grid, grid.square().mean()

        return step, torch.randn(4, 12, 16, 16)

    def transformer(self) -> tuple[Step, Any]:
        norm, qkv, out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        wide, narrow = nn.Linear(64, 128), nn.Linear(128, 64)
        self.modules += [norm, qkv, out, wide, narrow]

        def step(h: Tensor, x: Tensor) -> tuple[Any, Tensor]:
            q, k, v = qkv(norm(h) + x.unsqueeze(1)).view(BATCH, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)
            mixed = ((q @ k.transpose(-1, -2)) / 4).softmax(-1) @ v
            h = h + out(mixed.transpose(1, 2).reshape(BATCH, 8, 64))
            h = 0.5 * h + narrow(F.gelu(wide(h)))
            return h, h.square().mean()

        return step, torch.zeros(BATCH, 8, 64)

    # ---- ways to train

    def loss(self, step: Step | None = None) -> Tensor:
        carry, losses = self.carry, []
        for x in self.xs:
            carry, loss = (step or self.step)(carry, x)
            losses.append(loss)
        return torch.stack(losses).sum()

    def plain(self, step: Step | None = None) -> None:
        self.loss(step).backward()

    def fused(self) -> None:
        ys, _ = self.layer(self.xs)
        ys.square().mean((1, 2)).sum().backward()

    def segments(self, sizes: Sequence[int]) -> None:
        """Checkpoints over segments of sizes[0] steps, within them over segments of sizes[1], and so on."""
        self._segments(self.carry, self.xs, sizes)[1].backward()

    def _segments(self, carry: Any, xs: Tensor, sizes: Sequence[int]) -> tuple[Any, Tensor]:
        total = torch.zeros(())
        if not sizes:
            for x in xs:
                carry, loss = self.step(carry, x)
                total = total + loss
            return carry, total
        for part in xs.split(sizes[0]):
            carry, loss = checkpoint(self._segments, carry, part, sizes[1:], use_reentrant=False)
            total = total + loss
        return carry, total

    def budgeted(self, budget_bytes: int, compiled: Any) -> None:
        _, losses = remat.scan(self.step, self.carry, self.xs, budget=budget_bytes, compile=compiled)
        losses.sum().backward()


class Cells:
    """What is measured of one workload: ways to train, and what is to be said of each."""

    def __init__(self, job: Job) -> None:
        self.jobs: dict[str, Callable[[], None]] = {}
        self.notes: dict[str, str] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.add("plain", job.plain)
        self.plain_bytes = self.rows["plain"]["peak_bytes"]

    def add(self, label: str, run: Callable[[], None], **predicted: float) -> None:
        """Run one way twice, measured the second time; one that fails, or takes too long, is left out, and says why."""
        start = time.perf_counter()
        try:
            run()
            first_s = time.perf_counter() - start
            again_s = timed(run).wall_s if first_s > LONG_S else 0.0  # the first call may have compiled
            if again_s > LONG_S:
                self.notes[label] = f"takes {again_s:.0f} s"
                return
            peak_bytes = remat.measure(run).peak_bytes
        except Exception as error:  # a peer's failure is a result
            self.notes[label] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            return
        gc.collect()
        self.rows[label] = {"peak_bytes": peak_bytes, "first_call_s": first_s, **predicted}
        self.jobs[label] = run

    def budgets(self, job: Job) -> None:
        """remat within shares of the plain peak."""
        for compiled in (False, True):
            for share in SHARES[compiled]:
                label = f"remat {'compiled ' if compiled else ''}{share:.0%}"
                budget_bytes = int(self.plain_bytes * share)
                start = time.perf_counter()
                try:
                    made = remat.plan_scan(job.step, job.carry, job.xs, budget=budget_bytes, compile=compiled)
                except remat.InfeasibleBudget as error:
                    self.notes[label] = f"infeasible below {error.smallest_budget_bytes / self.plain_bytes:.1%}"
                    continue
                except Exception as error:  # one cell's failure is not that of the others
                    self.notes[label] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
                    continue
                plan_s = time.perf_counter() - start
                run = partial(job.budgeted, budget_bytes, compiled)
                run()  # shows which gradients arrive, which the plan that is measured knows
                made = remat.plan_scan(job.step, job.carry, job.xs, budget=budget_bytes, compile=compiled)
                self.add(
                    label, run, predicted_bytes=made.peak_bytes, predicted_s=made.seconds, plan_s=plan_s, share=share
                )

    def checkpoints(self, job: Job, steps: int) -> None:
        """Segments of the size with the lowest peak, and segments within segments."""
        root = math.isqrt(steps)
        peaks = {size: remat.measure(partial(job.segments, [size])).peak_bytes for size in (root // 2, root, 2 * root)}
        self.add("checkpoint, best segments", partial(job.segments, [min(peaks, key=peaks.__getitem__)]))
        cube = round(steps ** (1 / 3))
        self.add("checkpoint, nested", partial(job.segments, [cube * cube, cube]))

    def time(self, seconds: float) -> None:
        """Run all in turn with the plain loop, each at least three times and until its part of the seconds is over."""
        spent: dict[str, list[Spent]] = {label: [] for label in self.jobs}
        each, due = seconds / len(self.jobs), list(self.jobs)
        while due:
            for label in dict.fromkeys(("plain", *due)):
                spent[label].append(timed(self.jobs[label]))
            due = [k for k in due if len(spent[k]) < 3 or sum(s.wall_s for s in spent[k]) < each]
        for label, row in self.rows.items():
            own, plain = spent[label], spent["plain"][: len(spent[label])]
            both = {label: own, "plain": plain}
            row["share_of_plain"] = row["peak_bytes"] / self.plain_bytes
            row["wall_s"] = median(s.wall_s for s in own)
            row["cpu_ratio"] = ratio(both, label, "plain")
            row["wall_ratio"] = ratio(both, label, "plain", "wall_s")
            row["rounds"] = len(own)


def measured(name: str, steps: int, seconds: float, threads: int) -> dict[str, Any]:
    """All ways of one workload: what each took, by name, and notes."""
    torch.set_num_threads(threads)
    job = Job(name, steps)
    cells = Cells(job)
    if job.layer is not None:
        cells.add("fused layer", job.fused)
    if threads == 1:
        cells.add("torch.compile of the step", partial(job.plain, torch.compile(job.step, dynamic=False)))
    cells.checkpoints(job, steps)
    cells.budgets(job)
    cells.time(seconds)
    return {"rows": cells.rows, "notes": cells.notes}


def whole(name: str, steps: int, seconds: float) -> dict[str, Any]:
    """The loop through torch.compile, all of it, with one thread; nothing is taken from a cache."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    torch.set_num_threads(1)
    job = Job(name, steps)
    cells, compiled = Cells(job), torch.compile(job.loss, dynamic=False)
    cells.add(WHOLE, lambda: compiled().backward())
    cells.time(seconds)
    return {"rows": cells.rows, "notes": cells.notes}


def whole_in_time(name: str, steps: int) -> dict[str, Any]:
    """What `whole` finds, of that row alone; of fewer steps, in a note, where so many take too long."""
    told = ""
    for count in (steps, SOME_STEPS):
        try:
            found = fresh_process(__file__, "--whole", name, "--steps", str(count), timeout_s=PATIENCE_S)
        except subprocess.TimeoutExpired:
            told += f"{count} steps do not compile in {PATIENCE_S} s; "
            continue
        except subprocess.SubprocessError as error:
            told += f"{count} steps: {type(error).__name__}; "
            continue
        row = found["rows"].get(WHOLE)
        if row is None:
            told += f"{count} steps: {found['notes'][WHOLE]}; "
        elif count == steps:
            return {"rows": {WHOLE: row}, "notes": {WHOLE: told + f"compiles in {row['first_call_s']:.0f} s"}}
        else:
            sizes = f"{row['cpu_ratio']:.2f} × plain at {row['share_of_plain']:.0%} of its peak"
            told += f"{count} steps compile in {row['first_call_s']:.0f} s, {sizes}; "
    return {"rows": {}, "notes": {WHOLE: told.removesuffix("; ")}}


def peers(name: str, steps: int, threads: int) -> dict[str, Any]:
    """What JAX takes, in a process of its own; bytes are XLA's own account of temporary and returned memory."""
    python = os.environ.get("JAX_PYTHON", sys.executable)
    settings = [str(number) for number in (steps, HIDDEN, INPUT, BATCH, threads)]
    script = Path(__file__).parent / "harness" / "jax_loops.py"
    try:
        told = subprocess.run([python, str(script), name, *settings], capture_output=True, timeout=45).stdout
    except subprocess.TimeoutExpired as late:
        told = late.stdout or b""
    found: dict[str, Any] = {}
    for text in told.decode().splitlines():
        found |= json.loads(text)
    return found


def draw(results: dict[str, Any]) -> None:
    """Time over memory, a panel for each workload and number of threads; a way has its colour in all of them."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(STEPS), figsize=(3.4 * len(STEPS), 7.6), squeeze=False, sharey=True)
    colours: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for row, threads in enumerate((1, 2)):
        for panel, name in zip(panels[row], STEPS, strict=True):
            found = results.get(called(name, threads), {"rows": {}})
            lines: dict[str, list[dict[str, Any]]] = {}
            for key, cell in found["rows"].items():
                label = key.rsplit(" ", 1)[0] if "share" in cell else "equinox" if "equinox" in key else key
                lines.setdefault(label, []).append(cell)
            for label, cells in lines.items():
                marker = {"remat": "s--", "remat compiled": "o-"}.get(label, "*")
                colour = colours.setdefault(label, mpl.colormaps["tab20"](len(colours) * 2 % 20 + len(colours) // 10))
                sizes, times = [c["share_of_plain"] for c in cells], [c["wall_ratio"] for c in cells]
                (drawn[label],) = panel.plot(sizes, times, marker, color=colour)
            title = called(name, threads)
            panel.set(title=title, xscale="log", xlim=(0.015, 4), ylim=(0, 3), xlabel="peak / plain")
            panel.grid(alpha=0.3)
        panels[row][0].set_ylabel("wall time / plain")
    figure.legend(drawn.values(), drawn, loc="lower center", ncols=5, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(RESULTS / "loops.png", dpi=110)
    pyplot.close(figure)


def line(name: str, threads: int, label: str, row: dict[str, Any], note: str) -> list[str]:
    """One line of the table."""
    predicted = f"{row['predicted_bytes'] / row['peak_bytes']:.3f}" if "predicted_bytes" in row else ""
    against = f"{row['wall_s'] / row['predicted_s']:.2f}" if "predicted_s" in row else ""
    sizes = [f"{row['peak_bytes'] / 2**20:.2f}", f"{row['share_of_plain']:.1%}"]
    times = [f"{row[key]:.2f}" if key in row else "" for key in ("cpu_ratio", "wall_ratio")]
    first = f"{row['plan_s'] + row['first_call_s']:.1f}" if "plan_s" in row else ""
    return [name, str(threads), label, *sizes, *times, predicted, against, first, note]


COLUMNS = [
    "workload", "threads", "how", "peak MiB", "of plain", "CPU time / plain", "wall / plain",
    "predicted / measured peak", "wall / predicted", "plan and first call s", "",
]  # fmt: skip
NOTES = [
    "Budgets are shares of the plain loop's measured peak; parameter gradients are there before in every way. A cell "
    "that is missing was refused or failed, as its last column says. Wall time over the predicted one compares with "
    "stage times measured once, when the plan was made. JAX's bytes are XLA's own account; its times, like all "
    "others, stand beside the plain PyTorch loop's. torch.compile is tried with one thread, as it takes longest; the "
    "whole loop by itself (--whole-loop), with other work on the machine. "
    "What a run leaves out keeps its rows. Faster at equal peak are JAX's scans, as XLA compiles a loop as a whole "
    "where here every step is a few calls from Python; and torch.compile of the whole spiking loop at half of plain's "
    "peak, one program of all steps, which takes minutes to compile and is good for one length.",
]


def lines(results: dict[str, Any]) -> list[list[str]]:
    """The table."""
    table: list[list[str]] = []
    for key, found in results.items():
        name, threads = key.split(", ")
        count, notes = int(threads.split()[0]), found["notes"]
        table += [line(name, count, label, row, notes.get(label, "")) for label, row in found["rows"].items()]
        table += [[name, str(count), k, *[""] * 7, note] for k, note in notes.items() if k not in found["rows"]]
    return table


def kept(results: dict[str, Any], *, show: bool) -> None:
    """The results so far."""
    order = [called(name, threads) for name in STEPS for threads in (1, 2)]
    results = {key: results[key] for key in sorted(results, key=order.index)}
    table = lines(results)
    publish("loops", "Loops inside a budget, compiled and not", COLUMNS, table, NOTES, show=show)
    RESULTS.joinpath("loops.json").write_text(json.dumps({"where": where(), "results": results}, indent=1))
    draw({key: found for key, found in results.items() if found["rows"]})


def called(name: str, threads: int) -> str:
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="of every workload; they have defaults of their own")
    parser.add_argument("--seconds", type=float, default=60, help="of timing for each workload and number of threads")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--workloads", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--whole-loop", action="store_true", help="only torch.compile of whole loops, with one thread")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--whole", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.whole:
        print(json.dumps(whole(options.whole, options.steps, 10)))
        return
    if options.child:
        print(json.dumps(measured(options.child, options.steps, options.seconds, options.threads[0])))
        return
    path = RESULTS / "loops.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}  # what is not run stays
    for name in options.workloads:
        steps = options.steps or STEPS[name]
        if options.whole_loop:
            before = results.setdefault(called(name, 1), {"rows": {}, "notes": {}})
            found = whole_in_time(name, steps)
            for kind in ("rows", "notes"):
                before[kind].pop(WHOLE, None)
                before[kind].update(found[kind])
            kept(results, show=False)
            continue
        for threads in options.threads:
            settings = ("--steps", str(steps), "--seconds", str(options.seconds), "--threads", str(threads))
            try:
                found = fresh_process(__file__, "--child", name, *settings, timeout_s=600)
                if name in ("lstm", "gru"):
                    found["rows"].update(_beside(peers(name, steps, threads), found["rows"]["plain"]))
            except (subprocess.SubprocessError, ValueError) as error:
                found = {"rows": {}, "notes": {"failed": type(error).__name__}}
                print(getattr(error, "stderr", None) or error, file=sys.stderr)
            before = results.get(called(name, threads), {})
            for kind in ("rows", "notes"):
                found[kind].update({WHOLE: before[kind][WHOLE]} if WHOLE in before.get(kind, {}) else {})
            results[called(name, threads)] = found
            kept(results, show=False)
    kept(results, show=True)


def _beside(rows: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Rows of another process, compared with the plain loop's."""
    for row in rows.values():
        row["share_of_plain"] = row["peak_bytes"] / plain["peak_bytes"]
        row["wall_ratio"] = row["wall_s"] / plain["wall_s"]
    return rows


if __name__ == "__main__":
    main()
