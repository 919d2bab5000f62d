"""What does not hold yet; run by name: pytest tests/pending_robust.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import remat
from plain import plain_scan
from test_scan_robust import in_threads, inside_a_checkpoint, levels

assert plain_scan


@levels
def test_threads_share_a_module_with_a_hook_on_a_weight(level: str) -> None:
    in_threads(level, hooked=True)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", ["gru-cell", "stacked-cells-with-dropout", "batch-norm"])
@levels
def test_new_inside_a_checkpoint(level: str, name: str, reentrant: bool, capfd: pytest.CaptureFixture[str]) -> None:
    inside_a_checkpoint(level, name, reentrant=reentrant, known=False)
    assert "callback" not in capfd.readouterr().err


class Repeating(nn.Module):
    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats, self.linear = repeats, nn.Linear(64, 64)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        for _ in range(self.repeats):
            h = torch.tanh(self.linear(h) + x)
        return h, None


def test_a_number_among_the_attributes_makes_another_step() -> None:
    xs, h, budget = torch.randn(40, 32, 64), torch.zeros(32, 64), 2_000_000

    for repeats in (1, 8):
        net = Repeating(repeats)

        def run(net: nn.Module = net) -> None:
            remat.scan(net, h, xs, budget=budget)[0].sum().backward()

        run()
        net.zero_grad()
        assert remat.measure(run).peak_bytes <= budget
