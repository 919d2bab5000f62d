"""`remat.scan` when things go wrong, when several are alive at once, and inside other machinery.

Errors inside a step, threads, nesting, graphs used twice, hooks, checkpoints, compilers and transforms: what comes out
is what the plain loop gives, and what a failed call leaves behind is nothing.
"""

from __future__ import annotations

import gc
import itertools
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import remat
from budgets_of import AMPLE, plan_of, settings_at
from plain import (
    LOSSES,
    Loop,
    Program,
    Step,
    accumulator_mark,
    assert_same,
    buffers_of,
    observe,
    plain_scan,
    random_states,
    same,
    seed_everything,
    weighted_sum,
)
from remat.meter import metering
from steps import PROGRAMS, B, D, H, leaf, parameters

STEPS = 13
levels = pytest.mark.parametrize("level", ["ample", "tight", "constant"])
_numbers = itertools.count(10_000)


def at_level(level: str, name: str = "gru-cell") -> Loop:
    return partial(remat.scan, **settings_at(PROGRAMS[name](), level))


def renewed(step: Step) -> Step:
    """The same step, as one that remat has not seen before."""

    def new(carry: Any, x: Any, _number: int = next(_numbers)) -> tuple[Any, Any]:
        return step(carry, x)

    return new


def drained(lines: queue.SimpleQueue[Any]) -> list[Any]:
    return [lines.get() for _ in range(lines.qsize())]


@contextmanager
def without_collector() -> Iterator[None]:
    """What goes away in the body goes by reference counting."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- errors inside a step


class Breaks(nn.Module):
    """A step with dropout and batch statistics that raises at one of its calls, before it changes anything."""

    def __init__(self, at: int, error: BaseException | None) -> None:
        super().__init__()
        self.cell, self.norm, self.drop = nn.GRUCell(D, H), nn.BatchNorm1d(D), nn.Dropout(0.3)
        self.at, self.error = at, error
        self.calls = itertools.count()  # which remat cannot look into, and so does not turn back
        self.born = queue.SimpleQueue[weakref.ref[Tensor]]()

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1.5
        self.born.put(weakref.ref(x))
        if next(self.calls) == self.at and self.error is not None:
            raise self.error
        h = self.cell(self.norm(self.drop(x)), h)
        return h, h


def breaking(at: int = -1, error: BaseException | None = None) -> Program:
    seed_everything(1)
    net, xs = Breaks(at, error), leaf(STEPS, B, D)
    return Program(renewed(net), torch.zeros(B, H), xs, wrt={**parameters(net), "xs": xs}, modules=[net])


def calls_of(loop: Loop) -> tuple[int, int]:
    """How often the step is called when nothing is known of it: in the forward, and in all."""
    program = breaking()
    loss = LOSSES["everything"](*loop(program.step, program.carry, program.xs))
    assert loss is not None
    forward = next(program.modules[0].calls)
    loss.backward()
    return forward, next(program.modules[0].calls) - 1


def states_on_the_way() -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Buffers and random streams as the plain loop has them when step k raises."""
    states = []
    for at in range(STEPS + 1):
        program = breaking(at, ValueError("stop"))
        seed_everything(7)
        with suppress(ValueError):
            plain_scan(program.step, program.carry, program.xs)
        states.append((buffers_of(program.modules), random_states()))
    return states


ERRORS = [
    ("constant", KeyboardInterrupt()),
    ("tight", ValueError("in a step")),
    ("tight", KeyboardInterrupt()),
    ("tight", torch.OutOfMemoryError("simulated")),
    ("ample", torch.OutOfMemoryError("simulated")),
]


