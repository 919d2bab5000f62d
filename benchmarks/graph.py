"""What does a byte budget cost a model compiled with backend "remat", and is the budget kept?

Peak and time of a training step as shares of plain eager's, gradients of parameters already allocated; predicted and
measured peak; whether loss, gradients, buffers and random stream are eager's bit for bit. Models: a GPT-like decoder
(12 blocks, width 512, sequence 256, batch 4, dropout 0.1), a pre-activation ResNet of 100 batch-norm blocks, an LSTM
unrolled over 60 steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import remat
from harness import interleaved, publish, ratio
from remat.graph.backend import last_plan

SHARES = (0.55, 0.35, 0.23, 0.15, 0.12)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(drop)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, steps, width)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    def __init__(self, blocks: int = 12, width: int = 512, heads: int = 8, steps: int = 256, words: int = 2048) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(steps, width))
        self.drop, self.blocks = nn.Dropout(0.1), nn.ModuleList(Block(width, heads, 0.1) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens) + self.places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class ResNet(nn.Module):
    def __init__(self, blocks: int = 100, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2 * blocks))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2 * blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        for k in range(0, len(self.convs), 2):
            h = self.convs[k](F.relu(self.norms[k](x)))
            x = x + self.convs[k + 1](F.relu(self.norms[k + 1](h)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Unrolled(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = xs.new_zeros(xs.shape[1], self.cell.hidden_size)
        total = xs.new_zeros(())
        for x in xs.unbind():
            h, c = self.cell(x, (h, c))
            total = total + h.square().mean()
        return total


def models() -> dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]]:
    """Makers and inputs."""
    torch.manual_seed(0)
    return {
        "decoder": (Decoder, (torch.randint(0, 2048, (4, 256)), torch.randint(0, 2048, (4, 256)))),
        "resnet": (ResNet, (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))),
        "lstm": (Unrolled, (torch.randn(60, 16, 128),)),
    }


def step(call: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A training step that begins from the same random state."""
    torch.manual_seed(5)
    loss = call(*inputs)
    loss.backward()
    return loss.detach()


def outcome(call: Callable[..., torch.Tensor], model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Loss, gradients, buffers, random state; gradients are there, and zero, afterwards."""
    loss = step(call, inputs)
    found = [loss, *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    for parameter in model.parameters():
        parameter.grad.zero_()
    return [*found, torch.get_rng_state()]


def table(name: str, shares: Sequence[float], rounds: int) -> list[list[str]]:
    """One row per share of plain eager's peak."""
    make, inputs = models()[name]
    torch.manual_seed(1)
    eager = make()
    start = copy.deepcopy(eager.state_dict())
    wanted = outcome(eager, eager, inputs)
    peak = remat.measure(partial(step, eager, inputs)).peak_bytes
    rows, jobs = [], {"eager": partial(step, eager, inputs)}
    for share in shares:
        torch._dynamo.reset()
        model = make()
        model.load_state_dict(start)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        options = {"budget": int(share * peak), "gradients_exist": True}
        call = torch.compile(model, backend="remat", options=options)
        begin = time.process_time()
        try:
            found = outcome(call, model, inputs)
        except Exception as refused:
            cause = refused.__cause__ or refused
            rows.append([name, f"{share:.0%}", str(getattr(cause, "smallest_budget_bytes", cause)), *[""] * 6])
            continue
        compiling_s = time.process_time() - begin
        plan = last_plan()
        measured = remat.measure(partial(step, call, inputs)).peak_bytes
        exact = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        jobs[f"{share:.0%}"] = partial(step, call, inputs)
        rows.append(
            [
                name,
                f"{share:.0%}",
                f"{measured / peak:.4f}",
                f"{plan.peak_bytes / measured - 1:+.3%}",
                "yes" if exact else "no",
                f"{plan.time_ratio:.3f}",
                "",
                "",
                f"{compiling_s:.0f}",
            ]
        )
    spent = interleaved(jobs, rounds)
    for row in rows:
        if row[1] in spent:
            row[6:8] = [f"{ratio(spent, row[1], 'eager', f):.3f}" for f in ("cpu_s", "wall_s")]
    return rows


COLUMNS = ("model", "budget", "measured", "predicted", "exact", "planned time", "cpu time", "wall time", "compiling, s")
NOTES = (
    "Budget and measured peak are shares of plain eager's peak; times are medians over interleaved rounds of the ratio",
    "to eager; 'predicted' is how far the prediction lies from the measured peak; 'planned time' is what the plan",
    "expects of itself over no recomputation; compiling, of everything, is processor time.",
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(models()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    given = parser.parse_args()
    found = [row for name in given.models for row in table(name, given.shares, given.rounds)]
    publish("graph", "Models compiled with a byte budget", COLUMNS, found, NOTES)
