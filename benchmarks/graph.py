"""What does a byte budget cost a model compiled with backend "remat", and is the budget kept? And what do others do?

Peak and time of a training step as shares of plain eager's, gradients of parameters already allocated; predicted and
measured peak; whether loss, gradients, buffers and random stream are eager's bit for bit. Networks: a GPT-like decoder
(12 blocks, width 512, sequence 256, batch 4, dropout 0.1), a ResNet of 100 batch-norm blocks, an LSTM unrolled over 60
steps, and Hugging Face's GPT-2 and vision transformer from configurations. Beside them, in the same rounds:
`torch.utils.checkpoint` for each block and nested, and `activation_memory_budget` of torch.compile.

Every network runs in a process of its own, and gets its share of the time: what no time is left for is said so.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from harness import RESULTS, interleaved, publish, ratio, where
from remat.graph import compilation
from remat.graph.backend import last_step
from remat.graph.lowering import straight
from remat.graph.planning import GraphPlan

SHARES = {"decoder": (1.0, 0.55, 0.35, 0.23, 0.15, 0.12)}
OTHER_SHARES = (1.0, 0.5, 0.25)
FRACTIONS = {"decoder": (0.7, 0.5, 0.1), "lstm": ()}  # of activation_memory_budget; on loops it takes minutes
OTHER_FRACTIONS = (0.5,)
SECONDS = {"decoder": 300, "gpt2": 100, "vit": 100, "lstm": 100, "residual": 260}
_GRAPHS = 4  # that a model is captured in, at most
COMPILED_SHARE = 0.65  # of a network's seconds after which no further cell is begun; rounds take the rest
COLUMNS = (
    *("network", "way", "budget", "measured", "predicted", "exact"),
    *("planned time", "cpu time", "wall time", "planning, s", "compiling, s"),
)
NOTES = (
    "Budget and measured peak are shares of plain eager's peak; times are medians over interleaved rounds of the ratio",
    "to eager; 'predicted' is how far the prediction lies from the measured peak; 'planned time' is what the plan",
    "expects of itself over no recomputation; 'exact': loss, gradients, buffers and the random state after it are",
    "eager's bit for bit, or else the largest relative error of a gradient. Planning is part of compiling, both in",
    "processor time. activation_memory_budget has torch's own partitioner, and around it the code of backend remat,",
    "so that what it saves is freed as early. One thread; an earlier run may have had more.",
    "Not here: rockmate asks for CUDA by name, ckptplan refuses the CPU.",
)
Input = tuple[Any, ...]


# ---- networks


def shared() -> Any:
    """The networks of the tests."""
    path = Path(__file__).parent.parent / "tests" / "graph" / "networks.py"
    spec = spec_from_file_location("tested_networks", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Loss(nn.Module):
    """A Hugging Face model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(given, labels=labels).loss
        return result