@pytest.mark.parametrize(("level", "error"), ERRORS, ids=lambda it: it if isinstance(it, str) else type(it).__name__)
def test_an_error_in_any_call_of_a_step_leaves_nothing_behind(level: str, error: BaseException) -> None:
    loop = partial(remat.scan, **settings_at(breaking(), level))
    expected = observe(plain_scan, breaking())
    forward, total = calls_of(loop)
    in_discovery, in_profile = {0, 1}, {12, forward - STEPS - 1}
    only_timed = (
        {forward - STEPS - 1} if level == "ample" else set()
    )  # the loop itself will come to what is wrong there
    in_forward = {forward - STEPS, forward - 1}
    in_backward = {forward, (forward + total) // 2, total - 1} if total > forward else set()
    possible = states_on_the_way()
    for at in sorted(in_discovery | in_profile | in_forward | in_backward):
        program = breaking(at, error)
        with without_collector():
            failed, after = _fail(loop, program, error)
        assert failed == ("nowhere" if at in only_timed else "forward" if at < forward else "backward"), at
        if failed != "forward":
            assert same(after, possible[STEPS]), f"call {at}: the backward left buffers or random streams changed"
        else:
            assert any(same(after, state) for state in possible), f"call {at}: a state that the plain loop never has"
        assert all((p.grad is None) == (failed != "nowhere") for p in program.wrt.values())
        program.modules[0].zero_grad()
        program.xs.grad = None
        program.modules[0].load_state_dict(breaking().modules[0].state_dict())
        assert_same(observe(loop, program), expected)  # the very same objects work in the next call


def _fail(loop: Loop, program: Program, error: BaseException) -> tuple[str, Any]:
    """Where the error came, and the state right after it; no bytes may be left."""
    where = ""
    seed_everything(7)
    with metering() as session:
        try:
            where = "forward"
            loss = LOSSES["everything"](*loop(program.step, program.carry, program.xs))
            assert loss is not None
            where = "backward"
            loss.backward()
            where = "nowhere"
        except type(error):
            pass
        loss = error.__traceback__ = error.__context__ = error.__cause__ = None
    state = buffers_of(program.modules), random_states()
    if where == "nowhere":
        return where, state
    assert not any(ref() is not None for ref in drained(program.modules[0].born)), f"tensors live on after the {where}"
    # A step may be measured in another thread, whose bytes are seen here only when they go.
    assert session.net_bytes <= 0, f"{session.net_bytes} bytes are left after an error in the {where}"
    return where, state


def test_ctrl_c_while_a_step_is_measured_in_a_thread_of_its_own() -> None:
    """The thread stops, the state is as it was, and the next call works."""
    seed_everything(1)
    cell, norm, xs = nn.GRUCell(D, H), nn.BatchNorm1d(D), leaf(STEPS, B, D)
    calls = itertools.count()
    reached, interrupted = threading.Event(), threading.Event()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if next(calls) == 4 and not interrupted.is_set():
            reached.set()
            while not interrupted.is_set():  # not in its wait: an error there could leave its lock taken for good
                time.sleep(0.01)
        h = cell(norm(x), h)
        return h, h

    def interrupt() -> None:
        reached.wait(60)
        signal.pthread_kill(main, signal.SIGINT)
        for _ in range(500):  # the thread that measures waits in its step until the interrupt has come through
            time.sleep(0.01)
            if not any(thread.name.startswith("remat") for thread in threading.enumerate()):
                return
        interrupted.set()

    main, start = threading.get_ident(), torch.zeros(B, H)
    before = buffers_of([norm]), random_states()
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt), save_on_cpu():  # under such hooks, steps are measured elsewhere
        remat.scan(step, start, xs, budget=AMPLE)
    other.join()
    assert not interrupted.is_set(), "the thread went on"
    assert not any(thread.name.startswith("remat") for thread in threading.enumerate())
    assert same((buffers_of([norm]), random_states()), before)
    interrupted.set()
    found = remat.scan(step, start, xs, budget=AMPLE)[1]
    norm.reset_running_stats()
    assert same(found, plain_scan(step, start, xs)[1])


