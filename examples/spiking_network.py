"""A spiking network (snnTorch) over a thousand time steps.

Spiking neurons are trained by backpropagation through time with a surrogate gradient: the memory grows with the number
of time steps, which is why most people stop at a few dozen. The network's own modules go into the step as they are.

Try: python examples/spiking_network.py --steps 1000 --share 0.1        (needs: pip install snntorch)
"""

from __future__ import annotations

import argparse

import snntorch
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from comparison import Comparison, compare


class Network(nn.Module):
    """Two layers of leaky integrate-and-fire neurons.

    What goes from step to step are their membrane potentials, and how often the outputs have fired so far. (Returned as
    outputs of the steps, all spikes together would be the largest thing in memory.)
    """

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        self.hidden = snntorch.Leaky(beta=0.95, learn_beta=True)
        self.output = snntorch.Leaky(beta=0.95)

    def forward(self, carry: tuple[Tensor, ...], spikes: Tensor) -> tuple[tuple[Tensor, ...], None]:
        hidden, output, count = carry
        fired, hidden = self.hidden(self.first(spikes), hidden)
        fired, output = self.output(self.second(fired), output)
        return (hidden, output, count + fired), None


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A spiking network within a share of the memory.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.15)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    inputs, classes = 64, 10
    network = Network(inputs, options.hidden, classes)
    # Rate coding: a stronger input spikes more often. Spikes of shape (steps, batch, inputs).
    strengths, labels = torch.rand(options.batch, inputs), torch.randint(classes, (options.batch,))
    spikes = torch.bernoulli(strengths.expand(options.steps, -1, -1))
    rest = tuple(torch.zeros(options.batch, size) for size in (options.hidden, classes, classes))

    def loss(budget: int | None) -> Tensor:
        carry = rest
        if budget is None:
            for each in spikes:
                carry, _nothing = network(carry, each)
        else:
            carry, _nothing = remat.scan(network, carry, spikes, budget=budget)
        return functional.cross_entropy(10 / options.steps * carry[-1], labels)

    return compare(network.parameters(), loss, options.share)


if __name__ == "__main__":
    main()
