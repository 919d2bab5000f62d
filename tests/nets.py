"""Small networks with what kernels do differently: convolutions of several kinds, normalisation, attention, dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factory = Callable[[], tuple[nn.Module, Tensor]]
NETS: dict[str, Factory] = {}


def net(factory: Factory) -> Factory:
    """Register a factory of a network and an input that needs a gradient, under its name."""

    def fresh() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(2)
        module, x = factory()
        return module, x.requires_grad_()

    NETS[factory.__name__.replace("_", "-")] = fresh
    return fresh


class Residual(nn.Module):
    """A pre-activation residual block (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class Decoder(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@net
def residual() -> tuple[nn.Module, Tensor]:
    return Residual(16), torch.randn(8, 16, 16, 16)


@net
def channels_last() -> tuple[nn.Module, Tensor]:
    x = torch.randn(8, 16, 16, 16).to(memory_format=torch.channels_last)
    return Residual(16).to(memory_format=torch.channels_last), x


@net
def attention() -> tuple[nn.Module, Tensor]:
    return Decoder(), torch.randn(4, 32, 32)


@net
def perceptron() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32), nn.Tanh()), torch.randn(64, 32)


@net
def along_a_line() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv1d(16, 16, 3, padding=1), nn.MaxPool1d(2), nn.Softmax(-1)
    return nn.Sequential(*layers), torch.randn(4, 16, 128)


@net
def depthwise() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.SiLU(), nn.Conv2d(32, 64, 1)
    return nn.Sequential(*layers), torch.randn(4, 32, 28, 28)


@net
def transposed() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2), nn.GELU()), torch.randn(4, 8, 16, 16)


@net
def grouped_normalisation() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.Hardswish()), torch.randn(4, 16, 16, 16)
