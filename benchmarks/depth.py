"""Chen's headline, a residual network of a thousand layers, and how memory grows with depth.

Pre-activation ResNets (He et al. 2016) of 9n + 2 layers, bottleneck blocks with batch norm, small images; gradients of
parameters are allocated before. At 1001 layers, all in turn in one process: plain, torch's checkpoints in five
arrangements, remat within shares of the plain measured peak, and remat within the measured peak of each arrangement.
Over depths, planned from two measured ones: the least memory at one extra forward at most, and the least at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import remat
from harness import RESULTS, publish
from remat.deep import Forward, Training

_MEASURED = (6, 18)  # blocks of each width
DEPTHS = (164, 326, 650, 1001)
SHARES = (7 / 48, 0.10, 0.05, 0.02)
TARGETS = dict(zip(SHARES, (1.28, 1.30, 1.36, 1.65), strict=True))  # with a backward of two forwards and no overhead


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

    def peers(self) -> dict[str, Forward]:
        """The arrangements of torch's checkpoints."""
        root = round(math.sqrt(len(self.net)))
        counts = {f"checkpoint_sequential, {n} segments": n for n in (root // 2, 2 * root)}
        return {
            "checkpoint, every block": self.per_block,
            f"Chen's sqrt(n): checkpoint_sequential, {root} segments": partial(self.segments, root),
            **{name: partial(self.segments, count) for name, count in counts.items()},
            "checkpoint, nested halves": self.nested,
        }


@dataclass
class Way:
    """A way of running the network, and what it came to.

    Attributes:
        forward: the way.
        share, budget_bytes, plan: of ours: the share of plain that was asked for, if it was one; budget and plan.
        peak_bytes: measured; 0 before.
        exact: whether all gradients are the plain run's.
        spent_s: processor seconds, a round each.
        failure: why it could not be run.
    """

    forward: Forward
    share: float = 0.0
    budget_bytes: int = 0
    plan: remat.Plan | None = None
    peak_bytes: int = 0
    exact: bool = False
    spent_s: list[float] = field(default_factory=list)
    failure: str = ""


def attempted(way: Way, work: Callable[[], None]) -> None:
    """Do some work on a way; where it fails the table says so, and goes on."""
    if way.failure:
        return
    try:
        work()
    except (RuntimeError, ValueError, remat.RematError) as error:
        way.failure = " ".join(str(error).split())[:120]


def thousand(depth: int, batch: int, size: int, rounds: int) -> None:
    """One table: memory and time of every way, at one depth."""
    job = Job(depth, batch, size)
    plain = Way(job.net.__call__)
    job.iterate(plain.forward)
    wanted = job.gradients(plain.forward)
    ways = {"plain": plain, **{name: Way(forward) for name, forward in job.peers().items()}}
    notes: list[str] = []

    def look(way: Way) -> None:
        """Measure a way's peak and compare its gradients."""
        way.peak_bytes = remat.measure(partial(job.iterate, way.forward)).peak_bytes
        pairs = zip(wanted, job.net.parameters(), strict=True)
        way.exact = all(p.grad is not None and torch.equal(w, p.grad) for w, p in pairs)

    def add(name: str, budget_bytes: int, share: float = 0.0) -> None:
        """One of ours."""
        begin, way = time.process_time(), Way(job.budgeted(budget_bytes), share, budget_bytes)
        ways[name] = way
        attempted(way, lambda: setattr(way, "plan", remat.plan_chain(job.net, job.images, budget=budget_bytes)))
        spent = time.process_time() - begin
        notes.append(f"{name}: measuring blocks, where new, and planning took {spent:.1f} s of processor time.")
        attempted(way, lambda: look(way))

    for way in list(ways.values()):
        attempted(way, partial(look, way))
    for share in SHARES:
        add(f"remat, {share:.1%}", int(plain.peak_bytes * share), share)
    for name in list(job.peers()):
        if not ways[name].failure:
            add(f"remat in the peak of: {name}", ways[name].peak_bytes)
    wanted.clear()
    gc.collect()
    forward_s = []
    for _ in range(rounds):
        for way in ways.values():
            attempted(way, lambda way=way: way.spent_s.append(seconds(partial(job.iterate, way.forward))))
        forward_s.append(seconds(partial(without_gradients, job)))
    best_s = remat.plan_chain(job.net, job.images, budget=2 * plain.peak_bytes).seconds
    part = median(f / p for f, p in zip(forward_s, plain.spent_s, strict=True))
    tables(depth, batch, size, ways, best_s, part, notes)


def without_gradients(job: Job) -> None:
    """A forward alone."""
    with torch.no_grad():
        job.net(job.images)


def seconds(work: Callable[[], None]) -> float:
    """Of the processor."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def times(way: Way, plain: Way) -> float:
    """Its time over that of plain, the median of ratios within a round."""
    return median(a / b for a, b in zip(way.spent_s, plain.spent_s, strict=True))


def tables(
    depth: int, batch: int, size: int, ways: dict[str, Way], best_s: float, part: float, notes: list[str]
) -> None:
    """What came out: all ways, and ours against each peer in the same memory."""
    plain = ways["plain"]
    rows = [[name, *_columns(way, plain, best_s, part)] for name, way in ways.items()]
    notes = [
        f"Plain takes {min(plain.spent_s):.2f} s of processor time, a forward without gradients {part:.0%} of that; "
        f"times are ratios, medians of {len(plain.spent_s)} rounds taken in turn.",
        "Floor: 1 + (1 − share) × that part: what no schedule of whole tapes can be under, without any overhead. The "
        "targets suppose that a backward takes two forwards.",
        *notes,
    ]
    columns = ["way", "peak", "of plain", "time / plain", "floor", "target", "foreseen", "time / foreseen"]
    title = f"A residual network of {depth} layers, batch {batch}, {size}×{size}"
    publish("depth", title, [*columns, "within", "off", "runs", "exact"], rows, notes)
    publish("depth_peers", f"{title}: at the peak of each peer", *_against_peers(ways))


def _columns(way: Way, plain: Way, best_s: float, part: float) -> Iterator[str]:
    if way.failure:
        yield from (way.failure, *[""] * 10)
        return
    ratio, share = times(way, plain), way.peak_bytes / plain.peak_bytes
    yield from (f"{way.peak_bytes / 2**20:.1f} MiB", f"{share:.2%}", f"{ratio:.3f}", f"{1 + (1 - share) * part:.3f}")
    yield f"{TARGETS[way.share]:.2f}" if way.share else ""
    if way.plan is None:
        yield from [""] * 5
    else:
        foreseen = way.plan.seconds / best_s
        off = (way.plan.peak_bytes - way.peak_bytes) / way.budget_bytes
        yield from (f"{foreseen:.3f}", f"{ratio / foreseen:.3f}", "yes" if way.peak_bytes <= way.budget_bytes else "NO")
        yield from (f"{off:.2%}", f"{way.plan.forward_runs / way.plan.chain.length:.2f}")
    yield "yes" if way.exact else "NO"


def _against_peers(ways: dict[str, Way]) -> tuple[list[str], list[list[str]], list[str]]:
    rows, plain = [], ways["plain"]
    for name, ours in ways.items():
        peer = ways.get(name.removeprefix("remat in the peak of: "))
        if peer is None or peer is ours or peer.failure:
            continue
        rows.append([name.removeprefix("remat in the peak of: "), f"{peer.peak_bytes / 2**20:.1f} MiB"])
        if ours.failure:
            rows[-1] += ["", "", "", ours.failure]
            continue
        theirs, own = times(peer, plain), times(ours, plain)
        rows[-1] += [
            f"{ours.peak_bytes / 2**20:.1f} MiB",
            f"{theirs:.3f}",
            f"{own:.3f}",
            "yes" if own < theirs else "NO",
        ]
    columns = ["peer", "its peak", "remat's peak", "its time / plain", "remat's", "remat faster"]
    return columns, rows, ["remat's budget is the peer's measured peak."]


def scaling(depths: tuple[int, ...], batch: int, size: int) -> None:
    """Another: least memory over depth, with at most one extra forward, and at all."""
    rows, points = [], []
    few, more = (_profiled(9 * blocks + 2, batch, size) for blocks in _MEASURED)
    for depth in depths:
        chain = deepened(few, more, (depth - 2) // 9)
        whole, smallest = remat.plan(chain, 2**50), _smallest(chain)
        extra_s = whole.seconds + sum(count * stage.forward_s for stage, count in chain.runs)
        fits = partial(_fits, chain, extra_s)
        low, high = smallest, whole.peak_bytes
        if points:  # the row before says where about to look
            ratio, near = chain.length / points[-1][0], points[-1][2]
            low, high = max(low, int(near * ratio**0.3)), min(high, int(near * ratio**0.8))
            low, high = (low if not fits(low) else smallest), (high if fits(high) else whole.peak_bytes)
        while high - low > max(low // 50, 1):  # the least budget with one extra forward at most
            middle = math.isqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        points.append((chain.length, whole.peak_bytes, high, smallest))
        rows.append([str(depth), str(chain.length), *(f"{size_ / 2**20:.2f} MiB" for size_ in points[-1][1:])])
    exponents = [_exponent([(p[0], p[k]) for p in points]) for k in (1, 2, 3)]
    rows.append(["exponent", "", *(f"{exponent:.2f}" for exponent in exponents)])
    publish(
        "depth_scaling",
        f"Memory over depth, residual networks, batch {batch}, {size}×{size}",
        ["layers", "blocks", "plain", "one extra forward at most", "least"],
        rows,
        [
            "Planned peaks, from what was measured at 56 and 164 layers, inner blocks repeated. The exponent "
            "is that of a power of the number of blocks, fitted to all rows, nothing subtracted."
        ],
    )
    (RESULTS / "depth_scaling.json").write_text(json.dumps(points) + "\n")


def _fits(chain: remat.Chain, most_s: float, budget_bytes: int) -> bool:
    return remat.plan(chain, budget_bytes).seconds <= most_s


def _profiled(depth: int, batch: int, size: int) -> remat.Chain:
    job = Job(depth, batch, size)
    return remat.profile(job.net, job.images, progress=False)


def deepened(few: remat.Chain, more: remat.Chain, blocks: int) -> remat.Chain:
    """The same network with `blocks` blocks of each width, of which all but the first are alike.

    What every block adds beside its stage, statistics of its batch norms for instance, is the difference between two
    networks that were measured.
    """
    runs = tuple((stage, blocks - 1 if count > 1 else 1) for stage, count in more.runs)
    assert sum(count > 1 for _, count in runs) == 3, "inner blocks of three widths"
    added = -(-(more.output_bytes - few.output_bytes) // (_MEASURED[1] - _MEASURED[0]))
    return remat.Chain(
        runs,
        final_carry_bytes=more.final_carry_bytes,
        output_bytes=more.output_bytes + added * (blocks - _MEASURED[1]),
        output_gradient_bytes=more.output_gradient_bytes,
    )


def _smallest(chain: remat.Chain) -> int:
    try:
        return remat.plan(chain, 1).peak_bytes
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["thousand", "scaling"])
    parser.add_argument("--quick", action="store_true", help="half the batch and one round")
    given = parser.parse_args()
    if given.quick:
        given.batch, given.rounds = given.batch // 2, 1
    torch.set_num_threads(1)
    if given.only != "thousand":
        scaling(tuple(given.depths), given.batch, given.size)
    if given.only != "scaling":
        thousand(given.depth, given.batch, given.size, given.rounds)
