"""`remat.fit` in two processes: wrapped by DDP with mixed precision and accumulated gradients, and by FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from plain import same, seed_everything
from test_distributed import RANKS, Check, Reduced, gradients, in_pairs, whole
from test_fit import Decoder, trained

BLOCKS, ROWS = 3, 8


@cache
def plain_bytes(half: bool) -> int:
    """What a plain step takes, in the region that it will be run in."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return trained(Decoder(BLOCKS), (batch(0, 0),), {})[0]


def decoder(fitted: bool, half: bool = False) -> nn.Module:
    """The same on every rank."""
    budget = int(0.85 * plain_bytes(half))
    seed_everything(5)
    model = Decoder(BLOCKS)
    if fitted:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            remat.fit(model, batch(0, 0), budget=budget)
        assert model.remat.way == "blocks"
    return model


def batch(rank: int, round_: int) -> Tensor:
    """Each rank its own."""
    return torch.randint(0, 50, (ROWS, 32), generator=torch.Generator().manual_seed(10 * round_ + rank))


def train(rank: int, fitted: bool, half: bool, **wrap: Any) -> list[Any]:
    """Two optimizer steps of two batches each, the first of which is not synchronised; gradients are scaled."""
    model = decoder(fitted, half)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, **wrap)
    reduced = Reduced(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen: list[Any] = []
    for round_ in range(2):
        for part in range(2):
            with nullcontext() if part else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = ddp(batch(rank, 2 * round_ + part))["loss"]
                scaler.scale(loss).backward()
            seen.append(loss.detach())
        seen += [gradients(ddp), sorted(reduced.sent.values()), reduced.buckets, list(map(torch.clone, ddp.buffers()))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if fitted:
        assert model.remat.way == "blocks"
    return [*seen, *(p.detach().clone() for p in ddp.parameters())]


def wrapped_by_ddp(rank: int, half: bool, wrap: dict[str, Any]) -> None:
    assert same(train(rank, True, half, **wrap), train(rank, False, half, **wrap))


def sharded(rank: int, fitted: bool) -> list[Any]:
    model = decoder(fitted)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for round_ in range(2):
        loss = model(batch(rank, round_))["loss"]
        loss.backward()
        seen += [loss.detach(), [whole(p.grad) for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    if fitted:
        assert model.remat.way == "blocks"
    return seen


def sharded_afterwards(rank: int) -> None:
    """The way is chosen before, on whole parameters; they are gathered around the forward, and reduced once."""
    assert same(sharded(rank, True), sharded(rank, False))


def sharded_before_is_refused(_rank: int) -> None:
    model = decoder(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(remat.FitError, match="the model is sharded"):
        remat.fit(model, batch(0, 0), budget="1GiB")


CHECKS: list[Check] = [
    partial(wrapped_by_ddp, half=False, wrap={"gradient_as_bucket_view": True}),
    partial(wrapped_by_ddp, half=True, wrap={}),
    sharded_afterwards,
    sharded_before_is_refused,
]


def test_fit_in_two_processes(tmp_path: Path) -> None:
    in_pairs(CHECKS, tmp_path)
