"""Chen's headline, a residual network of a thousand layers, and how memory grows with depth.

Pre-activation ResNets (He et al. 2016) of 9n + 2 layers, bottleneck blocks with batch norm, small images; gradients of
parameters are allocated before. At 1001 layers: plain, torch's checkpoints in four arrangements, and budgets as shares
of the plain measured peak. Over depths: the least memory at one extra forward at most, and the least at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import remat
from harness import RESULTS, interleaved, publish, ratio
from remat.deep import Forward, Training

DEPTHS = (56, 164, 326, 650, 1001)
SHARES = (7 / 48, 0.10, 0.05, 0.02)


class Job(Training):
    """A training iteration with one way of running the network or another."""

    def per_block(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def segments(self, count: int, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.net, count, x, use_reentrant=False)

    def nested(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Chen's recursion: a checkpoint around each half."""
        stop = len(self.net) if stop is None else stop
        if stop - start == 1:
            return self.net[start](x)
        middle = (start + stop) // 2
        x = checkpoint(partial(self.nested, start=start, stop=middle), x, use_reentrant=False)
        return checkpoint(partial(self.nested, start=middle, stop=stop), x, use_reentrant=False)


def thousand(depth: int, batch: int, size: int, rounds: int) -> None:
    """One table: memory and time of every way, at one depth."""
    job = Job(depth, batch, size)
    plain = job.net.__call__
    job.iterate(plain)
    plain_bytes = remat.measure(lambda: job.iterate(plain)).peak_bytes
    root = round(math.sqrt(len(job.net)))
    ways: dict[str, Forward] = {
        "plain": plain,
        "checkpoint, every block": job.per_block,
        f"checkpoint_sequential, {root} segments (sqrt n)": partial(job.segments, root),
        f"checkpoint_sequential, {2 * root} segments": partial(job.segments, 2 * root),
        "checkpoint, nested halves": job.nested,
    }
    plans: dict[str, remat.Plan] = {}
    notes = []
    for share in SHARES:
        budget = int(plain_bytes * share)
        begin = time.process_time()
        try:
            made = remat.plan_chain(job.net, job.images, budget=budget)
        except remat.InfeasibleBudget as refusal:
            notes.append(f"{share:.1%}: infeasible, the least is {refusal.smallest_budget_bytes / plain_bytes:.2%}.")
            continue
        name = f"remat, {share:.1%}"
        spent = time.process_time() - begin
        notes.append(f"{name}: measuring blocks and planning took {spent:.1f} s of processor time.")
        ways[name], plans[name] = job.budgeted(budget), made
    peaks = {name: remat.measure(partial(job.iterate, way)).peak_bytes for name, way in ways.items()}
    wanted = job.gradients(plain)
    exact = {name: all(map(torch.equal, wanted, job.gradients(way))) for name, way in ways.items()}
    del wanted
    gc.collect()
    spent_s = interleaved({name: partial(job.iterate, way) for name, way in ways.items()}, rounds)
    rows, best = [], remat.plan_chain(job.net, job.images, budget=2 * plain_bytes).seconds
    for name in ways:
        times = ratio(spent_s, name, "plain")
        row = [name, f"{peaks[name] / 2**20:.1f} MiB", f"{peaks[name] / plain_bytes:.2%}", f"{times:.3f}"]
        if name in plans:
            made = plans[name]
            foreseen = made.seconds / best
            off = (made.peak_bytes - peaks[name]) / made.budget_bytes
            within = "yes" if peaks[name] <= made.budget_bytes else "NO"
            runs = made.forward_runs / made.chain.length
            row += [f"{foreseen:.3f}", f"{times / foreseen:.3f}", within, f"{off:.2%}", f"{runs:.2f}"]
        else:
            row += [""] * 5
        rows.append([*row, "yes" if exact[name] else "NO"])
    plain_s = min(spent.cpu_s for spent in spent_s["plain"])
    publish(
        "depth",
        f"A residual network of {depth} layers, batch {batch}, {size}×{size}",
        ["way", "peak", "of plain", "time / plain", "foreseen", "time / foreseen", "within", "off", "runs", "exact"],
        rows,
        [f"Plain takes {plain_s:.2f} s of processor time; times are ratios of it, medians of {rounds} rounds.", *notes],
    )


def scaling(depths: tuple[int, ...], batch: int, size: int) -> None:
    """Another: least memory over depth, with at most one extra forward, and at all."""
    rows, points = [], []
    for depth in depths:
        job = Job(depth, batch, size)
        whole = remat.plan_chain(job.net, job.images, budget="1TiB")
        smallest = remat.plan_chain(job.net, job.images, budget=_smallest(job)).peak_bytes
        extra_s = whole.seconds + sum(count * stage.forward_s for stage, count in whole.chain.runs)
        low, high = smallest, whole.peak_bytes
        while high - low > max(low // 50, 1):  # the least budget with one extra forward at most
            middle = math.isqrt(low * high)
            fits = remat.plan_chain(job.net, job.images, budget=middle).seconds <= extra_s
            low, high = (low, middle) if fits else (middle, high)
        points.append((len(job.net), whole.peak_bytes, high, smallest))
        rows.append([str(depth), str(len(job.net)), *(f"{size_ / 2**20:.2f} MiB" for size_ in points[-1][1:])])
    exponents = [_exponent([(p[0], p[k]) for p in points]) for k in (1, 2, 3)]
    rows.append(["exponent", "", *(f"{exponent:.2f}" for exponent in exponents)])
    publish(
        "depth_scaling",
        f"Memory over depth, residual networks, batch {batch}, {size}×{size}",
        ["layers", "blocks", "plain", "one extra forward at most", "least"],
        rows,
        ["Planned peaks; the exponent is that of a power of the number of blocks, fitted to all rows."],
    )
    (RESULTS / "depth_scaling.json").write_text(json.dumps(points) + "\n")


def _smallest(job: Job) -> int:
    try:
        return remat.plan_chain(job.net, job.images, budget=1).peak_bytes
    except remat.InfeasibleBudget as refusal:
        return refusal.smallest_budget_bytes


def _exponent(points: list[tuple[int, int]]) -> float:
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - mean_x) ** 2 for x in xs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=1001)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["thousand", "scaling"])
    parser.add_argument("--quick", action="store_true", help="half the batch and one round: about three minutes")
    given = parser.parse_args()
    if given.quick:
        given.batch, given.rounds = given.batch // 2, 1
    torch.set_num_threads(1)
    if given.only != "thousand":
        scaling(tuple(given.depths), given.batch, given.size)
    if given.only != "scaling":
        thousand(given.depth, given.batch, given.size, given.rounds)
