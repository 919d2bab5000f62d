"""Chen's table: its rows against the graph's own bytes and against what a step really takes; the command."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.cli import main
from remat.errors import RematError
from remat.networks import blocks_a_stage, example

CHEN = ("no optimisation", "in-place", "sharing", "in-place + sharing", "cheap results dropped", "√n segments")


def stack(layers: int) -> nn.Module:
    parts = [
        part for _ in range(layers) for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1))
    ]
    return nn.Sequential(*parts, nn.Linear(32, 1))


@pytest.fixture(scope="module")
def explained() -> remat.Explanation:
    torch.manual_seed(0)
    return remat.explain(stack(5), torch.randn(256, 32), costs="estimated")


def test_the_rows_stand_in_order(explained: remat.Explanation) -> None:
    rows = {row.name: row for row in explained.rows}
    nothing, in_place, sharing, both = (rows[name].bytes for name in CHEN[:4])
    assert nothing > in_place > both
    assert nothing > 2 * sharing  # section 3 speaks of a factor of 2 to 3
    assert sharing >= both
    assert rows["cheap results dropped"].bytes < both
    assert rows["segments by algorithm 3"].bytes < rows["cheap results dropped"].bytes
    assert all(row.seconds >= explained.plain.seconds for row in explained.rows)
    # Sharing finds room within 2 % of what is alive.
    assert sharing <= 1.02 * explained.plain.bytes


def test_remat_keeps_its_budgets_and_takes_no_more_time_for_more(explained: remat.Explanation) -> None:
    ours = [row for row in explained.rows if row.group == "remat"]
    assert len(ours) >= 2
    for row in ours[:-1]:
        assert row.bytes <= float(row.name.split()[2]) / 100 * explained.plain.bytes
    assert [row.bytes for row in ours] == sorted((row.bytes for row in ours), reverse=True)
    assert [row.seconds for row in ours] == sorted(row.seconds for row in ours)


def test_plain_is_what_a_step_takes() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh()))), torch.randn(512, 64)
    loss = nn.Sequential(model, _Loss())
    foreseen = remat.explain(loss, x, costs="estimated").plain.bytes
    measured = remat.measure(lambda: loss(x).backward()).peak_bytes
    assert foreseen == pytest.approx(measured, rel=0.02)


class _Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def test_nothing_is_run_or_changed() -> None:
    model, x = stack(2), torch.randn(8, 32)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state().clone()
    remat.explain(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_inputs_by_name_and_outputs_of_any_shape() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float, more: dict[str, torch.Tensor]) -> dict[str, object]:
            return {"a": self.linear(x) * scale, "b": [more["y"].sum(), "text"]}

    kwargs = {"scale": 2.0, "more": {"y": torch.ones(3, requires_grad=True)}}
    assert remat.explain(Named(), torch.randn(2, 4), kwargs=kwargs, costs="estimated").plain.bytes > 0


def test_what_cannot_be_explained_is_refused() -> None:
    with pytest.raises(RematError, match="needs a gradient"):
        remat.explain(nn.Linear(2, 2).requires_grad_(False), torch.randn(1, 2))
    with pytest.raises(ValueError, match="'guessed'"):
        remat.explain(nn.Linear(2, 2), torch.randn(1, 2), costs="guessed")  # type: ignore[arg-type]


def test_it_is_printed_and_drawn(explained: remat.Explanation, tmp_path: Path) -> None:
    lines = str(explained).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  ") for line in lines) >= len(explained.rows)
    explained.draw(tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_networks_take_no_memory_and_have_their_depth() -> None:
    model, images = example("resnet", 50, 32)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(25.6e6, rel=0.01)  # He et al. 2016
    assert images.shape == (32, 3, 224, 224)
    for depth in (14, 20, 101):
        convolutions = [m for m in example("resnet", depth, 1).model.modules() if isinstance(m, nn.Conv2d)]
        shortcuts = 4
        assert depth - 2 <= len(convolutions) - shortcuts + 1 <= depth
    assert all(sum(blocks_a_stage(depth)) == (depth - 2) // 3 for depth in (50, 152, 200, 500, 1001))
    with pytest.raises(ValueError, match="at least 14"):
        example("resnet", 8, 1)
    with pytest.raises(ValueError, match="there are resnet, lstm"):
        example("vgg", 8, 1)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "table.svg"
    assert main(["memory", "lstm", "--size", "1", "--batch", "8", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lstm of 1 steps, batch 8")
    assert all(name in out for name in CHEN)
    assert picture.exists()


def test_the_command_with_a_model_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_for_memory.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(3, 3)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "mine_for_memory:make", "--input", "5x3"]) == 0
    assert "input 5x3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory"], "NETWORK missing"),
        (["memory", "vgg"], "no network is called 'vgg'"),
        (["memory", "os:getcwd"], "--input missing"),
        (["memory", "os:getcwd", "--input", "2x2"], "not a torch.nn.Module"),
        (["memory", "no_such_module:make", "--input", "2"], "no_such_module"),
        (["memory", "resnet", "--size", "3"], "at least 14 layers"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
