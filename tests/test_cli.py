"""The command: what it prints, what it writes, and one clear line for everything that is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import remat
from remat.chains import Chain, Stage, Tape
from remat.cli import main
from remat.schedules import Schedule

BYTES = ["plan", "--steps", "200", "--carry", "32KiB", "--tape", "120KiB", "--budget", "5MiB"]
SLOTS = ["plan", "--steps", "1000", "--slots", "50", "--planner", "ism"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "remat.cli", *arguments], capture_output=True, text=True, check=False)


def test_a_plan_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BYTES) == 0
    out = capsys.readouterr().out
    for expected in ("tight, 200 stages", "5 MiB", "forward runs", "10 % more", "10 % less", "▒ backward"):
        assert expected in out


@pytest.mark.parametrize("command", [BYTES, SLOTS], ids=["bytes", "slots"])
def test_it_fits_a_terminal_and_a_pipe(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_the_papers_headline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*SLOTS, "--json", str(path)]) == 0
    assert "1950: 1.95 a stage" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert figures == {
        "planner": "ism",
        "steps": 1000,
        "forward_runs": 1950,
        "peak_slots": 50,
        "budget_slots": 50,
        "seconds": 3950.0,
    }


@pytest.mark.parametrize("name", remat.planners.names())
def test_every_planner_writes_its_figures_and_actions(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--carry", "1KiB", "--tape", "3KiB", "--budget", "1MiB", "--workspace", "500"]
    assert main(["plan", "--steps", "40", *sizes, "--planner", name, "--json", "-", "--actions"]) == 0
    written = capsys.readouterr().out
    figures = json.loads(written)
    assert (figures["planner"], figures["steps"]) == (name, 40)
    assert figures["peak_bytes"] <= 2**20
    actions = Schedule.from_json(
        json.dumps({"length": 40, "planner": name, "actions": figures["actions"]})
    )  # they read back as the actions that they were
    runs = sum(action.stop - action.start for action in actions if type(action).__name__ in {"Advance", "Record"})
    assert figures["forward_runs"] == runs >= 40


def test_times_are_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--forward-ms", "2", "--record-ms", "3", "--backward-ms", "5"]
    assert main([*BYTES[:-1], "1GiB", *times, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(200 * 8e-3)


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main([*BYTES, "--picture", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


CURVE_BYTES = ["curve", "--steps", "150", "--carry", "32KiB", "--tape", "120KiB"]
CURVE_SLOTS = ["curve", "--steps", "150", "--alpha", "3"]


@pytest.mark.parametrize("command", [CURVE_BYTES, CURVE_SLOTS], ids=["bytes", "slots"])
def test_a_curve_fits_a_terminal_and_marks_its_knee(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 50
    assert "\x1b" not in out
    assert not any(line != line.rstrip() for line in out.splitlines())
    for mark in ("▲ the smallest", "◆ the knee", "■ more gains nothing"):
        assert out.count(mark) == 1
        assert out.count(mark[0]) == 2  # in the table, and in the picture


def test_a_curve_says_what_plans_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    assert main([*CURVE_SLOTS, "--json", "-", "--picture", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    curve = json.loads(capsys.readouterr().out)
    assert curve["exact"]
    assert curve["smallest_slots"] == 1
    assert curve["knee"] in curve["points"]
    for point in curve["points"][:: len(curve["points"]) // 4]:
        slots = str(point["slots"])
        assert main(["plan", "--steps", "150", "--alpha", "3", "--slots", slots, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["seconds"] == point["seconds"]


def test_the_curve_of_a_chain_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    stages = [(Stage(k % 3 + 1, (Tape(k % 5 + 2),)), 1) for k in range(12)]
    path.write_bytes(Chain(tuple(stages), 2).to_json())
    assert main(["curve", "--chain", str(path)]) == 0
    assert "◆ the knee" in capsys.readouterr().out
    path.write_text('{"runs": 5}')
    assert main(["curve", "--chain", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"remat: {path}: Expected `array`")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("frobnicate", "No such command"),
        ("plan", "--steps"),
        ("plan --steps", "--steps"),
        ("plan --steps 0 --slots 4", "whole number of at least 1, not '0'"),
        ("plan --steps -3 --slots 4", "not '-3'"),
        ("plan --steps many --slots 4", "not 'many'"),
        ("plan --steps 10 --slots 1.5", "not '1.5'"),
        ("plan --steps 10 --nope", "--nope"),
        ("plan --steps 10", "--carry, --tape, --budget missing"),
        ("plan --steps 10 --carry 5", "--tape, --budget missing"),
        (
            "plan --steps 10 --carry 5 --tape 7Gib please",
            "please says all about the chain and excludes --steps, --carry, --tape",
        ),
        ("plan chain.json", "--budget missing"),
        ("plan chain.json and --budget 1GiB", "unexpected extra argument"),
        ("plan pyproject.toml --budget 1GiB", "pyproject.toml: "),
        ("plan --steps 10 --carry x --tape 1 --budget 9", "'x' is not a size"),
        ("plan --steps 10 --carry 1 --tape 1 --budget 0", "must be positive"),
        ("plan --steps 10 --slots 3 --budget 5MiB", "excludes --budget"),
        ("plan --steps 10 --slots 3 --forward-ms 1", "excludes --forward-ms"),
        ("plan --steps 10 --carry 1 --tape 1 --budget 99 --alpha 2", "--alpha belongs to --slots"),
        ("plan --steps 10 --carry 1 --tape 1 --budget 99 --record-ms nan", "not 'nan'"),
        ("plan --steps 10 --carry 1 --tape 1 --budget 99 --backward-ms -1", "not '-1'"),
        ("plan --steps 10 --slots 3 --planner nope", "no planner is called 'nope'; there are tight, "),
        ("plan --steps 10 --slots 3 --actions", "--json, which is missing"),
        ("plan --steps 10 --slots 3 --json /no/such/folder/x.json", "/no/such/folder/x.json cannot be written"),
        ("plan --steps 10 --slots 3 --json /", "/ cannot be written"),
        ("plan --steps 10 --slots 3 --picture x.txt", "ends in .png, .svg or .pdf"),
        ("plan --steps 10 --slots 3 --planner keep-all", "--slots 3: too few for keep-all; the smallest that works is"),
        ("plan --steps 10 --carry 1KiB --tape 4KiB --budget 1KiB", "the smallest that works is 7168 bytes (7 KiB)"),
        ("curve", "--steps missing"),
        ("curve --steps 10", "--carry, --tape missing"),
        ("curve --steps 10 --carry 5", "--tape missing"),
        ("curve --steps 0 --alpha 2", "not '0'"),
        ("curve --steps 10 --alpha 2 --tape 5", "excludes --tape"),
        ("curve --chain x.json --steps 5", "excludes --steps"),
        ("curve --chain /no/such/file", "No such file or directory"),
        ("curve --chain pyproject.toml", "Expected `object`"),
        ("report", "OUT.html"),
        ("report plan.txt --steps 5 --carry 1 --tape 1", "ends in .html, not 'plan.txt'"),
        ("report /no/such/x.html --steps 5 --carry 1 --tape 1", "cannot be written"),
        ("report x.html", "give it with --carry and --tape, or --chain alone"),
        ("report x.html --steps 10 --carry 5", "--tape missing: give --carry and --tape, or --chain alone"),
        ("report x.html --steps 10 --carry 5 --tape 5 --planner nope", "no planner is called"),
        ("curve --steps 10 --alpha 2 --picture x.txt", "ends in .png, .svg or .pdf"),
        ("figures --out pyproject.toml", "--out pyproject.toml: cannot be written: File exists"),
        ("figures --out /proc/x", "/proc/x: cannot be written"),
        ("bench", "EXPERIMENT"),
        ("bench resnet", "EXPERIMENT must be resnet1000, not 'resnet'"),
        ("demo --budget lots", "'lots' is not a size"),
        ("demo --budget 0%", "percentage above 0"),
        ("demo --budget x%", "percentage above 0"),
        ("demo --text /no/such/file", "No such file or directory"),
        ("demo --length 0", "not '0'"),
        ("demo --picture demo.txt", "ends in .png, .svg or .pdf"),
        ("demo --text pyproject.toml --length 100000", "give a smaller --length"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("remat: ")
    assert message in captured.err


def test_the_deep_network_is_trained_within_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "resnet1000", "--layers", "29", "--batch", "4", "--size", "16", "--rounds", "1"]) == 0
    heading, plain, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "budget"
    assert plain.split()[3] == "100.0%"
    assert len(rows) == 5
    assert "too small" in rows[-1]
    kept = [row for row in rows if "too small" not in row]
    assert kept
    for row in kept:
        share, _, _, measured, _, foreseen, gradients = row.split()
        assert float(measured[:-1]) <= float(share[:-1])
        assert float(foreseen) >= 1
        assert gradients == "equal"


def test_the_smallest_slots_work(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--steps", "10", "--planner", "keep-all", "--json", "-", "--slots"]
    assert main([*command, "3"]) == 2
    smallest = capsys.readouterr().err.split()[-1]
    assert main([*command, smallest]) == 0
    assert main([*command, str(int(smallest) - 1)]) == 2


def test_as_a_program() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"remat {remat.__version__}\n", "")
    done = run()
    assert done.returncode == 0
    assert "plan" in done.stdout
    done = run("plan", "--steps", "x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[str]]:
    """The command in the middle of writing more than a pipe holds."""
    command = ["plan", "--steps", "20000", "--slots", "50", "--planner", "hsm", "--json", "-", "--actions"]
    program = [sys.executable, "-m", "remat.cli", *command]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "{\n"
        yield process


def test_a_reader_who_has_seen_enough(writer: subprocess.Popen[str]) -> None:
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == ""
    assert writer.wait(60) == 1  # quietly, as others do


def test_an_interrupt_ends_quietly(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGINT)
    _, error = writer.communicate(timeout=60)
    assert (writer.returncode, error) == (130, "")


def test_looking_at_plans_needs_no_torch() -> None:
    code = f"import sys; from remat.cli import main; main({SLOTS!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- a network of one's own

NETWORK = """
import torch
from torch import nn

