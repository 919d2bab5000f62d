"""What does not hold yet; run by name: pytest tests/pending_distributed.py."""

from functools import partial
from pathlib import Path

import pytest

import remat
from plain import plain_scan
from test_distributed import LOOPS, Check, batch, in_pairs, model, sharded


def a_cell_sharded_by_itself_is_refused(rank: int, parts: list[str], reshard: bool | None) -> None:
    """Its gradients would be reduced before they are there; the refusal leaves everything as it was."""
    for loop in LOOPS.values():
        net = sharded(model(loop), parts, reshard)
        with pytest.raises(remat.StepError, match="fully_shard"):
            net(batch(rank))
        net.loop = plain_scan
        net(batch(rank)).square().mean().backward()
        assert all(p.grad is not None for p in net.parameters())


CHECKS: list[Check] = [
    partial(a_cell_sharded_by_itself_is_refused, parts=parts, reshard=reshard)
    for parts in (["cell"], ["cell", ""])
    for reshard in (None, True, False)
]


def test_fsdp_that_cannot_work(tmp_path: Path) -> None:
    in_pairs(CHECKS, tmp_path)
