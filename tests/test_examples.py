"""Every example runs, small: its budget holds and its gradients are the plain run's."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "character_lstm": "--length 50 --hidden 16 --batch 8 --iterations 2 --share 0.3",
    "deep_resnet": "--blocks 9 --width 16 --size 16 --batch 4 --share 0.6",
    "gpt": "--blocks 5 --width 16 --heads 2 --length 32 --batch 4 --frozen 1 --share 0.9",
    "growing_automaton": "--steps 16 --size 12 --batch 2 --iterations 1 --share 0.5",
    "meta_learning": "--steps 12 --hidden 12 --points 100 --share 0.4",
    "neural_ode": "--steps 40 --hidden 16 --batch 64 --share 0.2",
    "sampling_chain": "--steps 20 --hidden 16 --batch 64 --share 0.4",
    "simulation": "--steps 120 --masses 5 --ropes 16 --iterations 1 --share 0.2",
    "spiking_network": "--steps 60 --hidden 16 --batch 16 --share 0.3",
}


def test_all_are_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "comparison"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of snnTorch's import
@pytest.mark.parametrize("name", SMALL)
def test_an_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "spiking_network":
        pytest.importorskip("snntorch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = import_module(name).main(SMALL[name].split())
    assert found.equal
    assert found.peak_bytes <= found.budget_bytes < found.plain_bytes
    assert "equal, bit for bit" in capsys.readouterr().out
    assert sys.modules[name].__doc__.count(f"python examples/{name}.py") == 1