@levels
def test_memory_falls_by_reference_counting(level: str) -> None:
    """Outputs, carries and tapes die with the last reference to the results, with and without a backward."""
    loop = at_level(level, "stacked-cells-with-dropout")
    born = queue.SimpleQueue[weakref.ref[Tensor]]()

    def run(backward: bool) -> int:
        program = PROGRAMS["stacked-cells-with-dropout"]()
        inner = program.step

        def step(carry: Any, x: Tensor) -> Any:
            carry, y = inner(carry, x)
            for tensor in (*carry, y):
                born.put(weakref.ref(tensor))
            return carry, y

        with metering() as session:
            loss = LOSSES["everything"](*loop(step, program.carry, program.xs))
            if backward:
                torch.autograd.grad(loss, list(program.wrt.values()))
            del loss
        return session.net_bytes

    with without_collector():
        run(True)  # now the step is known
        for backward in (True, False, True, False):
            assert run(backward) <= 0  # less: what was allocated before may be freed in here
            assert not any(ref() is not None for ref in drained(born))
        assert gc.collect() == 0 or gc.garbage == []


# ---- several at once


@levels
def test_gradient_accumulators_are_made_once_in_a_call(level: str) -> None:
    """Made by an operator that has let the GIL go, one can block another thread for good (PyTorch 2.10 and newer)."""
    cell, xs = nn.GRUCell(D, H), leaf(STEPS, B, D, grad=False)
    seen = queue.SimpleQueue[tuple[str, object]]()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for name, weight in cell.named_parameters():
            seen.put((name, accumulator_mark(weight)))
        h = cell(x, h)
        return h, h

    loop = at_level(level)
    for _ in range(2):
        _, ys = loop(step, torch.zeros(B, H), xs)
        ys.square().mean().backward()
        del ys
        names, marks = zip(*set(drained(seen)), strict=True)
        assert len(marks) == len(set(names)) == 4


_DRAWING = """
import gc, sys, threading
import torch
from remat.ambient import States
from remat.streams import random_sources

def draw():
    for _ in range(1000):
        with States(random_sources([])).undisturbed():
            torch.rand(3)

gc.callbacks.append(lambda *_: sum(range(3000)))  # Python that the collector runs, and threads change in
gc.set_threshold(5)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=draw) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_collector_may_run_while_a_generator_is_read() -> None:
    """PyTorch holds the generator's mutex then, and another thread would wait for it for good."""
    subprocess.run([sys.executable, "-c", _DRAWING], check=True, timeout=60)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "with a hook on a shared weight"])
@levels
def test_threads_share_a_module(level: str, hooked: bool) -> None:
    """Each thread differentiates its own loop over one shared cell; steps are new to remat in every round."""
    seed_everything(1)
    cell = nn.GRUCell(D, H)
    inputs = [leaf(STEPS, B, D, grad=False) for _ in range(4)]
    wanted = list(cell.parameters())
    fired = queue.SimpleQueue[Tensor]()
    if hooked:
        cell.weight_hh.register_hook(lambda g: fired.put(g.clone()))

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    def run(loop: Loop, xs: Tensor) -> tuple[Tensor, ...]:
        _, ys = loop(renewed(step), torch.zeros(B, H), xs)
        return torch.autograd.grad(ys.square().mean(), wanted)

    expected = [run(plain_scan, xs) for xs in inputs]
    whole = [fired.get() for _ in inputs] if hooked else []
    loop = at_level(level)
    rounds, failures, start = 3, queue.SimpleQueue[str](), threading.Barrier(len(inputs))

    def work(number: int) -> None:
        try:
            for _ in range(rounds):
                start.wait(60)
                got = run(loop, inputs[number])
                if not same(got, expected[number]):
                    failures.put(f"thread {number} has other gradients")
        except BaseException as error:
            failures.put(repr(error))
            start.abort()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures.empty(), failures.get()
    if hooked:
        seen = [fired.get() for _ in range(fired.qsize())]
        assert len(seen) == rounds * len(inputs), "hooks fire once for each backward"
        assert all(any(same(g, w) for w in whole) for g in seen)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@levels
def test_several_alive_and_backward_in_another_order(level: str, order: tuple[int, ...]) -> None:
    def run(loop: Loop) -> list[Any]:
        program = PROGRAMS["stacked-cells-with-dropout"]()
        seed_everything(3)
        losses = [LOSSES["everything"](*loop(program.step, program.carry, program.xs)) for _ in range(3)]
        return [torch.autograd.grad(losses[k], list(program.wrt.values())) for k in order] + [random_states()]

    assert same(run(at_level(level, "stacked-cells-with-dropout")), run(plain_scan))


