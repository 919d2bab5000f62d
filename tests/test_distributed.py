"""More than one process: under DDP and FSDP2 a scan is still the plain loop, and every rank runs the same steps.

Two gloo processes on the CPU that meet at a file, so no port can be taken. Starting a pair costs more than what it
does, so a pair carries out all checks of its kind, one after the other.
"""

import copy
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import remat
from plain import plain_scan, same, seed_everything

RANKS, STEPS, BATCH, WIDTH = 2, 11, 8, 24
TIMEOUT = timedelta(seconds=30)  # a rank that waits for one that has failed gives up
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
Loop = Callable[..., tuple[Any, Any]]
Check = Callable[[int], None]


def in_pairs(checks: list[Check], meeting: Path) -> None:
    """Carry the checks out in two processes; says which failed, and how."""
    multiprocessing.start_processes(_rank, (checks, str(meeting)), RANKS, start_method="spawn")
    failures = [report.read_text() for report in sorted(meeting.glob("failed-*"))]
    assert not failures, "\n".join(failures)


def _rank(rank: int, checks: list[Check], meeting: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # FSDP2 warns of modules whose result is a view, as that of any linear layer over time is.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    store = dist.FileStore(f"{meeting}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    for number, check in enumerate(checks):
        seed_everything(11)
        try:
            check(rank)
        except (Exception, pytest.fail.Exception):
            name = f"{check.func.__name__} {check.keywords}" if isinstance(check, partial) else check.__name__
            Path(meeting, f"failed-{number}-{rank}").write_text(f"{name}, rank {rank}:\n{traceback.format_exc()}")
        if not _both(store, number, rank, Path(meeting, f"failed-{number}-{rank}").exists()):
            return  # only one has failed, and they would wait for each other from here on
    dist.barrier()
    dist.destroy_process_group()


def _both(store: dist.Store, number: int, rank: int, failed: bool) -> bool:
    """Whether both ranks have come to the same end of a check."""
    store.set(f"{number}-{rank}", str(failed))
    return store.get(f"{number}-{1 - rank}").decode() == str(failed)


# ---- a model whose forward is a loop


class Recurrent(nn.Module):
    """A cell that runs over time, between two layers that do not."""

    def __init__(self, loop: Loop = plain_scan, *, unused: bool = False, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.loop = loop
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None
        self.decode = nn.Linear(WIDTH, 3)

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(self.cell(self.norm(x), h))
        return h, h

    def forward(self, xs: Tensor) -> Tensor:
        _, ys = self.loop(self.step, xs.new_zeros(xs.shape[1:]), self.encode(xs))
        return self.decode(ys)


def model(loop: Loop, **kwargs: Any) -> Recurrent:
    """The same weights every time, on every rank."""
    seed_everything(5)
    return Recurrent(loop, **kwargs)


def batch(rank: int, round_: int = 0) -> Tensor:
    """Each rank its own."""
    return torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * round_ + rank))


