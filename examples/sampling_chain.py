"""Backpropagation through a sampling chain, as in fine-tuning a diffusion model on a reward.

A sample is made in many denoising steps, and a reward judges the last one. Its gradient reaches the denoiser through
all of them. Steps draw noise; a replay draws the same noise again.

Try: python examples/sampling_chain.py --steps 200 --share 0.1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import remat
from comparison import Comparison, compare


class Denoiser(nn.Module):
    """Guesses the noise in a sample from the sample and how far the chain has come."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )

    def forward(self, sample: Tensor, time: Tensor) -> Tensor:
        return self.layers(torch.cat([sample, time.expand(len(sample), 1)], -1))


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A sampling chain within a share of the memory.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.15)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    denoiser = Denoiser(options.hidden)
    noise = torch.randn(options.batch, 2)
    # How much of the signal is left at each time (a cosine schedule), from all noise to none.
    left = torch.linspace(1.5, 0.02, options.steps + 1).cos().square()
    schedule = {"time": torch.linspace(1, 0, options.steps), "now": left[:-1], "next": left[1:]}

    def step(sample: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, None]:
        """One step of ancestral sampling (DDIM with noise; Song et al. 2021, equation 12)."""
        guess = denoiser(sample, x["time"])
        clean = (sample - (1 - x["now"]).sqrt() * guess) / x["now"].sqrt().clamp(min=0.05)
        spread = 0.5 * (1 - x["next"]).sqrt()
        direction = (1 - x["next"] - spread.square()).clamp(min=0).sqrt() * guess
        return x["next"].sqrt() * clean.tanh() + direction + spread * torch.randn_like(sample), None

    def loss(budget: int | None) -> Tensor:
        sample = noise
        if budget is None:
            for k in range(options.steps):
                sample, _nothing = step(sample, {name: values[k] for name, values in schedule.items()})
        else:
            sample, _nothing = remat.scan(step, noise, schedule, budget=budget)
        return (sample.norm(dim=-1) - 1).square().mean()  # the reward: samples on a circle

    return compare(denoiser.parameters(), loss, options.share)


if __name__ == "__main__":
    main()