def fenced(step: Step, carry: Tensor, xs: Tensor, cell: nn.Module) -> tuple[Tensor, Tensor]:
    """The plain loop as a function of its own: gradients of what it uses are summed inside of it first."""
    weights = {name: p.view_as(p) for name, p in cell.named_parameters()}
    with _swapped(cell, weights):
        return plain_scan(step, carry.view_as(carry), xs.view_as(xs))


@contextmanager
def _swapped(cell: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    own = dict(cell._parameters)
    cell._parameters.clear()
    vars(cell).update(weights)
    try:
        yield
    finally:
        for name in weights:
            del vars(cell)[name]
        cell._parameters.update(own)


def nested(outer: Loop, inner: Loop | None) -> list[Any]:
    """Words made of letters: a loop over time in every step of a loop over time."""
    seed_everything(1)
    letters, words, drop = nn.GRUCell(D, H), nn.GRUCell(H, H), nn.Dropout(0.2)
    xs = leaf(7, 5, B, D)

    def letter(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = letters(x, h)
        return h, h

    def word(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        last, all_ = fenced(letter, h, x, letters) if inner is None else inner(letter, h, x)
        h = words(drop(last + all_.mean(0)), h)
        return h, h

    carry, ys = outer(word, torch.zeros(B, H), xs)
    total = weighted_sum([carry, ys])
    assert total is not None
    wanted = [*letters.parameters(), *words.parameters(), xs]
    return [carry, ys, random_states(), *torch.autograd.grad(total, wanted)]


@pytest.mark.parametrize("inner", ["ample", "constant", "smallest"])
@pytest.mark.parametrize("outer", ["plain", "ample", "constant", "smallest"])
def test_a_loop_in_every_step_of_a_loop(outer: str, inner: str) -> None:
    loops: dict[str, Loop] = {
        "plain": plain_scan,
        "ample": partial(remat.scan, budget=AMPLE),
        "constant": partial(remat.scan, budget=AMPLE, planner="constant"),
        "smallest": tightly,
    }
    got = nested(loops[outer], loops[inner])
    assert same(got, nested(plain_scan, None))
    for mine, plain in zip(got[3:], nested(plain_scan, plain_scan)[3:], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)  # the order of additions differs, no more


def tightly(step: Any, carry: Any, xs: Any = None, *, length: int | None = None) -> tuple[Any, Any]:
    """Within the smallest budget."""
    try:
        return remat.scan(step, carry, xs, length=length, budget=1)
    except remat.InfeasibleBudget as refusal:
        return remat.scan(step, carry, xs, length=length, budget=refusal.smallest_budget_bytes)


# ---- graphs used more than once


@levels
def test_a_retained_graph_is_used_again_and_again(level: str) -> None:
    def run(loop: Loop) -> list[Any]:
        program = PROGRAMS["stacked-cells-with-dropout"]()
        seed_everything(3)
        carry, ys = loop(program.step, program.carry, program.xs)
        wanted = list(program.wrt.values())
        losses = [weighted_sum([*carry, ys]), ys[5].sum(), weighted_sum([ys]), carry[0].sum()]
        seen: list[Any] = []
        for number, loss in enumerate(losses):
            assert loss is not None
            last = number == len(losses) - 1
            seen.append(torch.autograd.grad(loss, wanted, retain_graph=not last, allow_unused=True))
            seen.append(random_states())
        return seen

    assert same(run(at_level(level, "stacked-cells-with-dropout")), run(plain_scan))


@levels
def test_a_used_graph_says_so_as_autograd_does(level: str) -> None:
    program = PROGRAMS["elman"]()
    _, ys = at_level(level, "elman")(program.step, program.carry, program.xs)
    loss = ys.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    again = ys.sum()
    with pytest.raises(RuntimeError, match="second time"):
        again.backward()


@levels
def test_one_subset_and_then_another(level: str) -> None:
    def run(loop: Loop) -> list[Any]:
        program = PROGRAMS["elman"]()
        _, ys = loop(program.step, program.carry, program.xs)
        loss = ys.square().sum()
        w, u, h, xs = (program.wrt[name] for name in ("w", "u", "h", "xs"))
        seen: list[Any] = [torch.autograd.grad(loss, [w], retain_graph=True)]
        seen.append(torch.autograd.grad(loss, [xs, h], retain_graph=True))
        loss.backward(inputs=[u], retain_graph=True)
        seen += [w.grad, u.grad, h.grad, xs.grad]
        loss.backward()
        return [*seen, w.grad, u.grad, h.grad, xs.grad]

    assert same(run(at_level(level, "elman")), run(plain_scan))


# ---- hooks and loggers


class Logged(nn.Module):
    """A cell, and a line for every call of it that remat does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)
        self.log = queue.SimpleQueue[tuple[float, bool]]()

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        self.log.put((x[0, 0].item(), remat.is_recomputing()))
        h = self.cell(x, h)
        return h, h


@pytest.mark.parametrize("level", ["ample", "half", "tight", "smallest", "constant"])
def test_is_recomputing_exactly_in_replays(level: str) -> None:
    seed_everything(1)
    net, xs = Logged(), leaf(STEPS, B, D)
    program = Program(net, torch.zeros(B, H), xs)
    settings = settings_at(program, level)
    made = plan_of(program, **settings)
    drained(net.log)
    assert not remat.is_recomputing()
    _, ys = remat.scan(net, program.carry, xs, **settings)
    assert drained(net.log) == [(x[0, 0].item(), False) for x in xs]
    ys.sum().backward()
    replays = drained(net.log)
    assert all(recomputing for _, recomputing in replays)
    assert len(replays) == made.forward_runs - STEPS
    assert not remat.is_recomputing()


@levels
def test_discovery_counts_as_recomputing(level: str) -> None:
    seed_everything(1)
    net, xs = Logged(), leaf(STEPS, B, D)
    settings = settings_at(PROGRAMS["gru-cell"](), level)
    remat.scan(renewed(net), torch.zeros(B, H), xs, **settings)[1].sum().backward()
    first = [value for value, recomputing in drained(net.log) if not recomputing]
    assert first == [x[0, 0].item() for x in xs]


@levels
def test_module_hooks_run_in_pairs_and_backward_hooks_see_what_they_should(level: str) -> None:
    def run(loop: Loop) -> tuple[list[Any], list[Any], list[Any]]:
        seed_everything(1)
        cell, xs = nn.GRUCell(D, H), leaf(STEPS, B, D)
        pairs, forward, backward = (queue.SimpleQueue[Any]() for _ in range(3))

        def seen(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
            pairs.put(-1)
            if not remat.is_recomputing():
                forward.put(result.detach().clone())
            return result * 0.9  # hooks may change results

        def before(_module: nn.Module, grad: Any) -> Any:
            backward.put(("before", grad[0].clone()))
            return (grad[0] * 1.1,)

        cell.register_forward_pre_hook(lambda *_: pairs.put(1))
        cell.register_forward_hook(seen)
        cell.register_full_backward_pre_hook(before)
        cell.register_full_backward_hook(lambda _m, grad, _o: backward.put([g.clone() for g in grad if g is not None]))

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = cell(x, h)
            return h, h

        _, ys = loop(renewed(step), torch.zeros(B, H), xs)
        drained(backward)  # what came while costs were measured
        found = torch.autograd.grad(ys.square().sum(), [*cell.parameters(), xs])
        return drained(pairs), drained(forward), [drained(backward), found]

    pairs, forward, backward = run(at_level(level))
    assert all(level in (0, 1) for level in itertools.accumulate(pairs))
    assert sum(pairs) == 0
    _, expected_forward, expected_backward = run(plain_scan)
    assert same(forward, expected_forward)
    assert same(backward, expected_backward)


@levels
def test_hooks_of_a_parameter_fire_once_with_the_whole_gradient(level: str) -> None:
    def run(loop: Loop) -> list[Any]:
        program = PROGRAMS["gru-cell"]()
        weight = program.modules[0].weight_hh
        calls, together = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        weight.register_hook(lambda g: (calls.put(("tensor", g.clone())), g.clamp(-0.1, 0.1))[1])
        weight.register_post_accumulate_grad_hook(lambda p: calls.put(("accumulated", p.grad.clone())))
        torch.autograd.graph.register_multi_grad_hook(
            list(program.wrt.values()), lambda grads: together.put([g.clone() for g in grads])
        )
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: calls.put(("node", grads[0].clone())))
        loss = LOSSES["everything"](*loop(program.step, program.carry, program.xs))
        assert loss is not None
        loss.backward()
        return [drained(calls), drained(together), [t.grad for t in program.wrt.values()]]

    assert same(run(at_level(level)), run(plain_scan))


# ---- inside other machinery


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", ["gru-cell", "stacked-cells-with-dropout", "batch-norm"])
@levels
def test_inside_a_checkpoint(
    level: str, name: str, reentrant: bool, known: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether remat has seen the step before or not; a new one is measured in there."""

    def checkpointed(loop: Loop) -> Loop:
        def run(step: Any, carry: Any, xs: Any, *, length: int | None = None) -> tuple[Any, Any]:
            def call(xs: Tensor) -> Any:
                return loop(step, carry, xs, length=length)

            return checkpoint(call, xs.clone(), use_reentrant=reentrant)

        return run

    make = PROGRAMS[name]
    wrt = [n for n in make().wrt if not reentrant or n == "xs"]  # the reentrant kind has .grad for the others

    def one(loop: Loop) -> Any:
        program = make()
        step = renewed(program.step)
        if known:
            with suppress(remat.InfeasibleBudget):
                remat.plan_scan(step, program.carry, program.xs, budget=1)
        seed_everything(7)
        carry, ys = checkpointed(loop)(step, program.carry, program.xs)
        if not reentrant:
            found = torch.autograd.grad(ys.square().sum(), [program.wrt[n] for n in wrt])
            return carry, ys, found, random_states()
        ys.square().sum().backward()
        return carry, ys, [t.grad for t in program.wrt.values()], random_states()

    assert same(one(at_level(level, name)), one(plain_scan))
    assert "callback" not in capfd.readouterr().err, "the profiler's own words for having lost its place"


@levels
def test_a_checkpoint_in_every_step(level: str) -> None:
    """Dropout inside of it: two replays of the same step, one within the other."""

    def make() -> Program:
        seed_everything(1)
        net = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.3), nn.Tanh(), nn.Linear(H, H))
        xs = leaf(STEPS, B, H)

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(checkpoint(net, h + x, use_reentrant=False))
            return h, h

        return Program(step, torch.zeros(B, H), xs, wrt={**parameters(net), "xs": xs})

    assert_same(observe(partial(remat.scan, **settings_at(make(), level)), make()), observe(plain_scan, make()))


def packed_as_numpy() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)


