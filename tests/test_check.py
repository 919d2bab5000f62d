"""Will it fit? The answers given on paper, held against the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.cli import main
from remat.fitting import seams
from remat.fitting.forecast import Forecast
from remat.fitting.loops import blocks_of
from remat.fitting.outside import with_unseen
from remat.fitting.planning import survey
from remat.fitting.trial import tried
from test_fit import WIDTH, Block, Decoder, Free, Speller, TwoLoops, tokens, trained, values

RATES = remat.Rates(flops_per_s=1e11, bytes_per_s=1e10)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "sequential": (lambda: nn.Sequential(*(Block(number) for number in range(8))), values, "chain"),
    "two loops": (TwoLoops, values, "blocks"),
    "no blocks": (Free, values, "graph"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_foreseen_on_paper_is_what_is_taken(name: str) -> None:
    make, inputs, way = MODELS[name]
    torch.manual_seed(1)
    plain_bytes, _ = trained(make(), (inputs(),), {})
    with torch.device("meta"):
        model, x = make(), torch.empty_like(inputs(), device="meta")
    checked = remat.check(model, x, budget=int(0.7 * plain_bytes), rates=RATES)
    assert abs(checked.plain_peak_bytes - plain_bytes) <= 0.03 * plain_bytes
    assert checked.gradient_bytes == checked.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert checked.answer is not None
    assert checked.answer.way == way
    assert [price.budget_bytes for price in checked.prices] == sorted(p.budget_bytes for p in checked.prices)[::-1]
    assert checked.prices[0].time_ratio == 1.0
    assert 1.05 < checked.prices[-1].time_ratio < 2
    if way == "graph":
        return  # it is the planner of fit's own way
    real = remat.fit(make(), inputs(), budget=checked.answer.budget_bytes)
    assert real.remat.way == way
    peak_bytes, _ = trained(real, (inputs(),), {})
    assert peak_bytes <= checked.answer.budget_bytes


@pytest.mark.parametrize("make", [TwoLoops, lambda: Decoder(3)], ids=["two loops", "decoder"])
def test_loops_cost_on_paper_what_they_cost_in_reality(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = values() if isinstance(model, TwoLoops) else tokens()
    forecast = Forecast(model, (x,), {}, RATES)
    seams.install(blocks_of(model))
    trial = tried(model, (x,), {})
    measured, _ = survey(model, (x,), {}, trial, 2**30)
    for paper, real in zip(forecast.costs, measured, strict=True):
        assert paper.whole_bytes == real.whole_bytes
        assert abs(paper.least_bytes - real.least_bytes) <= 0.01 * real.least_bytes  # which tapes are worth it is timed
    assert forecast.outside == with_unseen(trial.outside)
    assert forecast.items.peak_bytes == trial.plain_peak_bytes


class Huge(nn.Module):
    """Nobody here has room for it: 17 GB of parameters, and four times as much beside them."""

    def __init__(self) -> None:
        super().__init__()
        width = 8192
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_model_that_no_machine_here_could_hold() -> None:
    with torch.device("meta"):
        model, x = Huge(), torch.empty(64, 512, 8192)
    taken = remat.measure(
        lambda: remat.check(model, x, budget="40GiB", optimizer="adamw", rates=remat.Rates(4e14, 3e12))
    )
    assert taken.peak_bytes < 2**20
    found = taken.value
    parameters = 8 * (2 * 4 * 8192**2 + 5 * 8192) * 4
    assert (found.parameter_bytes, found.gradient_bytes) == (parameters, parameters)
    assert 0 <= found.optimizer_bytes - 2 * parameters < 10_000
    assert not found.fits
    assert "does not fit" in found.explain()
    kept = (8 * 9 - 1) * 64 * 512 * 8192 * 4  # of each block what enters, but for the input, and twice the widened
    assert found.plain_activation_bytes >= kept
    assert json.loads(json.dumps(found.to_dict()))["fits"] is False


def test_recurrent_layers_count_as_kept() -> None:
    plain_bytes, _ = trained(Speller(), (tokens(8, 200),), {})
    found = remat.check(Speller(), tokens(8, 200), budget=2 * plain_bytes)
    assert found.recurrent
    assert found.fits
    assert "chunks of time" in str(found)


def test_what_is_asked_wrongly() -> None:
    with pytest.raises(ValueError, match=r"no optimizer is called 'adamx'; torch.optim has"):
        remat.check(Free(), values(), budget="1MiB", optimizer="adamx")
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        remat.check(lambda x: x, values(), budget="1MiB")  # type: ignore[arg-type]
    with pytest.raises(remat.FitError, match="cannot be worked out on paper"):
        remat.check(Free(looks=True), values(), budget="1MiB")


# ---- the command

FACTORY = f"""
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.GELU()) for _ in range(6)))

def other():
    return 7
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    ask = ["check", f"{tmp_path / 'mine.py'}:model", "--input", f"4096x{WIDTH}", "--optimizer", "adamw"]
    assert main([*ask, "--budget", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fits")
    for expected in ("activations", "smallest", "of plain", "nothing is recomputed"):
        assert expected in out
    assert max(map(len, out.splitlines())) <= 80
    assert main([*ask, "--budget", "100KiB", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["mine.py:model"], "--input"),
        (["mine.py:model", "--input", "4xa"], "must be a shape"),
        (["mine.py:other", "--input", "4x4"], "takes an nn.Module"),
        (["mine.py:model", "--input", f"4x{WIDTH}", "--optimizer", "adamx"], "no optimizer is called"),
        (["mine.py:model", "--input", "4x3", "--budget", "1MiB"], "cannot be worked out on paper"),
        (["mine.py:absent", "--input", "4x4"], "absent"),
    ],
)
def test_complaints_are_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert main(["check", *arguments]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
