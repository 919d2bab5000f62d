"""Fine-tuning a model like GPT-2 within a budget.

A decoder as GPT-2 has it: token and position embeddings, blocks of attention and a feed-forward network with dropout,
and a head that shares the embedding's weights. `remat.chain` takes all of it as a list, and the mask that every part is
given. The head and the loss are in the list too: logits are large, and this way the budget is the whole model's.

Try: python examples/gpt.py --blocks 12 --width 768 --heads 12 --share 0.3
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from comparison import Comparison, compare


class Block(nn.Module):
    """Attention and a feed-forward network, each after a layer norm and around it a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=self.dropout)
        attended = self.project(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(attended, self.dropout)
        return x + functional.dropout(self.network(self.before_network(x)), self.dropout)


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, vocabulary: int, length: int, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, 0.1) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def loss(self, tokens: Tensor, following: Tensor, budget: int | None = None) -> Tensor:
        def embed(tokens: Tensor, _: Tensor) -> Tensor:
            return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]

        def judge(x: Tensor, _: Tensor) -> Tensor:
            logits = self.norm(x) @ self.tokens.weight.T
            return functional.cross_entropy(logits.flatten(0, 1), following.flatten())

        parts, x = [embed, *self.blocks, judge], tokens
        if budget is not None:
            return remat.chain(parts, x, self.mask, budget=budget)
        for part in parts:
            x = part(x, self.mask)
        return x


def main(arguments: list[str] | None = None) -> Comparison:
    parser = argparse.ArgumentParser(description="A model like GPT-2 within a share of the memory.")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--frozen", type=int, default=2, help="blocks in front that are not trained")
    parser.add_argument("--share", type=float, default=0.4)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    vocabulary = 512
    model = GPT(vocabulary, options.length, options.blocks, options.width, options.heads)
    # Fine-tuning: embeddings and the first blocks stay as they are. What needs no gradient costs no memory.
    for part in (model.tokens, model.places, *model.blocks[: options.frozen]):
        part.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tokens = torch.randint(vocabulary, (options.batch, options.length + 1))
    return compare(trained, lambda budget: model.loss(tokens[:, :-1], tokens[:, 1:], budget), options.share)


if __name__ == "__main__":
    main()