@pytest.mark.parametrize("around", [save_on_cpu, packed_as_numpy])
@pytest.mark.parametrize("name", ["elman", "gru-cell", "stacked-cells-with-dropout", "batch-norm"])
@levels
def test_saved_tensor_hooks_around_it(level: str, name: str, around: Callable[[], Any]) -> None:
    def hooked(loop: Loop) -> Loop:
        def run(*args: Any, **kwargs: Any) -> Any:
            with around():
                return loop(*args, **kwargs)

        return run

    make = PROGRAMS[name]
    assert_same(observe(hooked(at_level(level, name)), make()), observe(hooked(plain_scan), make()))


@levels
def test_anomaly_mode(level: str) -> None:
    def make() -> Program:
        return PROGRAMS["stacked-cells-with-dropout"]()

    settings = settings_at(make(), level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            expected = observe(plain_scan, make())
            assert_same(observe(partial(remat.scan, **settings), make()), expected)


@levels
def test_anomaly_mode_finds_a_nan(level: str) -> None:
    w, xs = torch.zeros(H, H, requires_grad=True), leaf(STEPS, B, H)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sqrt((h @ w).square()) * 0 + x  # the root's slope at 0 is infinite, and 0 times that is no number
        return h, h

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loop in (plain_scan, at_level(level)):
            with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
                loop(step, torch.zeros(B, H), xs)[1].sum().backward()


# torch.compile asks any tensor that is no leaf for its .grad, and so warns by itself.
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@compiling
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["ample", "constant"])
def test_a_compiled_model_that_calls_it(level: str, backend: str, steps: int) -> None:
    """A graph break, and the numbers of the plain loop, for the length it was compiled for and for others."""

    class Model(nn.Module):
        def __init__(self, loop: Loop) -> None:
            super().__init__()
            self.encode, self.cell, self.decode = nn.Linear(D, H), nn.GRUCell(H, H), nn.Linear(H, 3)
            self.loop = loop

        def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(x, h)
            return h, h

        def forward(self, xs: Tensor) -> Tensor:
            z = torch.relu(self.encode(xs))
            _, ys = self.loop(self.step, z.new_zeros(B, H), z)
            return self.decode(ys).exp().mean()

    def run(loop: Loop, compiled: bool) -> list[Any]:
        seed_everything(1)
        net = Model(loop)
        model = torch.compile(net, backend=backend) if compiled else net
        seen: list[Any] = []
        for length in (STEPS, steps, STEPS):
            xs = leaf(length, B, D)
            seen.append([(out := model(xs)), *torch.autograd.grad(out, [*net.parameters(), xs])])
        return seen

    planner = "constant" if level == "constant" else "auto"
    got = run(partial(remat.scan, budget=AMPLE, planner=planner), True)
    torch.compiler.reset()
    assert same(got, run(plain_scan, False))


