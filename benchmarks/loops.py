"""Is a traced loop inside a small budget as fast as the loop that keeps everything?

LSTM and GRU with dropout (hidden 256, input 64, batch 16), a spiking network, a neural cellular automaton and a small
transformer-like step, T steps with a loss in each. Plain loop, PyTorch's fused layer, `torch.utils.checkpoint` over
segments, and remat as it is and compiled, interleaved in one fresh process for each workload and number of threads;
budgets as shares of the plain loop's measured peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from harness import RESULTS, fresh_process, interleaved, publish, ratio, where

SHARES = (0.5, 0.2, 0.1, 0.05, 0.02)
HIDDEN, INPUT, BATCH = 256, 64, 16
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

    def plain(self) -> None:
        carry, losses = self.carry, []
        for x in self.xs:
            carry, loss = self.step(carry, x)
            losses.append(loss)
        torch.stack(losses).sum().backward()

    def fused(self) -> None:
        ys, _ = self.layer(self.xs)
        ys.square().mean((1, 2)).sum().backward()

    def segments(self, size: int) -> None:
        def run(carry: Any, xs: Tensor) -> tuple[Any, Tensor]:
            losses = []
            for x in xs:
                carry, loss = self.step(carry, x)
                losses.append(loss)
            return carry, torch.stack(losses).sum()

        carry, total = self.carry, torch.zeros(())
        for xs in self.xs.split(size):
            carry, loss = checkpoint(run, carry, xs, use_reentrant=False)
            total = total + loss
        total.backward()

    def budgeted(self, budget_bytes: int, compiled: Any) -> None:
        _, losses = remat.scan(self.step, self.carry, self.xs, budget=budget_bytes, compile=compiled)
        losses.sum().backward()


def measured(name: str, steps: int, rounds: int, threads: int) -> dict[str, Any]:
    """All ways of one workload, interleaved: peak bytes and seconds, by name."""
    torch.set_num_threads(threads)
    job = Job(name, steps)
    job.plain()
    peak = remat.measure(job.plain).peak_bytes
    jobs: dict[str, Callable[[], None]] = {"plain": job.plain}
    if job.layer is not None:
        jobs["fused layer"] = job.fused
    jobs["checkpoint, segments of √T"] = partial(job.segments, math.isqrt(steps))
    notes, predicted = {}, {}
    for compiled in (False, True):
        for share in SHARES:
            label = f"remat {'compiled ' if compiled else ''}{share:.0%}"
            budget_bytes = int(peak * share)
            start = time.perf_counter()
            try:
                made = remat.plan_scan(job.step, job.carry, job.xs, budget=budget_bytes, compile=compiled)
            except remat.InfeasibleBudget as error:
                notes[label] = f"infeasible below {error.smallest_budget_bytes / peak:.1%}"
                continue
            jobs[label] = partial(job.budgeted, budget_bytes, compiled)
            jobs[label]()
            notes[label] = f"first call {time.perf_counter() - start:.1f} s"
            predicted[label] = made.peak_bytes
    peaks = {label: remat.measure(run).peak_bytes for label, run in jobs.items()}
    gc.collect()
    spent = interleaved(jobs, rounds)
    rows = {
        label: {
            "peak_bytes": peaks[label],
            "share": peaks[label] / peak,
            "predicted_bytes": predicted.get(label),
            "wall_s": median(s.wall_s for s in spent[label]),
            "cpu_ratio": ratio(spent, label, "plain"),
            "wall_ratio": ratio(spent, label, "plain", "wall_s"),
        }
        for label in jobs
    }
    return {"rows": rows, "notes": notes}


def draw(results: dict[str, Any]) -> None:
    """Time over memory, one panel a workload."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 4), squeeze=False)
    for panel, (name, found) in zip(panels[0], results.items(), strict=True):
        for label, marker in (("remat compiled", "o-"), ("remat ", "s--")):
            rows = [
                row
                for key, row in found["rows"].items()
                if key.startswith(label) and (label != "remat " or "compiled" not in key)
            ]
            panel.plot([r["share"] for r in rows], [r["cpu_ratio"] for r in rows], marker, label=label.strip())
        for key in ("plain", "fused layer", "checkpoint, segments of √T"):
            if key in found["rows"]:
                panel.plot(found["rows"][key]["share"], found["rows"][key]["cpu_ratio"], "*", label=key)
        panel.set(title=name, xscale="log", xlabel="peak / plain", ylabel="processor time / plain", ylim=(0, None))
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "loops.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workloads", nargs="+", default=["lstm", "gru", "spiking", "automaton", "transformer"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child, options.steps, options.rounds, options.threads[0])))
        return
    rows, results = [], {}
    for name in options.workloads:
        for threads in options.threads:
            settings = ("--steps", str(options.steps), "--rounds", str(options.rounds), "--threads", str(threads))
            found = results[f"{name}, {threads} thread{'s' * (threads > 1)}"] = fresh_process(
                __file__, "--child", name, *settings
            )
            for label, row in found["rows"].items():
                numbers = (f"{row['peak_bytes'] / 2**20:.2f}", f"{row['share']:.1%}")
                ratios = (f"{row['cpu_ratio']:.2f}", f"{row['wall_ratio']:.2f}")
                rows.append([name, str(threads), label, *numbers, *ratios, found["notes"].get(label, "")])
            rows += [
                [name, str(threads), k, "", "", "", "", v] for k, v in found["notes"].items() if k not in found["rows"]
            ]
    columns = ["workload", "threads", "how", "peak MiB", "of plain", "CPU time / plain", "wall / plain", ""]
    publish("loops", f"Loops of {options.steps} steps inside a budget, compiled and not", columns, rows)
    RESULTS.joinpath("loops.json").write_text(json.dumps({"where": where(), "results": results}, indent=1))
    draw(results)


if __name__ == "__main__":
    main()
