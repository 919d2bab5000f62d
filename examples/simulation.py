"""A differentiable simulation: which push makes a hanging rope's end touch a point two seconds later?

The step is physics, not a network: ropes of masses and springs, in small steps of time. What is learnt are the initial
velocities, so the gradient goes back through the whole simulation. The state is a dictionary; any pytree will do.

Try: python examples/simulation.py --steps 4000 --share 0.03
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import remat
from comparison import Comparison, compare

STIFFNESS, DRAG, GRAVITY = 100.0, 0.2, 9.81  # of a rope of length 1 and mass 1


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A differentiable simulation within a share of the memory.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--masses", type=int, default=20, help="more need more steps to be stable")
    parser.add_argument("--ropes", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.05)
    options = parser.parse_args(arguments)

    width, rest = 2.0 / options.steps, 1.0 / options.masses
    torch.manual_seed(0)
    down = -rest * torch.arange(1.0, options.masses + 1)
    hanging = torch.stack([torch.zeros_like(down), down], -1).expand(options.ropes, -1, -1)
    goals = torch.rand(options.ropes, 2) - 0.5
    push = torch.zeros(options.ropes, options.masses, 2, requires_grad=True)
    end = torch.zeros(options.ropes, 1, 2)
    weight = torch.tensor([0.0, -GRAVITY])

    def step(state: dict[str, Tensor], _: None) -> tuple[dict[str, Tensor], None]:
        """Springs pull each mass towards both neighbours; the first hangs from the origin."""
        place, speed = state["place"], state["speed"]
        links = place - torch.cat([end, place[:, :-1]], 1)
        length = links.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        pull = -STIFFNESS * (length / rest - 1) * links / length
        force = pull - torch.cat([pull[:, 1:], end], 1)
        speed = speed + width * (force / rest + weight - DRAG * speed)
        return {"place": place + width * speed, "speed": speed}, None

    def loss(budget: int | None) -> Tensor:
        state = {"place": hanging, "speed": push}
        if budget is None:
            for _ in range(options.steps):
                state, _nothing = step(state, None)
        else:
            state, _nothing = remat.scan(step, state, length=options.steps, budget=budget)
        return (state["place"][:, -1] - goals).square().sum(-1).mean()

    found = compare([push], loss, options.share)
    optimizer = torch.optim.Adam([push], lr=0.3)
    for iteration in range(options.iterations):
        optimizer.zero_grad()
        value = loss(found.budget_bytes)
        value.backward()
        optimizer.step()
        print(f"iteration {iteration + 1:3}  distance {value.item() ** 0.5:.3f}")
    return found


if __name__ == "__main__":
    main()
