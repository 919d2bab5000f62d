"""What does Chen's headline network need, and what can be planned for it, without a machine that holds it?

The pre-activation ResNet of 1001 layers (333 bottleneck blocks) on images of 224 x 224, batch 32, on the device "meta":
nothing is allocated and nothing runs. Chen et al. 2016 report 48 GB, and 7 GB at 30 % more time. Rates are those of a
GPU of that time, so seconds are estimates; ratios of times matter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from harness import publish
from remat.sizes import format_bytes

BLOCKS = (83, 84, 83, 83)  # of three layers each; with the stem and the head 1001
SHARES = (1.0, 0.75, 0.5, 0.3, 7 / 48, 0.10, 0.05, 0.03, 0.02)
RATES = remat.Rates(flops_per_s=6e12, bytes_per_s=3e11, operator_s=1e-5, device_type="cuda")


class Bottleneck(nn.Module):
    """He et al. 2016b, full pre-activation; the shortcut is projected where shapes change."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.reduce = nn.Conv2d(channels, width, 1, bias=False)
        self.mix = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        projected = stride != 1 or channels != 4 * width
        self.shortcut = nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False) if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(F.relu(self.norms[0](x)))
        y = self.mix(F.relu(self.norms[1](y)))
        return self.shortcut(x) + self.expand(F.relu(self.norms[2](y)))


def network(depth: tuple[int, ...] = BLOCKS) -> Iterator[nn.Module]:
    """The blocks of the network, stem and head among them."""
    yield nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.MaxPool2d(3, 2, 1))
    channels = 64
    for stage, count in enumerate(depth):
        width = 64 * 2**stage
        for index in range(count):
            yield Bottleneck(channels, width, 2 if stage and not index else 1)
            channels = 4 * width
    yield nn.Sequential(
        nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)
    )


def table(batch: int) -> None:
    with torch.device("meta"):
        blocks = list(network())
        images = torch.empty(batch, 3, 224, 224)
    for block in blocks:
        for parameter in block.parameters():
            parameter.grad = torch.empty_like(parameter)  # as in the second iteration and later
    begin = time.process_time()
    chain = remat.profile(blocks, images, rates=RATES)
    profiled_s = time.process_time() - begin
    plain = remat.plan(chain, "1TiB", "keep-all")
    rows = []
    for share in (*SHARES, 0.0):
        begin = time.process_time()
        try:
            made = remat.plan(chain, max(int(share * plain.peak_bytes), 1))
        except remat.InfeasibleBudget as refused:
            made = remat.plan(chain, refused.smallest_budget_bytes)
        planned_s = time.process_time() - begin
        rows.append(
            [
                f"{made.budget_bytes / plain.peak_bytes:.2%}",
                format_bytes(made.peak_bytes),
                f"{made.seconds / plain.seconds:.3f}",
                f"{made.forward_runs / chain.length:.2f}",
                f"{planned_s:.2f}",
            ]
        )
    notes = [
        f"{chain.length} blocks, {len({stage for stage, _ in chain.runs})} kinds, batch {batch}; profiled on paper "
        f"in {profiled_s:.1f} s of processor time. Keeping everything: {format_bytes(plain.peak_bytes)} and, at "
        f"{RATES.flops_per_s:.3g} operations and {RATES.bytes_per_s:.3g} bytes a second, {plain.seconds:.2f} s.",
        "",
        "Chen et al. 2016 report 48 GB without, 7 GB with recomputation (7/48 = 14.6 %) at 1.30 times the time.",
    ]
    columns = ["share of plain", "peak", "time / plain", "forward runs a block", "planning, s"]
    publish("imagenet_on_paper", "ImageNet's ResNet of 1001 layers on paper", columns, rows, notes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    table(parser.parse_args().batch)
