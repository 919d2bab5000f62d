"""HSM and ISM on a real cell: milliseconds a step through `scan`, beside what theory says of the same plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from ..planners import hsm, ism
from ..planners.room import Room
from ..scan import plan_scan, scan
from .drawing import COLOURS, Figure, Line, Panel
from .theory import PAPER

_BATCH, _INPUT, _HIDDEN = 8, 16, 96
_SLOTS: Final = (5, 10, 50)
Carry = tuple[Tensor, Tensor]


class _Cell:
    """A small LSTM cell over random inputs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(_INPUT, _HIDDEN)

    def __call__(self, carry: Carry, x: Tensor) -> tuple[Carry, None]:
        return self.cell(x, carry), None

    def start(self) -> Carry:
        return torch.zeros(_BATCH, _HIDDEN), torch.zeros(_BATCH, _HIDDEN)

    def budget_bytes(self, xs: Tensor, strategy: str, slots: int) -> int:
        """The bytes that hold so many of the strategy's slots."""
        room = Room.of(plan_scan(self, self.start(), xs, budget="1TiB", planner="constant").chain)
        return (slots - 1) * (room.carry if strategy == "HSM" else max(room.alone, room.more)) - room.keep(0)

    def run(self, xs: Tensor, strategy: str, budget_bytes: int) -> float:
        """Processor milliseconds a step of one forward and backward."""
        self.cell.zero_grad()
        begin = time.process_time()
        carry = self.start()
        if strategy == "plain":
            for x in xs:
                carry, _ = self(carry, x)
        else:
            carry, _ = scan(self, carry, xs, budget=budget_bytes, planner=strategy.lower())
        carry[0].sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        return (time.process_time() - begin) / len(xs) * 1e3


def lengths(quick: bool) -> Figure:
    """Milliseconds a step against length, for several numbers of slots; the least of a few rounds."""
    steps, rounds = ((20, 60), 1) if quick else ((20, 50, 100, 200, 400, 800), 3)
    cell = _Cell()
    cases = [("plain", 0), *((strategy, m) for strategy in ("HSM", "ISM") for m in _SLOTS)]
    with _one_thread():
        least = _least(cell, cases, steps, rounds)
    rows = [(strategy, m, t, least[(strategy, m), t], _theory(strategy, t, m)) for strategy, m in cases for t in steps]
    plain = [least[("plain", 0), t] for t in steps]
    panels = []
    for strategy in ("HSM", "ISM"):
        lines = [Line("plain loop", steps, plain, "#9aa5b1", "o--")]
        for m, colour in zip(_SLOTS, COLOURS, strict=False):
            lines.append(Line(f"{m} slots", steps, [least[(strategy, m), t] for t in steps], colour, "o-"))
            theory = [plain[-1] * _theory(strategy, t, m) / 3 for t in steps]
            lines.append(Line("", steps, theory, colour, ":"))
        lines.append(Line("theory", [], [], "#9aa5b1", ":"))
        panels.append(Panel(f"{strategy} through remat.scan", "steps of the sequence", "ms a step", lines, log_y=False))
    slowest = least[("HSM", _SLOTS[0]), steps[-1]] / plain[-1]
    predicted = _theory("HSM", steps[-1], _SLOTS[0]) / 3
    return Figure(
        f"{PAPER}, sections 3.1 and 3.2: cost against length, measured on an LSTM cell",
        f"Processor time, least of {rounds}; LSTMCell({_INPUT}, {_HIDDEN}), batch {_BATCH}. Theory: forward runs a step"
        " + 2, of which plain takes 3.",
        f"{steps[-1]} steps, HSM with {_SLOTS[0]} slots: {slowest:.2f} × the plain loop's time, theory {predicted:.2f}",
        ("strategy", "slots", "steps", "ms_a_step", "theory_runs_a_step"),
        rows,
        panels,
    )


def _least(
    cell: _Cell, cases: Sequence[tuple[str, int]], steps: Sequence[int], rounds: int
) -> dict[tuple[tuple[str, int], int], float]:
    least = {(case, t): float("inf") for case in cases for t in steps}
    for _ in range(rounds):  # interleaved, so that a busy moment spoils no case alone
        for t in steps:
            xs = torch.randn(t, _BATCH, _INPUT)
            for case in cases:
                budget = cell.budget_bytes(xs, *case) if case[1] else 0
                least[case, t] = min(least[case, t], cell.run(xs, case[0], budget))
    return least


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other would count as work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _theory(strategy: str, steps: int, slots: int) -> float:
    """Forward runs a step and 2 for the backward."""
    if strategy == "plain":
        return 3.0
    cost = hsm.cost(steps, min(slots, steps)) if strategy == "HSM" else ism.cost(steps, min(slots, steps))
    return cost / steps + 2
