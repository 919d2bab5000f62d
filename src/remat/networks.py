"""The networks of Chen et al. 2016 in any size, without memory: for `remat memory`.

Made under a fake-tensor mode they take no memory, so that a step that no machine could hold can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Example(NamedTuple):
    """A model that returns its loss, and an input; both hold fake tensors."""

    model: nn.Module
    input: torch.Tensor


class _Bottleneck(nn.Module):
    """He et al. 2016, "Identity mappings": batch norm and ReLU before each of three convolutions."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        inner = leaving // 4
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (entering, inner, inner))
        self.reduce = nn.Conv2d(entering, inner, 1, bias=False)
        self.mix = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.expand = nn.Conv2d(inner, leaving, 1, bias=False)
        changes = entering != leaving or stride != 1
        self.shortcut = nn.Conv2d(entering, leaving, 1, stride, bias=False) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norms[0](x))
        rest = x if self.shortcut is None else self.shortcut(h)
        h = self.mix(F.relu(self.norms[1](self.reduce(h))))
        result: torch.Tensor = rest + self.expand(F.relu(self.norms[2](h)))
        return result


class _ResNet(nn.Module):
    """ImageNet's: a stem, four stages of bottlenecks, a classifier; the cross-entropy comes out."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        width = 64
        for stage, count in enumerate(blocks_a_stage(depth)):
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(_Bottleneck(width, 256 << stage, stride))
                width = 256 << stage
        self.blocks, self.last, self.classes = nn.Sequential(*blocks), nn.BatchNorm2d(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        x = F.relu(self.last(self.blocks(x))).mean((2, 3))
        return F.cross_entropy(self.classes(x), images.new_zeros(len(x), dtype=torch.long))


def blocks_a_stage(depth: int) -> tuple[int, int, int, int]:
    """He's 50, 101, 152 and 200 layers; deeper ones grow as the last of them did, in the two middle stages."""
    known = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
    if depth in known:
        return known[depth]
    if depth < 14:
        raise ValueError(f"a ResNet of bottlenecks has at least 14 layers, not {depth}")
    blocks = (depth - 2) // 3
    ends = min(3, blocks // 4)
    second = max(1, 2 * (blocks - 2 * ends) // 5)
    return ends, second, blocks - 2 * ends - second, ends


class _LSTM(nn.Module):
    """Chen's: 4 layers of 1024, inputs of 50, a softmax over 5000 classes in every step; unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, 1024) for width in (50, 1024, 1024, 1024))
        self.classes = nn.Linear(1024, 5000)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        batch = xs.shape[1]
        targets = xs.new_zeros(batch, dtype=torch.long)
        states = [(xs.new_zeros(batch, 1024), xs.new_zeros(batch, 1024)) for _ in self.cells]
        total = xs.new_zeros(())
        for x in xs:
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = states[layer][0]
            total = total + F.cross_entropy(self.classes(x), targets)
        return total


def _resnet(depth: int, batch: int) -> Example:
    return Example(_ResNet(depth), torch.empty(batch, 3, 224, 224))


def _lstm(steps: int, batch: int) -> Example:
    return Example(_LSTM(), torch.empty(steps, batch, 50))


class Network(NamedTuple):
    """A network in all its sizes.

    Attributes:
        make: from a size and a batch.
        size: what its size is, as text.
        usual: its usual size and batch, which are the paper's.
    """

    make: Callable[[int, int], Example]
    size: str
    usual: tuple[int, int]


NETWORKS: Final = {
    "resnet": Network(_resnet, "layers", (50, 32)),
    "lstm": Network(_lstm, "steps", (16, 64)),
}


def example(name: str, size: int, batch: int) -> Example:
    """A network by its name in `NETWORKS`, holding fake tensors.

    Raises:
        ValueError: there is no such network, or none of that size.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if name not in NETWORKS:
        raise ValueError(f"no network is called {name!r}; there are {', '.join(NETWORKS)}")
    with FakeTensorMode():
        return NETWORKS[name].make(size, batch)
