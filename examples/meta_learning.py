"""An unrolled inner loop: learn a starting point from which hundreds of gradient steps lead to a good model.

Meta-learning differentiates through training itself (Finn et al., "Model-Agnostic Meta-Learning", 2017). The carry is a
whole set of weights; a step of `remat.scan` is a step of gradient descent, taken with `torch.func.grad`, which is
differentiated again by the outer backward. Memory would grow with the number of inner steps, so that people take five.

Try: python examples/meta_learning.py --steps 300 --share 0.1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

import remat
from comparison import Comparison, compare

Weights = dict[str, Tensor]


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="An unrolled inner loop within a share of the memory.")
    parser.add_argument("--steps", type=int, default=200, help="of the inner loop")
    parser.add_argument("--hidden", type=int, default=40)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.15)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, options.hidden), nn.Tanh(), nn.Linear(options.hidden, options.hidden), nn.Tanh(),
        nn.Linear(options.hidden, 1),
    )  # fmt: skip
    meta = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    rate = torch.tensor(0.05, requires_grad=True)  # the inner learning rate is learnt, too
    x = torch.rand(options.points, 1) * 10 - 5
    y = 2 * (x + 0.7).sin()

    def error(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(functional_call(model, weights, x), y)

    def step(weights: Weights, _: None) -> tuple[Weights, None]:
        slopes = grad(error)(weights, x, y)
        return {name: weight - rate * slopes[name] for name, weight in weights.items()}, None

    def loss(budget: int | None) -> Tensor:
        weights: Weights = dict(meta)
        if budget is None:
            for _ in range(options.steps):
                weights, _nothing = step(weights, None)
        else:
            weights, _nothing = remat.scan(step, weights, length=options.steps, budget=budget)
        return error(weights, x, y)

    return compare([*meta.values(), rate], loss, options.share)


if __name__ == "__main__":
    main()
