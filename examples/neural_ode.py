"""A neural ODE with a fixed-step solver: exact gradients of what was computed, without memory that grows with time.

The adjoint method saves memory by solving another equation backwards, and its gradients are only as good as that
solution. Backpropagation through the solver is exact, but keeps four evaluations of the field for every step.
`remat.scan` is backpropagation through the solver, bit for bit, within a budget.

Try: python examples/neural_ode.py --steps 1000 --share 0.05
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import remat
from comparison import Comparison, compare


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A neural ODE within a share of the memory.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.1)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(2, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 2))
    width = 10.0 / options.steps

    def step(state: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """The classical Runge-Kutta step, and how far it lands from what was observed then."""
        a = field(state)
        b = field(state + width / 2 * a)
        c = field(state + width / 2 * b)
        d = field(state + width * c)
        state = state + width / 6 * (a + 2 * b + 2 * c + d)
        return state, (state - observed).square().mean()

    # What is to be learnt: a spiral. Observations of shape (steps, batch, 2), from several starting points.
    start = torch.randn(options.batch, 2)
    times = torch.linspace(width, 10.0, options.steps)[:, None]
    turn = torch.stack([times.cos(), times.sin(), -times.sin(), times.cos()], -1).reshape(-1, 1, 2, 2)
    observed = (-0.1 * times[..., None]).exp() * (turn @ start[None, :, :, None]).squeeze(-1)

    def loss(budget: int | None) -> Tensor:
        if budget is None:
            state, errors = start, []
            for each in observed:
                state, error = step(state, each)
                errors.append(error)
            return torch.stack(errors).mean()
        return remat.scan(step, start, observed, budget=budget)[1].mean()

    return compare(field.parameters(), loss, options.share)


if __name__ == "__main__":
    main()
