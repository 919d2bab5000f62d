"""The demo, small: both trainings are equal, the budget holds, the files say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remat.cli import main

torch = pytest.importorskip("torch")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and é was here.\n" * 40, encoding="utf-8")
    return path


def test_the_demo(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "demo.json"), "--picture", str(tmp_path / "demo.png")]
    threads = torch.get_num_threads()
    assert main(["demo", "--text", str(text), "--length", "80", "--iterations", "3", "--budget", "50%", *files]) == 0
    assert torch.get_num_threads() == threads

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) < 40
    assert "largest gradient difference" in out

    figures = json.loads((tmp_path / "demo.json").read_text())
    plain, budgeted = figures["plain"], figures["budgeted"]
    assert figures["max_gradient_difference"] == 0
    assert budgeted["budget_bytes"] == plain["peak_bytes"] // 2
    assert budgeted["peak_bytes"] <= budgeted["budget_bytes"]
    assert abs(budgeted["predicted_peak_bytes"] - budgeted["peak_bytes"]) <= 0.02 * budgeted["budget_bytes"]
    assert plain["forward_runs_per_step"] == 1
    assert budgeted["forward_runs_per_step"] > 1
    assert min(plain["seconds_per_iteration"], budgeted["seconds_per_iteration"]) > 0
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"


def test_figures_alone_on_stdout(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "demo.svg")
    command = ["demo", "--text", str(text), "--length", "20", "--iterations", "1", "--budget", "1GiB"]
    assert main([*command, "--json", "-", "--picture", picture]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["budgeted"]["forward_runs_per_step"] == 1  # everything fits
    assert figures["max_gradient_difference"] == 0


def test_a_budget_that_is_too_small(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--text", str(text), "--length", "20", "--picture", str(tmp_path / "demo.png")]
    assert main([*command, "--budget", "1KiB"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the smallest that works is" in error


def test_the_standard_library_is_a_text() -> None:
    from remat.demo import read_tokens

    tokens = read_tokens(None, 1000)
    assert len(tokens) >= 1_000_000
    assert (int(tokens.min()), int(tokens.max())) == (0, 95)


def test_a_share_that_is_too_small_becomes_one_that_works(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["demo", "--text", str(text), "--length", "20", "--iterations", "1", "--budget", "1%"]
    assert main([*command, "--json", str(tmp_path / "demo.json"), "--picture", str(tmp_path / "demo.png")]) == 0
    assert "too little for 20 steps" in " ".join(capsys.readouterr().out.split())
    budgeted = json.loads((tmp_path / "demo.json").read_text())["budgeted"]
    assert budgeted["peak_bytes"] <= budgeted["budget_bytes"]