def blocks():
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)] + [nn.Linear(8, 2)]

def masked():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) * mask
    return nn.ModuleList([Masked(8, 8) for _ in range(3)])

model = nn.Linear(2, 2)
"""


@pytest.mark.parametrize("meta", [[], ["--meta"]], ids=["here", "on paper"])
def test_a_network_is_profiled_into_a_file_and_planned(
    meta: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiled_net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "profiled_net.py:blocks", "--input", "16x8", "--save", "chain.json", *meta]) == 0
    out = capsys.readouterr().out
    assert "10 blocks; keeping everything takes" in out
    chain = Chain.from_json((tmp_path / "chain.json").read_bytes())
    assert chain.length == 10
    assert chain.carry_bytes(3) == 16 * 8 * 4
    assert main(["plan", "chain.json", "--budget", "1MiB", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 10
    assert main(["profile", "profiled_net:masked", "--input", "4,8", "--input", "4,8:bool", "--save", "-", *meta]) == 0
    assert Chain.from_json(capsys.readouterr().out).length == 3


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("profile profiled_net.py:blocks", "--input"),
        ("profile profiled_net.py:blocks --input 4y8", "must be a shape like"),
        ("profile profiled_net.py:blocks --input 4x8:integer", "names no dtype"),
        ("profile profiled_net.py --input 4x8", "must be MODULE:FUNCTION"),
        ("profile none.py:blocks --input 4x8", "none.py"),
        ("profile profiled_net.py:layers --input 4x8", "layers"),
        ("profile profiled_net.py:model --input 4x2", "gives Linear, and blocks are profiled"),
    ],
)
def test_what_is_wrong_with_a_network_is_said_in_a_line(
    command: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiled_net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1
