"""The demo: a character LSTM on real text, trained twice side by side from one seed, plain and under a budget.

Both see the same batches. After every iteration their gradients are compared, which have to be equal bit for bit.
"""

from __future__ import annotations

import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from .errors import InfeasibleBudget, RematError
from .meter import measure
from .report import draw_memory, measured_curve
from .scan import plan_scan, scan
from .sizes import format_bytes

_VOCABULARY: Final = 96  # the commonest characters; the others are one
_STANDARD_LIBRARY_CHARACTERS: Final = 1_000_000  # as much of it as a short training can see
_BATCH: Final = 16
_HIDDEN: Final = 256
_SECONDS: Final = 60.0  # no iteration begins later, so that the demo ends within two minutes

Carry = tuple[Tensor, Tensor]
Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, Carry, Batch], Tensor]


# ---- text


def standard_library_text() -> str:
    """The source of Python's own standard library, from its beginning."""
    parts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size >= _STANDARD_LIBRARY_CHARACTERS:
            break
    if not parts:
        raise RematError("the source of Python's standard library is not on this machine; give a text with --text FILE")
    return "".join(parts)


def read_tokens(path: Path | None, length: int) -> Tensor:
    """A text file, or the standard library's source, encoded.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is shorter than one passage of `length` characters and the one that follows.
    """
    text = standard_library_text() if path is None else path.read_text(encoding="utf-8", errors="replace")
    if len(text) <= length:
        raise ValueError(f"it has {len(text)} characters, but a passage takes {length + 1}: give a smaller --length")
    return encode(text)


def encode(text: str) -> Tensor:
    """Characters as numbers below `_VOCABULARY`, commonest first; the rare ones share the last."""
    common = [character for character, _ in Counter(text).most_common(_VOCABULARY - 1)]
    numbers = {character: number for number, character in enumerate(common)}
    return torch.tensor([numbers.get(character, _VOCABULARY - 1) for character in text])


def batch(tokens: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random passages and their next characters: two tensors of shape (length, batch)."""
    starts = torch.randint(len(tokens) - length, (_BATCH,), generator=generator)
    passages = tokens[starts + torch.arange(length + 1)[:, None]]
    return passages[:-1], passages[1:]


# ---- model


class CharacterModel(nn.Module):
    """One step of a character LSTM: it reads a character and pays for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 64)
        self.cell = nn.LSTMCell(64, _HIDDEN)
        self.head = nn.Linear(_HIDDEN, _VOCABULARY)

    def forward(self, carry: Carry, x: tuple[Tensor, Tensor]) -> tuple[Carry, Tensor]:
        token, following = x
        hidden, cell = self.cell(self.embedding(token), carry)
        return (hidden, cell), functional.cross_entropy(self.head(hidden), following)

    def start(self) -> Carry:
        return torch.zeros(_BATCH, _HIDDEN), torch.zeros(_BATCH, _HIDDEN)


def plain_loop(model: nn.Module, carry: Carry, xs: Batch) -> Tensor:
    """The losses of all steps by plain backpropagation through time."""
    losses = []
    for x in zip(*xs, strict=True):
        carry, loss = model(carry, x)
        losses.append(loss)
    return torch.stack(losses)


class Trainee:
    """One of the two: a model, how it is run over time, and what its iterations took."""

    def __init__(self, name: str, loop: Loop) -> None:
        torch.manual_seed(0)
        self.name = name
        self.loop = loop
        self.model = CharacterModel()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.forward_runs, self.length = 0, 1
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.peaks: list[int] = []
        self.timeline: tuple[tuple[float, int], ...] = ()
        self.model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forward_runs += 1

    def iterate(self, xs: Batch) -> None:
        """Forward and backward, measured; the gradients are left to be compared before `learn`."""
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_runs, self.length = 0, len(xs[0])
        carry = self.model.start()
        begin = time.process_time()
        measured = measure(lambda: self._loss_and_gradients(carry, xs))
        self.processor_seconds.append(time.process_time() - begin)
        self.losses.append(measured.value)
        self.seconds.append(measured.seconds)
        self.peaks.append(measured.peak_bytes)
        self.timeline = measured.timeline

    def _loss_and_gradients(self, carry: Carry, xs: Batch) -> float:
        loss = self.loop(self.model, carry, xs).mean()
        torch.autograd.backward(loss)
        return loss.item()

    def learn(self) -> None:
        """Clip and step, as recurrent networks need it."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def figures(self) -> dict[str, float]:
        """For the JSON file. The first iteration also warms up, measures the step and plans, so it is not timed."""
        return {
            "peak_bytes": max(self.peaks),
            "seconds_per_iteration": median(self.seconds[1:] or self.seconds),
            "processor_seconds_per_iteration": median(self.processor_seconds[1:] or self.processor_seconds),
            "forward_runs_per_step": self.forward_runs / self.length,
        }


def gradient_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' gradients; 0 only if all are equal bit for bit."""
    largest = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        if not torch.equal(a.grad, b.grad):
            largest = max(largest, (a.grad - b.grad).abs().max().item())
    return largest