@compiling
@pytest.mark.parametrize("planner", ["keep-all", "sqrt"])
def test_a_compiled_step_is_compiled_once(planner: str) -> None:
    """However long the loop, and for replays too."""
    compiled: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(1)
        return module.forward

    program = PROGRAMS["gru-cell"]()
    net = program.modules[0]

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(net(x, h) + x.mean())
        return h, h

    fast = torch.compile(step, backend=backend)
    loop = partial(remat.scan, budget=AMPLE, planner=planner)
    for steps in (10, 50, 200):
        xs = torch.randn(steps, B, D)
        expected = torch.autograd.grad(plain_scan(step, program.carry, xs)[1].sum(), list(net.parameters()))
        got = torch.autograd.grad(loop(fast, program.carry, xs)[1].sum(), list(net.parameters()))
        assert same(got, expected)
    torch.compiler.reset()
    assert sum(compiled) <= 2


def functional(loop: Loop) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    seed_everything(1)
    cell = nn.GRUCell(D, H)

    def loss(weights: dict[str, Tensor], xs: Tensor) -> Tensor:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.func.functional_call(cell, weights, (x, h))
            return h, h

        carry, ys = loop(step, xs.new_zeros(H), xs)
        return ys.square().sum() + carry.sum()

    return loss, {name: p.detach() for name, p in cell.named_parameters()}


