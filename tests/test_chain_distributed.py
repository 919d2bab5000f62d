"""`remat.chain` in two processes: gradients are reduced once each and block by block, plans agree, FSDP2 as it says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from plain import same, seed_everything
from stacks import Residual, plain_chain
from test_distributed import RANKS, Check, Reduced, agreed, gradients, in_pairs, whole

WIDTH = 20
SETTINGS: dict[str, dict[str, Any]] = {
    "ample": {"budget": "1GiB"},
    "constant": {"budget": "1GiB", "planner": "constant"},
    "tight": {"budget": 128 * 1024},
}


class Deep(nn.Module):
    """Blocks between two layers, run plainly or within a budget."""

    def __init__(self, settings: dict[str, Any] | None, *, tied: bool = False) -> None:
        super().__init__()
        seed_everything(5)
        self.settings = settings
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Residual(WIDTH, drop=0.2, norm=nn.BatchNorm1d) for _ in range(6)])
        if tied:
            self.blocks[4] = self.blocks[1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        x = plain_chain(self.blocks, x)[0] if self.settings is None else remat.chain(self.blocks, x, **self.settings)
        return self.decode(x)


def batch(rank: int, round_: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * round_ + rank))


def train(rank: int, settings: dict[str, Any] | None, *, tied: bool = False, **wrap: Any) -> list[Any]:
    ddp = DistributedDataParallel(Deep(settings, tied=tied), bucket_cap_mb=0.005, **wrap)
    reduced = Reduced(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen: list[Any] = []
    for round_ in range(2):
        optimizer.zero_grad()
        loss = ddp(batch(rank, round_)).square().mean()
        loss.backward()
        sent = sorted(reduced.sent.values())
        seen.append([loss.detach(), gradients(ddp), [b.clone() for b in ddp.buffers()], sent, reduced.buckets])
        optimizer.step()
    return seen


def reduced_once(rank: int, tied: bool, wrap: dict[str, Any]) -> None:
    expected = train(rank, None, tied=tied, **wrap)
    for name in SETTINGS if not wrap else ("constant",):
        assert same(train(rank, SETTINGS[name], tied=tied, **wrap), expected), name


def buckets_are_sent_while_earlier_blocks_wait(rank: int) -> None:
    """The first bucket is on its way before the first block's backward."""
    events: list[str] = []
    ddp = DistributedDataParallel(Deep(SETTINGS["constant"]), bucket_cap_mb=0.005)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which are text here
        events.append("bucket")
        work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    ddp.module.blocks[0].inner.weight.register_hook(lambda _: events.append("first block"))
    for _ in range(2):  # buckets are in the order of use from the second round on
        events.clear()
        ddp(batch(rank, 0)).sum().backward()
    assert events.index("first block") > 2


def planned(blocks: nn.ModuleList, x: Tensor, budget: int | str) -> Any:
    try:
        made = remat.plan_chain(blocks, x, budget=budget)
    except remat.InfeasibleBudget as refusal:
        return refusal.smallest_budget_bytes
    return made.peak_bytes, list(made.schedule)


def plans_agree(rank: int) -> None:
    net = Deep(None)
    if rank:
        net(batch(rank, 0))
    for budget in (64 * 1024, 128 * 1024, "1GiB"):
        assert agreed(planned(net.blocks, batch(rank, 0), budget))
    with pytest.raises(remat.StepError, match="give budget="):
        remat.chain(net.blocks, batch(rank, 0))


def the_whole_model_is_sharded(rank: int) -> None:
    def run(settings: dict[str, Any] | None) -> list[Any]:
        net = Deep(settings)
        fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
        seed_everything(3)
        net(batch(rank, 0)).square().mean().backward()
        return [whole(p.grad) for p in net.parameters()]

    expected = run(None)
    for name in ("ample", "constant"):
        assert same(run(SETTINGS[name]), expected), name


def blocks_sharded_by_themselves_are_refused(rank: int) -> None:
    net = Deep(SETTINGS["ample"])
    for block in net.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(remat.StepError, match="fully_shard wraps on its own; wrap the module whose forward"):
        net(batch(rank, 0))


CHECKS: list[Check] = [
    partial(reduced_once, tied=False, wrap={}),
    partial(reduced_once, tied=True, wrap={"gradient_as_bucket_view": True}),
    partial(reduced_once, tied=False, wrap={"find_unused_parameters": True}),
    buckets_are_sent_while_earlier_blocks_wait,
    plans_agree,
    the_whole_model_is_sharded,
    blocks_sharded_by_themselves_are_refused,
]


def test_chain_in_two_processes(tmp_path: Path) -> None:
    in_pairs(CHECKS, tmp_path)