@dataclass(frozen=True)
class Outcome:
    """Both after training, and what has to be equal."""

    plain: Trainee
    budgeted: Trainee
    budget_bytes: int
    predicted_peak_bytes: int
    max_gradient_difference: float

    def figures(self) -> dict[str, Any]:
        """For the JSON file."""
        budgeted = {"budget_bytes": self.budget_bytes, "predicted_peak_bytes": self.predicted_peak_bytes}
        return {
            "plain": self.plain.figures(),
            "budgeted": self.budgeted.figures() | budgeted,
            "max_gradient_difference": self.max_gradient_difference,
        }

    def draw(self, path: str) -> None:
        """Memory over time in the last iteration of both, with the budget, into a picture file."""
        curves = {trainee.name: measured_curve(trainee.timeline) for trainee in (self.plain, self.budgeted)}
        draw_memory(path, curves, self.budget_bytes, title="Memory over time, measured: one training iteration")


# ---- what is seen


class _Display:
    """Progress of both: live on a terminal, a few plain lines elsewhere."""

    def __init__(self, console: Console, iterations: int) -> None:
        self.console = console
        self.iterations = iterations
        self.progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.bars: dict[str, TaskID] = {}

    def show(self, trainee: Trainee, budget_bytes: int | None) -> None:
        done = len(trainee.losses)
        limit = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
        memory = f"{format_bytes(trainee.peaks[-1])}{limit}"
        state = f"loss {trainee.losses[-1]:.3f}  {trainee.seconds[-1]:.2f} s  {memory}"
        if not self.console.is_terminal:
            if done in {1, self.iterations} or done % 5 == 0:
                self.console.print(f"{trainee.name:<8} {done:>3}/{self.iterations}  {state}")
            return
        if trainee.name not in self.bars:
            self.bars[trainee.name] = self.progress.add_task(trainee.name, total=self.iterations, state="")
        self.progress.update(self.bars[trainee.name], completed=done, state=state)


def summary(outcome: Outcome) -> Table:
    """The figures of both side by side."""
    figures = outcome.figures()
    a, b = figures["plain"], figures["budgeted"]
    table = Table(title=f"One of {len(outcome.plain.losses)} iterations")
    table.add_column()
    table.add_column("plain", justify="right")
    table.add_column(f"within {format_bytes(b['budget_bytes'])}", justify="right")
    table.add_row("peak, predicted", "–", format_bytes(b["predicted_peak_bytes"]))
    table.add_row("peak, measured", format_bytes(a["peak_bytes"]), format_bytes(b["peak_bytes"]))
    table.add_row("share of the budget", "–", f"{100 * b['peak_bytes'] / b['budget_bytes']:.1f} %")
    table.add_row("share of plain", "100 %", f"{100 * b['peak_bytes'] / a['peak_bytes']:.1f} %")
    for kind in ("seconds", "processor_seconds"):
        one, other = (figures[name][f"{kind}_per_iteration"] for name in ("plain", "budgeted"))
        ratio = f"{other:.2f} s ({other / one:.2f} ×)"
        table.add_row(kind.replace("_seconds", " time").replace("seconds", "time"), f"{one:.2f} s", ratio)
    table.add_row("forward runs a step", f"{a['forward_runs_per_step']:.3g}", f"{b['forward_runs_per_step']:.3g}")
    table.add_row("last loss", f"{outcome.plain.losses[-1]:.6f}", f"{outcome.budgeted.losses[-1]:.6f}")
    table.add_row("largest gradient difference", "", f"{figures['max_gradient_difference']:g}")
    return table


# ---- the run


@contextmanager
def _one_thread() -> Iterator[None]:
    """Kernels this small gain nothing from more threads, and threads that wait for each other lose a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(console: Console, tokens: Tensor, *, length: int, budget: int | float, iterations: int) -> Outcome:
    """Train both in turn on the same passages.

    Args:
        console: where progress is shown.
        tokens: the text, encoded.
        length: how many characters gradients go back over.
        budget: bytes, or as a fraction (a float) the share of what the first plain iteration takes, or the
            smallest share that works if that is more.
        iterations: at most so many, fewer on a slow machine.

    Raises:
        InfeasibleBudget: the budget is too small; says the smallest that works.
    """
    generator = torch.Generator().manual_seed(1)
    display, difference, end = _Display(console, iterations), 0.0, time.monotonic() + _SECONDS
    plain = Trainee("plain", plain_loop)
    with _one_thread(), display.progress:
        xs = batch(tokens, length, generator)
        plain.iterate(xs)
        budget_bytes = budget if isinstance(budget, int) else max(1, int(budget * plain.peaks[0]))
        budgeted = Trainee("budgeted", lambda model, carry, xs: scan(model, carry, xs, budget=budget_bytes)[1])
        try:
            predicted = plan_scan(budgeted.model, budgeted.model.start(), xs, budget=budget_bytes).peak_bytes
        except InfeasibleBudget as refusal:
            if isinstance(budget, int):
                raise
            budget_bytes = refusal.smallest_budget_bytes
            console.print(
                f"{budget:.0%} of the plain run's memory is too little for {length} steps; this takes the smallest "
                f"share that works, {budget_bytes / plain.peaks[0]:.1%}"
            )
            predicted = plan_scan(budgeted.model, budgeted.model.start(), xs, budget=budget_bytes).peak_bytes
        for done in range(iterations):
            if done:
                xs = batch(tokens, length, generator)
                plain.iterate(xs)
            display.show(plain, None)
            budgeted.iterate(xs)
            display.show(budgeted, budget_bytes)
            difference = max(difference, gradient_difference(plain.model, budgeted.model))
            plain.learn()
            budgeted.learn()
            if 2 <= done < iterations - 1 and time.monotonic() > end:
                console.print(f"{_SECONDS:g} s are over: {done + 1} iterations have to do")
                break
    return Outcome(plain, budgeted, budget_bytes, predicted, difference)