def hugging(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    return Loss(getattr(transformers, model)(getattr(transformers, config)(**options)))


def network(name: str) -> tuple[nn.Module, Input]:
    """A network in training mode, and its input."""
    torch.manual_seed(0)
    made: tuple[nn.Module, Input]
    if name == "decoder":
        made = shared().Decoder(12, 512, 8, 2048), (torch.randint(0, 2048, (4, 256)),)
    elif name == "residual":
        made = shared().Residual(100, 16), (torch.randn(16, 3, 32, 32),)
    elif name == "lstm":
        made = shared().Unrolled(128), (torch.randn(60, 16, 128),)
    elif name == "gpt2":
        sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
        tokens = torch.randint(0, 1024, (4, 128))
        made = hugging("GPT2LMHeadModel", "GPT2Config", **sizes, use_cache=False), (tokens, tokens)
    else:
        sizes = {"num_hidden_layers": 6, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
        options = {"image_size": 96, "patch_size": 8, "hidden_dropout_prob": 0.1, "num_labels": 10}
        images = torch.randn(8, 3, 96, 96), torch.randint(0, 10, (8,))
        made = hugging("ViTForImageClassification", "ViTConfig", **sizes, **options), images
    return made[0].train(), made[1]


# ---- ways to run a step


def each_block(blocks: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def nested(blocks: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Halves of halves, each a checkpoint."""
    parts = list(blocks)
    if len(parts) == 1:
        result: torch.Tensor = parts[0](x)
        return result
    for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
        x = checkpoint(nested, half, x, use_reentrant=False)
    return x


class Planner(compilation.Planner):
    """The planner, with the processor time that it takes."""

    spent_s = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        begin = time.process_time()
        super().__init__(*args, **options)
        Planner.spent_s = time.process_time() - begin

    def plan(self, budget_bytes: int) -> Any:
        begin = time.process_time()
        try:
            return super().plan(budget_bytes)
        finally:
            Planner.spent_s += time.process_time() - begin


def by_fraction(model: nn.Module, fraction: float) -> Callable[..., torch.Tensor]:
    """torch.compile with `activation_memory_budget`, lowered as backend remat does it."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    def lowered(made: Any, _inputs: Any) -> Any:
        run = straight(made)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    made = aot_autograd(fw_compiler=lowered, bw_compiler=lowered, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(model, backend=made)

    def call(*inputs: Any) -> torch.Tensor:
        with config.patch(activation_memory_budget=fraction):
            result: torch.Tensor = compiled(*inputs)
        return result

    return call


# ---- measuring


def step(call: Callable[..., torch.Tensor], inputs: Input) -> torch.Tensor:
    """A training step that begins from the same random state."""
    torch.manual_seed(5)
    loss = call(*inputs)
    loss.backward()
    return loss.detach()


def planned_step() -> tuple[Sequence[GraphPlan], int]:
    """The plans of the latest step's graphs, and the peak that they foresee together."""
    whole = last_step()
    if whole is not None and len(whole.plans) > 1:
        return whole.plans, whole.peak_bytes
    plan = compilation.last_plan()
    return ([plan], plan.peak_bytes) if plan is not None else ([], 0)


class Bench:
    """One network: plain eager, and everything that is compared with it."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.until = time.monotonic() + COMPILED_SHARE * seconds
        self.end = time.monotonic() + seconds
        self.model, self.inputs = network(name)
        self.start = copy.deepcopy(self.model.state_dict())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.wanted = self.outcome(self.model)
        self.peak_bytes = self.measured(self.model)
        self.jobs: dict[str, Callable[[], Any]] = {"eager": partial(step, self.model, self.inputs)}
        self.rows: list[list[str]] = []

    def outcome(self, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Gradients, then loss, buffers, random state, of a step from the beginning."""
        self.model.load_state_dict(self.start)
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        loss = step(call, self.inputs)
        gradients = [p.grad.clone() for p in self.model.parameters()]
        return [*gradients, loss, *(b.clone() for b in self.model.buffers()), torch.get_rng_state()]

    def measured(self, call: Callable[..., torch.Tensor]) -> int:
        return remat.measure(partial(step, call, self.inputs)).peak_bytes

    def exactness(self, found: Sequence[torch.Tensor]) -> str:
        if all(torch.equal(a, b) for a, b in zip(found, self.wanted, strict=True)):
            return "yes"
        gradients = range(sum(1 for _ in self.model.parameters()))
        off = max(float((found[k] - self.wanted[k]).norm() / self.wanted[k].norm().clamp_min(1e-30)) for k in gradients)
        return f"gradients {off:.0e} off" if off else "not buffers or stream"

    def cell(self, way: str, budget: str, call: Callable[..., torch.Tensor], *, planned: bool = False) -> None:
        """A row for one way to run the step; its times follow."""
        row = [self.name, way, budget, *[""] * (len(COLUMNS) - 3)]
        self.rows.append(row)
        if time.monotonic() > self.until:
            row[3] = "no time left"
            return
        begin = time.process_time()
        try:
            exact = self.exactness(self.outcome(call))
            compiling_s = time.process_time() - begin
            measured = self.measured(call)
        except Exception as refused:  # a way that fails is a row that says so
            cause = refusal_in(refused) or refused
            row[3] = f"{type(cause).__name__}: {str(cause).splitlines()[0][:90]}"
            return
        row[3], row[5] = f"{measured / self.peak_bytes:.3f}", exact
        plans, peak_bytes = planned_step() if planned else ((), 0)
        if plans:
            ratio_planned = sum(plan.seconds for plan in plans) / sum(plan.plain_s for plan in plans)
            row[4], row[6] = f"{peak_bytes / measured - 1:+.2%}", f"{ratio_planned:.3f}"
            row[9], row[10] = f"{Planner.spent_s:.1f}", f"{compiling_s:.0f}"
        self.jobs[f"{way} {budget}"] = partial(step, call, self.inputs)

    def within(self, budget_bytes: int) -> Callable[..., torch.Tensor]:
        options = {"budget": budget_bytes, "gradients_exist": True}
        return torch.compile(self.model, backend="remat", options=options)

    def smallest_bytes(self) -> int | None:
        """What the backend says it can do with; of a model in several graphs each says so when it is compiled."""
        smallest = None
        for _ in range(_GRAPHS):
            try:
                self.outcome(self.within(smallest or 1))
                torch._dynamo.reset()  # its cell compiles anew, and shows its own plan
                return smallest
            except Exception as refused:
                refusal = refusal_in(refused)
                if refusal is None:
                    return smallest
                smallest = refusal.smallest_budget_bytes
        return smallest

    def run(self, shares: Sequence[float], rounds: int) -> None:
        """All rows."""
        smallest = self.smallest_bytes()
        least = (smallest or 0) / self.peak_bytes
        budgets = [(f"{share:.0%}", int(share * self.peak_bytes)) for share in shares if share >= least]
        for text, budget in budgets:
            self.cell("remat", text, self.within(budget), planned=True)
            print(json.dumps(self.rows), flush=True)  # so much there is, should time be over
        if hasattr(self.model, "blocks"):
            for way in (each_block, nested):
                self.cell(f"checkpoint, {way.__name__.replace('_', ' ')}", "", partial(_gone_through, self.model, way))
        for fraction in FRACTIONS.get(self.name, OTHER_FRACTIONS):
            self.cell("activation_memory_budget", f"{fraction}", by_fraction(self.model, fraction))
        if smallest is not None:  # which takes longest to plan
            self.cell("remat", f"smallest, {least:.1%}", self.within(smallest), planned=True)
        print(json.dumps(self.rows), flush=True)
        begin = time.monotonic()
        self.jobs["eager"]()
        round_s = 1.3 * len(self.jobs) * (time.monotonic() - begin)
        fitting = int((self.end - time.monotonic()) / round_s) - 1  # one to warm up
        spent = interleaved(self.jobs, max(1, min(rounds, fitting)))
        for row in self.rows:
            if (job := f"{row[1]} {row[2]}") in spent:
                row[7:9] = [f"{ratio(spent, job, 'eager', field):.3f}" for field in ("cpu_s", "wall_s")]


def refusal_in(error: BaseException | None) -> remat.InfeasibleBudget | None:
    """The refusal of a budget inside of what a compiler made of it."""
    while error is not None and not isinstance(error, remat.InfeasibleBudget):
        error = error.__cause__ or error.__context__
    return error


def _gone_through(model: nn.Module, way: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = model(*inputs, run=way)
    return result


# ---- processes


def one(name: str, seconds: float, shares: Sequence[float], rounds: int) -> list[list[str]]:
    """The rows of a network, in this process."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one model, compiled for every budget
    compilation.Planner = Planner  # type: ignore[misc]
    bench = Bench(name, seconds)
    try:
        bench.run(shares, rounds)
    except Exception as failed:  # what there is stays
        bench.rows.append([name, f"{type(failed).__name__}: {failed}"[:80], *[""] * (len(COLUMNS) - 2)])
    return bench.rows


def all_rows(names: Sequence[str], arguments: Sequence[str], scale: float) -> Iterator[list[list[str]]]:
    """The rows of each network, from a process each."""
    for name in names:
        command = [sys.executable, __file__, "--one", name, "--scale", str(scale), *arguments]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        print(f"{name} …", flush=True)
        limit_s = 1.5 * scale * SECONDS[name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s, check=True)
            lines = done.stdout
        except subprocess.SubprocessError as failed:
            print(_text(getattr(failed, "stderr", None))[-2000:], file=sys.stderr)
            lines = _text(getattr(failed, "stdout", None))
        rows = [line for line in lines.splitlines() if line.startswith("[[")]
        yield json.loads(rows[-1]) if rows else [[name, "no row in time", *[""] * (len(COLUMNS) - 2)]]


def _text(output: str | bytes | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(SECONDS), choices=list(SECONDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares", nargs="*", type=float, help="budgets, of plain eager's peak")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time each network gets")
    parser.add_argument("--one", help="a network to run in this process, its rows as JSON")
    given = parser.parse_args()
    if given.one:
        shares = given.shares or SHARES.get(given.one, OTHER_SHARES)
        rows = one(given.one, given.scale * SECONDS[given.one], shares, given.rounds)
        print(json.dumps(rows))
        return
    path = RESULTS / "graph.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    found = [row for row in before if row[0] not in given.networks]  # what is not run stays
    arguments = ["--rounds", str(given.rounds), *(["--shares", *map(str, given.shares)] if given.shares else [])]
    for rows in all_rows(given.networks, arguments, given.scale):
        found += rows
        publish("graph", "Models compiled with a byte budget, and what others do", COLUMNS, found, NOTES)
        content = {"where": where(), "columns": COLUMNS, "rows": found}
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