def per_sample(f: Any, weights: Any, xs: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(f), (None, 1))(weights, xs)


TRANSFORMS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "grad": lambda f, w, xs: torch.func.grad_and_value(f)(w, xs[:, 0]),
    "grad of grad": lambda f, w, xs: torch.func.grad(lambda x: torch.func.grad(f, 1)(w, x).square().sum())(xs[:, 0]),
    "vmap": lambda f, w, xs: torch.func.vmap(f, (None, 1))(w, xs),
    "per-sample gradients": per_sample,
    "jvp": lambda f, w, xs: torch.func.jvp(lambda x: f(w, x), (xs[:, 0],), (torch.ones_like(xs[:, 0]),)),
    "vjp": lambda f, w, xs: torch.func.vjp(lambda x: f(w, x), xs[:, 0])[1](torch.tensor(2.0)),
    "jacrev": lambda f, w, xs: torch.func.jacrev(f, 1)(w, xs[:, 0]),
    "jacfwd": lambda f, w, xs: torch.func.jacfwd(f, 1)(w, xs[:3, 0]),
}


# What PyTorch itself warns of under transforms, with the plain loop as well.
transforming = pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:.torch.jit.script. is deprecated"
)


@transforming
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functional_transforms_take_the_plain_path(transform: str) -> None:
    xs = torch.randn(STEPS, 4, D, generator=torch.Generator().manual_seed(1))
    got, expected = (
        TRANSFORMS[transform](*functional(loop), xs) for loop in (partial(remat.scan, budget="64KiB"), plain_scan)
    )
    assert same(got, expected)


