"""A ResNet of 1001 layers, the network of Chen et al. (2016), in a fraction of its memory.

Layers that follow each other go into `remat.chain`, here all there are: the stem, 333 bottlenecks of three convolutions
in groups of different size, the head and the loss, so that the budget is the whole network's. It plans for their
unequal costs, in bytes and seconds. Batch-norm statistics move once an iteration, as they do in the plain network.

Try: python examples/deep_resnet.py --blocks 333 --share 0.1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from comparison import Comparison, compare


class Bottleneck(nn.Module):
    """A pre-activation residual block of three convolutions (He et al. 2016)."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        inner = leaving // 4
        self.layers = nn.Sequential(
            nn.BatchNorm2d(entering), nn.ReLU(), nn.Conv2d(entering, inner, 1, bias=False),
            nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, leaving, 1, bias=False),
        )  # fmt: skip
        straight = entering == leaving and stride == 1
        self.shortcut = nn.Identity() if straight else nn.Conv2d(entering, leaving, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.layers(x)


class ResNet(nn.Module):
    """Three groups of blocks; each but the first halves the picture and doubles the channels."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        channels, made = width, []
        for group in range(3):
            for k in range(blocks // 3):
                made.append(Bottleneck(channels, width * 2**group, 2 if group and not k else 1))
                channels = width * 2**group
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(channels, 10)

    def loss(self, pictures: Tensor, labels: Tensor, budget: int | None = None) -> Tensor:
        def judge(x: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(x.mean((2, 3))), labels)

        layers, x = [self.stem, *self.blocks, judge], pictures
        if budget is not None:
            return remat.chain(layers, x, budget=budget)  # the only change
        for layer in layers:
            x = layer(x)
        return x


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A very deep ResNet within a share of the memory.")
    parser.add_argument("--blocks", type=int, default=333, help="of three layers each")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--size", type=int, default=16, help="of a picture")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.15)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    network = ResNet(options.blocks, options.width)
    pictures, labels = torch.randn(options.batch, 3, options.size, options.size), torch.randint(10, (options.batch,))
    print(f"{3 * len(network.blocks) + 2} layers")
    return compare(network.parameters(), lambda budget: network.loss(pictures, labels, budget), options.share)


if __name__ == "__main__":
    main()
