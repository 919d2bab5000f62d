"""What does a budget cost beside the steps themselves: per action of a schedule, per call, and where everything fits?

The step does next to nothing (one product of tiny tensors), so that what is left is the interpreter's own time. Seconds
are processor time on one thread, medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median

import torch

import remat
from harness import interleaved, publish, ratio
from remat.ambient import States
from remat.calls import Call
from remat.inputs import Inputs
from remat.knowledge import nature_of
from remat.loops import Outputs
from remat.schedules import Action, Advance, Backward, Drop, Load, Record, Store

Step = Callable[[torch.Tensor, None], tuple[torch.Tensor, None]]


def spent_on(step: Step, actions: Iterable[Action], counted: type, length: int) -> float:
    """Seconds for one action of a kind, in a run of the interpreter over `length` steps."""
    call = Call(step, torch.ones(4), Inputs(None, length))
    loop, states = call.loop(Outputs(length), call.carry, call.inputs.leaves), States(call.sources)
    run = call.interpreter(loop, nature_of(call), iter(()), call.carry, states, length)
    run.states.settle()
    run.start_backward([torch.ones(4)], [])
    total, count = 0.0, 0
    for action in actions:
        begin = time.process_time()
        run.do(action)
        if type(action) is counted:
            total, count = total + time.process_time() - begin, count + 1
    return total / count


def per_action(rounds: int, length: int) -> list[list[str]]:
    """A row for every kind of action, of one step each."""
    weight = torch.full((4,), 0.5, requires_grad=True)

    def step(h: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        return h * weight, None

    def advanced() -> None:
        with torch.no_grad():
            step(start, None)

    def recorded() -> torch.Tensor:
        return step(start, None)[0]

    start, ones = torch.ones(4), torch.ones(4)
    steps = range(length)
    singly = [Record(k, k + 1) for k in steps] + [Backward(k, k + 1) for k in reversed(steps)]
    stored = [each for k in steps for each in (Advance(k, k + 1), Store(k + 1), Load(k + 1), Drop(k + 1))]
    made = [recorded() for _ in range(length)]

    def plain_s(job: Callable[[int], object]) -> float:
        begin = time.process_time()
        for k in steps:
            job(k)
        return (time.process_time() - begin) / length

    rows = []
    for kind, actions, own in (
        (Advance, stored, lambda _: advanced()),
        (Store, stored, lambda _: None),
        (Load, stored, lambda _: None),
        (Drop, stored, lambda _: None),
        (Record, singly, lambda _: recorded()),
        (Backward, singly, lambda k: torch.autograd.grad(made[k], weight, ones, retain_graph=True)),
    ):
        seconds = median(spent_on(step, actions, kind, length) for _ in range(rounds))
        bare = median(plain_s(own) for _ in range(rounds))
        rows.append([kind.__name__, f"{seconds * 1e6:.1f}", f"{bare * 1e6:.1f}", f"{(seconds - bare) * 1e6:.1f}"])
    return rows


def per_call(rounds: int) -> list[str]:
    """Lines about whole calls in which everything fits."""
    torch.manual_seed(0)
    cell, start = torch.nn.RNNCell(8, 16), torch.zeros(4, 16)
    for parameter in cell.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = cell(x, h)
        return h, h.mean()

    def plain(xs: torch.Tensor) -> None:
        h, ys = start, []
        for x in xs:
            h, y = step(h, x)
            ys.append(y)
        torch.stack(ys).sum().backward()

    def budgeted(xs: torch.Tensor) -> None:
        remat.scan(step, start, xs, budget="1GiB")[1].sum().backward()

    long, one = torch.randn(1000, 4, 8), torch.randn(1, 4, 8)
    jobs = {
        "plain": lambda: plain(long),
        "scan": lambda: budgeted(long),
        "plain, one step": lambda: [plain(one) for _ in range(100)],
        "scan, one step": lambda: [budgeted(one) for _ in range(100)],
    }
    spent = interleaved(jobs, rounds)
    call_s = median(s.cpu_s for s in spent["scan, one step"]) - median(s.cpu_s for s in spent["plain, one step"])
    return [
        f"1000 steps of `nn.RNNCell(8, 16)`, batch 4, all kept: {ratio(spent, 'scan', 'plain'):.2f} × the plain loop's "
        f"{median(s.cpu_s for s in spent['plain']) * 1e3:.0f} ms.",
        "",
        f"A call, beside its steps: {call_s * 1e4:.0f} µs.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["action, of one step", "µs", "of which the step or its backward", "overhead, µs"]
    notes = per_call(options.rounds)
    publish("overhead", "What actions cost beside the steps", columns, per_action(options.rounds, options.steps), notes)


if __name__ == "__main__":
    main()
