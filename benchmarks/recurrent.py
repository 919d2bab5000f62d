"""What does a byte budget cost PyTorch's own LSTM, and how does it compare to a plain call?

nn.LSTM of four layers, hidden 128, input 64, batch 16, T = 1000; budgets as shares of the plain call's measured peak,
outputs and their gradients included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn

import remat
from harness import interleaved, publish, ratio

SHARES = (1.0, 0.5, 0.2, 0.1, 0.05)
LAYERS, HIDDEN, INPUT, BATCH = 4, 128, 64, 16


def train(layer: nn.LSTM, xs: torch.Tensor) -> None:
    """One forward and backward, with a gradient for every output."""
    ys, _ = layer(xs)
    ys.backward(torch.ones_like(ys))


def gradients(layer: nn.LSTM, xs: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    train(layer, xs)
    return [parameter.grad.clone() for parameter in layer.parameters()]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest relative error of a gradient, in the 2-norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def table(steps: int, rounds: int) -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(INPUT, HIDDEN, LAYERS)
    xs = torch.randn(steps, BATCH, INPUT)
    double = nn.LSTM(INPUT, HIDDEN, LAYERS).double()
    double.load_state_dict(plain.state_dict())
    exact = gradients(double, xs.double())
    plain_error = distance(gradients(plain, xs), exact)
    peak = remat.measure(partial(train, plain, xs)).peak_bytes
    jobs: dict[str, Callable[[], None]] = {"plain": partial(train, plain, xs)}
    rows: dict[str, list[str]] = {}
    for share in SHARES:
        budget_bytes = int(share * peak)
        layer = remat.recurrent(plain, budget=budget_bytes)
        row = rows[f"{share:.0%}"] = [f"{share:.0%}", f"{budget_bytes:,}"]
        try:
            error = distance(gradients(layer, xs), exact)
        except remat.InfeasibleBudget as refused:
            row.append(f"infeasible below {refused.smallest_budget_bytes:,}")
            continue
        job = jobs[f"{share:.0%}"] = partial(train, layer, xs)
        reached = remat.measure(job).peak_bytes
        row += [f"{reached:,}", "yes" if reached <= budget_bytes else "NO", f"{error / plain_error:.2f}"]
    spent = interleaved(jobs, rounds)
    for name in rows.keys() & jobs.keys():
        rows[name] += [f"{ratio(spent, name, 'plain'):.3f}", f"{ratio(spent, name, 'plain', 'wall_s'):.3f}"]
    columns = ["budget", "bytes", "measured peak", "within", "gradient error / plain's"]
    columns += ["CPU time / plain", "wall time / plain"]
    notes = [
        f"Plain call: peak {peak:,} bytes, median {median(s.cpu_s for s in spent['plain']):.3f} s CPU, "
        f"{median(s.wall_s for s in spent['plain']):.3f} s wall. {rounds} rounds, interleaved, "
        f"{torch.get_num_threads()} threads.",
        "",
        f"Errors: largest relative distance of a parameter's gradient from that in float64; plain {plain_error:.1e}.",
    ]
    title = f"A byte budget for nn.LSTM, {LAYERS} layers, {steps} steps"
    publish("recurrent", title, columns, list(rows.values()), notes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    table(given.steps, given.rounds)