def tightly(step: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
    """`remat.scan` with as little as it can do with, which must be the same on all ranks."""
    try:
        remat.plan_scan(step, carry, xs, budget=1)
    except remat.InfeasibleBudget as refusal:
        budget = refusal.smallest_budget_bytes
    assert agreed(budget)
    return remat.scan(step, carry, xs, budget=budget)


def agreed(value: Any) -> bool:
    """Whether all ranks have the same."""
    values = [None] * RANKS
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


LOOPS: dict[str, Loop] = {
    "ample": partial(remat.scan, budget="1GiB"),
    "smallest": tightly,
    "constant": partial(remat.scan, budget="1GiB", planner="constant"),
}


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


# ---- DDP


class Reduced:
    """Counts how often each parameter's gradient is sent, and in how many buckets."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.buckets = 0
        self.sent: dict[int, int] = {}

        def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            self.buckets += 1
            for parameter in bucket.parameters():
                self.sent[id(parameter)] = self.sent.get(id(parameter), 0) + 1
            work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True).get_future()
            return work.then(lambda done: done.value()[0])

        ddp.register_comm_hook(None, hook)


def train(rank: int, loop: Loop, *, rounds: int = 3, wrap: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
    """What can be seen of some rounds of training: losses, gradients, buffers, hooks, and what was sent."""
    net = model(loop, **kwargs)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005, **(wrap or {}))
    reduced = Reduced(ddp)
    calls: list[str] = []
    whole: list[Tensor] = []
    net.cell.weight_hh.register_hook(lambda g: (calls.append("tensor"), whole.append(g.clone()))[0])
    net.cell.weight_hh.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Any] = []
    for round_ in range(rounds):
        optimizer.zero_grad()
        loss = ddp(batch(rank, round_)).square().mean()
        loss.backward()
        sent = sorted((name, reduced.sent.get(id(p), 0)) for name, p in net.named_parameters())
        seen.append([loss.detach(), gradients(net), dict(net.named_buffers()), sent, reduced.buckets, list(calls)])
        optimizer.step()
    assert all(times == rounds for _, times in sent)
    assert calls == ["tensor", "accumulated"] * rounds
    return copy.deepcopy([seen, whole])


DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "as people use it": {},
    "unused parameters looked for, none there": {"wrap": {"find_unused_parameters": True}},
    "unused parameters": {"wrap": {"find_unused_parameters": True}, "unused": True},
    "static graph": {"wrap": {"static_graph": True}},
    "static graph with unused parameters": {"wrap": {"static_graph": True}, "unused": True},
    "gradients are views of buckets": {"wrap": {"gradient_as_bucket_view": True}},
    "batch norm and dropout": {"norm": True, "drop": 0.2},
}


def gradients_are_reduced_once(rank: int, name: str) -> None:
    settings = DDP_SETTINGS[name]
    expected = train(rank, plain_scan, **settings)
    for budget, loop in LOOPS.items():
        assert same(train(rank, loop, **settings), expected), f"{name}, {budget}"


def no_sync_accumulates(rank: int) -> None:
    def run(loop: Loop) -> list[Any]:
        net = model(loop)
        ddp = DistributedDataParallel(net)
        reduced = Reduced(ddp)
        seen = []
        for round_ in range(6):
            with nullcontext() if round_ % 3 == 2 else ddp.no_sync():
                ddp(batch(rank, round_)).square().mean().backward()
            seen.append((gradients(net), reduced.buckets))
        return seen

    expected = run(plain_scan)
    for budget, loop in LOOPS.items():
        assert same(run(loop), expected), budget


def a_wrapped_cell_inside_the_loop(rank: int) -> None:
    """The step calls a DDP module: it is prepared anew at each call and each replay, and reduces once all the same."""

    def run(loop: Loop) -> list[Any]:
        seed_everything(5)
        cell = DistributedDataParallel(nn.GRUCell(WIDTH, WIDTH))
        reduced = Reduced(cell)
        seen = []
        for round_ in range(2):
            _, ys = loop(lambda h, x: ((h := cell(x, h)), h), torch.zeros(BATCH, WIDTH), batch(rank, round_))
            ys.square().mean().backward()
            seen.append((gradients(cell), reduced.buckets))
        return seen

    expected = run(plain_scan)
    for budget, loop in LOOPS.items():
        assert same(run(loop), expected), budget


def steps_that_talk_to_each_other(rank: int, budgets: tuple[str, ...] = ("ample", "constant")) -> None:
    """A collective inside the step: ranks that ran steps in another order would wait for each other for ever."""

    def run(loop: Loop) -> dict[str, Tensor | None]:
        net = model(loop)

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            if rank and perf_counter() % 0.01 < 0.003:
                sleep(0.002)  # what is measured of time differs
            h = net.cell(x, h)
            mean = h.detach().mean(0)
            dist.all_reduce(mean)
            return h - mean / RANKS, h

        seed_everything(3)
        _, ys = loop(step, torch.zeros(BATCH, WIDTH), net.encode(batch(rank)))
        net.decode(ys).square().mean().backward()
        return gradients(net)

    expected = run(plain_scan)
    for budget in budgets:
        assert same(run(LOOPS[budget]), expected), budget


def ranks_plan_the_same(rank: int) -> None:
    """Plans are functions of shapes and budget: one rank is slow, one has planned other things before."""
    net = model(plain_scan)
    if rank == 0:
        remat.plan_scan(net.step, torch.zeros(3, WIDTH), torch.zeros(5, 3, WIDTH), budget="1MiB")

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if rank and torch.is_grad_enabled():
            sleep(0.001)
        return net.step(h, x)

    for steps in (2, 37, 400):
        xs = torch.zeros(steps, BATCH, WIDTH)
        with pytest.raises(remat.InfeasibleBudget) as refusal:
            remat.plan_scan(step, torch.zeros(BATCH, WIDTH), xs, budget=1)
        smallest = refusal.value.smallest_budget_bytes
        for budget in (smallest, 2 * smallest, 10 * smallest):
            plan = remat.plan_scan(step, torch.zeros(BATCH, WIDTH), xs, budget=budget)
            assert agreed((budget, plan.peak_bytes, list(plan.schedule))), f"{steps} steps in {budget} bytes"


DDP_CHECKS: list[Check] = [
    *(partial(gradients_are_reduced_once, name=name) for name in DDP_SETTINGS),
    no_sync_accumulates,
    a_wrapped_cell_inside_the_loop,
    steps_that_talk_to_each_other,
    ranks_plan_the_same,
]


# ---- FSDP2


def sharded(net: Recurrent, parts: list[str], reshard: bool | None) -> Recurrent:
    mesh = init_device_mesh("cpu", (RANKS,))
    settings = {} if reshard is None else {"reshard_after_forward": reshard}
    for part in parts:
        fully_shard(net.get_submodule(part), mesh=mesh, **settings)
    return net


def whole(value: Tensor | None) -> Tensor | None:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def train_sharded(rank: int, loop: Loop, parts: list[str], reshard: bool | None) -> list[Any]:
    """What can be seen of three rounds of training, one of them without synchronisation."""
    net = sharded(model(loop, drop=0.2), parts, reshard)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for round_ in range(3):
        net.set_requires_gradient_sync(round_ != 1)
        loss = net(batch(rank, round_)).square().mean()
        loss.backward()
        if round_ != 1:
            seen.append((loss.detach(), {name: whole(p.grad) for name, p in net.named_parameters()}))
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in net.parameters())
    return [*seen, *(whole(p.detach()) for p in net.parameters())]


def the_whole_model_is_sharded(rank: int, parts: list[str], reshard: bool | None) -> None:
    expected = train_sharded(rank, plain_scan, parts, reshard)
    for budget, loop in LOOPS.items():
        assert same(train_sharded(rank, loop, parts, reshard), expected), f"{parts}, reshard {reshard}, {budget}"


def gathered_and_reduced_as_often_as_plain(rank: int) -> None:
    """However often steps run again, parameters are gathered no more often, and reduced once."""

    def run(loop: Loop) -> list[int]:
        net = sharded(model(loop), ["encode", ""], True)
        with ExitStack() as stack:
            counters = [
                stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in COLLECTIVES
                if hasattr(dist, name)
            ]
            net(batch(rank)).square().mean().backward()
        return [counter.call_count for counter in counters]

    expected = run(plain_scan)
    assert 4 in expected, "two groups of parameters, in forward and in backward"
    assert 2 in expected, "two groups of gradients"
    for budget, loop in LOOPS.items():
        assert run(loop) == expected, budget


def a_cell_sharded_by_itself_is_refused(rank: int, parts: list[str], reshard: bool | None) -> None:
    """Its gradients would be reduced before they are there; the refusal leaves everything as it was."""
    for loop in LOOPS.values():
        net = sharded(model(loop), parts, reshard)
        with pytest.raises(remat.StepError, match="fully_shard"):
            net(batch(rank))
        net.loop = plain_scan
        net(batch(rank)).square().mean().backward()
        assert all(p.grad is not None for p in net.parameters())


class Statistics(torch.autograd.Function):
    """The mean over the batches of all ranks, as synchronised batch norms take it; its backward communicates too."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        total = x.mean(0)
        dist.all_reduce(total)
        return total / RANKS

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return (total / RANKS).expand(BATCH, WIDTH) / BATCH


def a_step_may_communicate(rank: int) -> None:
    """Even where ranks meet other shapes, budgets and times: all look at the step together, and run the same steps."""
    net = model(plain_scan)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.cell(x, h)
        h = h - Statistics.apply(h[:BATCH])
        return h, h.square().mean()

    def run(loop: Loop, rows: int, **kwargs: Any) -> tuple[Tensor, ...]:
        xs = batch(rank).repeat(1, rows, 1)
        _, losses = loop(step, torch.zeros(BATCH * rows, WIDTH), xs, **kwargs)
        return torch.autograd.grad(losses.sum(), list(net.cell.parameters()))

    for rows in (1, 1 + rank, 2):  # in the second round, one rank has seen the shapes before, and the other has not
        expected = run(plain_scan, rows)
        assert same(run(remat.scan, rows, budget="1GiB"), expected)
        with pytest.raises(remat.InfeasibleBudget) as refusal:
            run(remat.scan, rows, budget=1 + rank)
        budget = refusal.value.smallest_budget_bytes
        assert agreed(budget)
        assert same(run(remat.scan, rows, budget=budget + 1000 * rank), expected)
        assert same(run(remat.scan, rows, budget="1GiB"), expected)


FSDP_CHECKS: list[Check] = [
    a_step_may_communicate,
    *(partial(the_whole_model_is_sharded, parts=[""], reshard=reshard) for reshard in (None, True, False)),
    partial(the_whole_model_is_sharded, parts=["encode", "decode", ""], reshard=True),
    gathered_and_reduced_as_often_as_plain,
    *(
        partial(a_cell_sharded_by_itself_is_refused, parts=parts, reshard=reshard)
        for parts in (["cell"], ["cell", ""])
        for reshard in (None, True, False)
    ),
]


def test_ddp_and_fsdp(tmp_path: Path) -> None:
    """P32: parameters are marked ready once; P33: they are gathered no more often than plain, or it is refused."""
    in_pairs([*DDP_CHECKS, *FSDP_CHECKS], tmp_path)
