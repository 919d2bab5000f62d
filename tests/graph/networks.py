"""Small networks as functions of their tensors, and what a step of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Function = Callable[..., torch.Tensor]
Run = Callable[[Iterable[nn.Module], torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, steps, width)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Decoder(nn.Module):
    """Blocks and a projection; the loss comes out. `run` is how the blocks are gone through."""

    def __init__(self, blocks: int = 3, width: int = 32, heads: int = 2, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, run: Run | None = None) -> torch.Tensor:
        x = F.dropout(self.embed(tokens), 0.1)
        x = in_turn(self.blocks, x) if run is None else run(self.blocks, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Residual(nn.Module):
    """Pre-activation residual blocks with batch norm."""

    def __init__(self, blocks: int = 5, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(_Convolutions(channels) for _ in range(blocks))

    def forward(self, images: torch.Tensor, run: Run | None = None) -> torch.Tensor:
        x = self.first(images)
        x = in_turn(self.blocks, x) if run is None else run(self.blocks, x)
        return x.square().mean()


class _Convolutions(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


def in_turn(blocks: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """One block after another, nothing recomputed."""
    for block in blocks:
        x = block(x)
    return x


class Unrolled(nn.Module):
    """An LSTM cell applied step by step."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(xs.shape[1], self.cell.hidden_size)
        total = xs.new_zeros(())
        for x in xs:
            h, c = self.cell(x, (h, c))
            total = total + h.square().mean()
        return total


def functional(model: nn.Module) -> tuple[Function, list[torch.Tensor]]:
    """The model as a function of its parameters, its buffers and its input; parameters and buffers."""
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, tensors, strict=False)), tensors[len(names) :])

    return run, [*model.parameters(), *model.buffers()]


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """One of each kind, with an input."""
    torch.manual_seed(1)
    return {
        "decoder": (Decoder(), torch.randint(0, 50, (4, 24))),
        "residual": (Residual(), torch.randn(4, 3, 12, 12)),
        "lstm": (Unrolled(), torch.randn(8, 8, 16)),
    }


def step(function: Function, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Everything that a training step leaves: loss, gradients, buffers, the random stream."""
    torch.manual_seed(7)
    loss = function(*tensors)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{f"gradient {k}": t.grad.clone() for k, t in enumerate(tensors) if t.grad is not None},
        **{f"tensor {k}": t.detach().clone() for k, t in enumerate(tensors)},
        "random state": torch.get_rng_state(),
    }
