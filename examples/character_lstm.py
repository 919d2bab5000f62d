"""A character LSTM that remembers a thousand characters, in a twentieth of the memory.

Backpropagation through time keeps every step's activations until its backward, so memory grows with how far back
gradients reach, and people cut sequences short. With `remat.scan` the length is up to you: it keeps what the budget
has room for, and computes the rest again.

Try: python examples/character_lstm.py --length 2000 --share 0.05
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from comparison import Comparison, compare


class Model(nn.Module):
    """One character in, the loss of guessing the next one out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.cell = nn.LSTMCell(64, hidden)
        self.head = nn.Linear(hidden, 128)

    # What `remat.scan` wants: (carry, x) -> (carry, y). The loss is computed inside of the step, so that no step's
    # logits have to be kept for later.
    def forward(self, carry: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        character, following = x
        hidden, cell = self.cell(self.embedding(character), carry)
        return (hidden, cell), functional.cross_entropy(self.head(hidden), following)


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A character LSTM within a share of the memory.")
    parser.add_argument("--length", type=int, default=1000, help="characters that gradients go back over")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.05, help="the budget as a share of what plain takes")
    options = parser.parse_args(arguments)

    # A text that every Python has: its own source. Passages of it, shape (length + 1, batch).
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    codes = torch.tensor(list(text)).clamp(max=127)
    torch.manual_seed(0)
    model = Model(options.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    start = torch.zeros(options.batch, options.hidden), torch.zeros(options.batch, options.hidden)

    def passages() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(codes) - options.length, (options.batch,))
        window = torch.stack([codes[k : k + options.length + 1] for k in starts.tolist()], dim=1)
        return window[:-1], window[1:]

    def loss(budget: int | None, xs: tuple[Tensor, Tensor]) -> Tensor:
        if budget is None:  # the plain loop, for comparison
            carry, losses = start, []
            for x in zip(*xs, strict=True):
                carry, each = model(carry, x)
                losses.append(each)
            return torch.stack(losses).mean()
        _, ys = remat.scan(model, start, xs, budget=budget)  # the same loop, within the budget
        return ys.mean()

    xs = passages()
    found = compare(model.parameters(), lambda budget: loss(budget, xs), options.share)

    # Nothing else changes: the optimizer, clipping and logging are what they were.
    for iteration in range(options.iterations):
        optimizer.zero_grad()
        value = loss(found.budget_bytes, passages())
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"iteration {iteration + 1:3}  loss {value.item():.3f}")
    return found


if __name__ == "__main__":
    main()
