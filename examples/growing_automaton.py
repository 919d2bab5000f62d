"""A growing neural cellular automaton: hundreds of local updates, one loss at the end.

From a single living cell a picture grows, each cell seeing only its neighbours (Mordvintsev et al., "Growing Neural
Cellular Automata", Distill 2020). The loss looks at the last grid, so gradients go back through every update. A random
half of the cells updates at a time: `remat.scan` replays exactly the same random masks when it runs a step again.

Try: python examples/growing_automaton.py --steps 200 --size 40 --share 0.1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from comparison import Comparison, compare


class Rule(nn.Module):
    """How a cell changes: it perceives its neighbourhood's slopes, thinks in two layers, and changes by a little."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        slope = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
        here = torch.zeros(3, 3)
        here[1, 1] = 1
        self.register_buffer("filters", torch.stack([here, slope, slope.T]).repeat(channels, 1, 1).unsqueeze(1))
        self.think = nn.Conv2d(3 * channels, hidden, 1)
        self.change = nn.Conv2d(hidden, channels, 1, bias=False)
        nn.init.zeros_(self.change.weight)  # at first nothing changes
        self.channels = channels

    def forward(self, grid: Tensor, _: None) -> tuple[Tensor, None]:
        alive = functional.max_pool2d(grid[:, 3:4], 3, 1, 1) > 0.1
        seen = functional.conv2d(grid, self.filters, padding=1, groups=self.channels)
        awake = torch.rand_like(grid[:, :1]) < 0.5
        grid = grid + self.change(self.think(seen).relu()) * awake
        return grid * (alive & (functional.max_pool2d(grid[:, 3:4], 3, 1, 1) > 0.1)), None


def target(size: int) -> Tensor:
    """A ring in red, green, blue and opacity: (1, 4, size, size)."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    ring = ((x.square() + y.square()).sqrt() - 0.6).abs() < 0.2
    return torch.stack([ring * (x + 1) / 2, ring * (y + 1) / 2, ring * 0.5, ring * 1.0])[None].float()


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A growing cellular automaton within a share of the memory.")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.15)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    rule, goal = Rule(channels=16, hidden=128), target(options.size)
    nn.init.normal_(rule.change.weight, std=0.01)
    optimizer = torch.optim.Adam(rule.parameters(), lr=2e-3)
    seed = torch.zeros(options.batch, 16, options.size, options.size)
    seed[:, 3:, options.size // 2, options.size // 2] = 1.0

    def loss(budget: int | None) -> Tensor:
        grid = seed
        if budget is None:
            for _ in range(options.steps):
                grid, _nothing = rule(grid, None)
        else:
            grid, _nothing = remat.scan(rule, seed, length=options.steps, budget=budget)
        return functional.mse_loss(grid[:, :4], goal.expand(options.batch, -1, -1, -1))

    found = compare(rule.parameters(), loss, options.share)
    for iteration in range(options.iterations):
        optimizer.zero_grad()
        value = loss(found.budget_bytes)
        value.backward()
        for parameter in rule.parameters():  # the paper's trick against exploding gradients
            parameter.grad /= parameter.grad.norm() + 1e-8
        optimizer.step()
        print(f"iteration {iteration + 1:3}  loss {value.item():.4f}")
    return found


if __name__ == "__main__":
    main()