@transforming
def test_forward_mode_takes_the_plain_path() -> None:
    def run(loop: Loop) -> list[Any]:
        program = PROGRAMS["elman"]()
        with forward_ad.dual_level():
            xs = forward_ad.make_dual(program.xs, torch.ones_like(program.xs))
            carry, ys = loop(program.step, program.carry, xs)
            return [part for value in (carry, ys) for part in forward_ad.unpack_dual(value)]

    assert same(run(at_level("tight", "elman")), run(plain_scan))


@levels
def test_inference_mode_and_then_training(level: str) -> None:
    loop = at_level(level, "stacked-cells-with-dropout")
    program = PROGRAMS["stacked-cells-with-dropout"]()
    with torch.inference_mode():
        carry, ys = loop(program.step, program.carry, program.xs)
    assert ys.is_inference()
    assert all(leaf.is_inference() for leaf in carry)
    expected = observe(plain_scan, PROGRAMS["stacked-cells-with-dropout"]())
    assert_same(observe(loop, program), expected)


def test_without_autograd_a_step_may_hand_on_a_weight() -> None:
    weight = torch.ones(3).requires_grad_()

    def step(_carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return weight, x * weight

    with torch.no_grad():
        after, _ = remat.scan(step, torch.zeros(3), torch.ones(2, 3), budget="1MiB")
    assert after is weight  # as the plain loop says, and it still needs a gradient


# ---- parameters that are there only while they are used


class FilledWhenUsed(nn.Module):
    """A frozen layer beside a trained one, whose weight is brought before each use and sent away after it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(H, H), nn.Linear(H, H)
        self.frozen.requires_grad_(False)
        shards = {name: p.detach().clone() for name, p in self.frozen.named_parameters()}

        def fill(*_: Any) -> None:
            for name, parameter in self.frozen.named_parameters():
                parameter.data = shards[name]

        def empty(*_: Any) -> None:
            for parameter in self.frozen.parameters():
                parameter.data = torch.empty(0)

        def leave(_module: Any, _args: Any, result: Tensor) -> None:
            empty()
            if result.requires_grad:
                result.register_hook(fill)  # its backward needs the weight

        self.frozen.register_forward_pre_hook(fill)
        self.frozen.register_forward_hook(leave)
        self.frozen.register_full_backward_hook(empty)
        empty()

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.frozen(h + x) + self.adapter(x))
        return h, h


@levels
def test_frozen_weights_that_are_released_between_uses(level: str) -> None:
    def make() -> Program:
        seed_everything(1)
        net, xs = FilledWhenUsed(), leaf(STEPS, B, H)
        return Program(net, leaf(B, H), xs, wrt={**parameters(net.adapter), "xs": xs})

    program = make()
    assert_same(observe(partial(remat.scan, **settings_at(make(), level)), program), observe(plain_scan, make()))
    assert all(p.numel() == 0 for p in program.step.frozen.parameters())


# ---- what is remembered of steps


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


def test_advances_need_no_autograd_where_results_are_the_same_without() -> None:
    """The first step is compared with itself, also where later ones are looked at for what needs gradients."""
    modes: list[bool] = []
    cell, xs, start = nn.LSTMCell(D, H), torch.randn(STEPS, B, D), (torch.zeros(B, H), torch.zeros(B, H))

    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        if not remat.is_recomputing():
            modes.append(torch.is_grad_enabled())
        carry = cell(x, carry)
        return carry, carry[0].square().mean()

    with pytest.raises(remat.InfeasibleBudget) as refusal:
        remat.scan(step, start, xs, budget=1)
    remat.scan(step, start, xs, budget=refusal.value.smallest_budget_bytes)
    assert not all(modes[-STEPS:]), "steps that keep no tape run without autograd"
