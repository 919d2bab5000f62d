"""What the README shows runs as it is written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from remat.chains import Chain, Stage, Tape
from remat.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), namespace)
    taken, foreseen = map(int, re.findall(r"(\d+) bytes at most, foreseen were (\d+)", capsys.readouterr().out)[0])
    assert taken <= 8 * 2**20
    assert abs(taken - foreseen) <= 0.02 * 8 * 2**20
    assert (tmp_path / "plan.png").exists()
    assert (tmp_path / "plan.html").exists()


@pytest.mark.parametrize("command", re.findall(r"^\.venv/bin/remat (plan .*)$", README, re.MULTILINE))
def test_its_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chain.json").write_bytes(Chain.repeat(Stage(2**20, (Tape(2**22),)), 100).to_json())  # profiled before
    assert main(shlex.split(command, comments=True)) == 0
