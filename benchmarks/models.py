"""Ten models that others wrote, within shares of their plain peak: does `remat.fit` hold, how, and at what cost?

Random weights from configurations, small shapes, one training step with a loss. Peaks are those of forward and backward
together, parameter gradients included, which are made anew in every step. Results and gradients are compared with the
plain step's by `torch.equal`. Needs transformers, snntorch and torchdiffeq (the extra `bench`);
where there is torchvision, two of its models are added.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import remat
from harness import RESULTS, interleaved, publish, ratio, table, where

SHARES = (0.5, 0.25, 0.15)
CHECKPOINTED = ("GPT-2", "Llama")  # compared with the library's own recomputation
Case = Callable[[], tuple[nn.Module, dict[str, Any]]]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Register what makes a model and what a call of it takes."""

    def register(make: Case) -> Case:
        CASES[name] = make
        return make

    return register


# ---- Hugging Face


def hugging(model: str, config: str, **options: Any) -> nn.Module:
    """A model with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def words(rows: int, columns: int) -> dict[str, Any]:
    tokens = torch.randint(0, 200, (rows, columns))
    return {"input_ids": tokens, "labels": tokens}


def pictures(rows: int, size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.arange(rows) % 2}


@case("GPT-2")
def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"n_layer": 16, "n_embd": 64, "n_head": 4, "n_positions": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return hugging("GPT2LMHeadModel", "GPT2Config", vocab_size=200, use_cache=False, **sizes, **special), words(8, 64)


@case("Llama")
def llama() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_hidden_layers": 16, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4}
    made = hugging("LlamaForCausalLM", "LlamaConfig", vocab_size=200, num_key_value_heads=2, use_cache=False, **sizes)
    return made, words(8, 64)


@case("BERT")
def bert() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_hidden_layers": 16, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    return hugging("BertForMaskedLM", "BertConfig", vocab_size=200, **sizes), words(8, 64)


@case("T5")
def t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_layers": 10, "d_model": 64, "d_ff": 256, "num_heads": 4, "d_kv": 16}
    made = hugging(
        "T5ForConditionalGeneration", "T5Config", vocab_size=200, use_cache=False, decoder_start_token_id=0, **sizes
    )
    return made, words(8, 48)


@case("ViT")
def vit() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_hidden_layers": 16, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    made = hugging("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=4, **sizes)
    return made, pictures(16, 32)


@case("Mamba")
def mamba() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_hidden_layers": 16, "hidden_size": 32, "state_size": 8}
    return hugging("MambaForCausalLM", "MambaConfig", vocab_size=200, use_cache=False, **sizes), words(4, 32)


@case("ResNet")
def resnet() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [6, 6, 6, 6]}
    made = hugging("ResNetForImageClassification", "ResNetConfig", layer_type="basic", **sizes)
    return made, pictures(16, 96)


@case("ConvNeXt")
def convnext() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_sizes": [16, 32, 48, 64], "depths": [4, 4, 8, 4], "drop_path_rate": 0.1}
    return hugging("ConvNextForImageClassification", "ConvNextConfig", **sizes), pictures(16, 96)


class Classified(nn.Module):
    """A model of torchvision with a loss."""

    def __init__(self, name: str, **options: Any) -> None:
        import torchvision

        super().__init__()
        self.inner = getattr(torchvision.models, name)(weights=None, num_classes=10, **options)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(pixel_values)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


if importlib.util.find_spec("torchvision") is not None:  # it is no part of the extra

    @case("torchvision's ResNet-50")
    def resnet50() -> tuple[nn.Module, dict[str, Any]]:
        return Classified("resnet50"), pictures(16, 128)

    @case("torchvision's ConvNeXt")
    def convnext_tiny() -> tuple[nn.Module, dict[str, Any]]:
        return Classified("convnext_tiny"), pictures(16, 128)


# ---- loops over time


class Spiking(nn.Module):
    """Two layers of leaky integrate-and-fire neurons over 60 steps."""

    def __init__(self) -> None:
        import snntorch

        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)
        self.hidden, self.output = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden, output = self.hidden.reset_mem(), self.output.reset_mem()
        potentials = []
        for now in x:
            spikes, hidden = self.hidden(self.first(now), hidden)
            _, output = self.output(self.second(spikes), output)
            potentials.append(output)
        return {"loss": torch.stack(potentials).square().mean()}


@case("snnTorch")
def spiking() -> tuple[nn.Module, dict[str, Any]]:
    return Spiking(), {"x": torch.rand(60, 16, 32)}


class Flow(nn.Module):
    """A neural ordinary differential equation, by the fourth-order Runge-Kutta method in 20 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, y: Tensor) -> dict[str, Tensor]:
        from torchdiffeq import odeint

        path = odeint(lambda _, y: self.field(y), y, torch.linspace(0, 1, 21), method="rk4")
        return {"loss": path[-1].square().mean()}


@case("torchdiffeq")
def flow() -> tuple[nn.Module, dict[str, Any]]:
    return Flow(), {"y": torch.randn(64, 32)}


# ---- one model, in a process of its own


def made(make: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = make()
    return model.train(), inputs


def step(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """A training step without an optimizer, from the same random numbers each time; outputs are held, as is usual."""
    torch.manual_seed(1)
    model.zero_grad()
    outputs = model(**inputs)
    loss: Tensor = outputs["loss"]
    loss.backward()
    return loss.detach()


def trained(model: nn.Module, inputs: dict[str, Any]) -> tuple[int, list[Tensor]]:
    """Peak bytes, and the loss, gradients, buffers that a step leaves."""
    step(model, inputs)
    model.zero_grad()
    gc.collect()
    taken = remat.measure(lambda: step(model, inputs))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return taken.peak_bytes, [taken.value, *gradients, *(buffer.clone() for buffer in model.buffers())]


class Compared:
    """Ways of training one model, compared with the plain one.

    Args:
        name: the model's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        plain, self.inputs = made(CASES[name])
        self.plain_bytes, self.wanted = trained(plain, self.inputs)
        self.jobs: dict[str, Callable[[], object]] = {"plain": lambda: step(plain, self.inputs)}
        self.rows: dict[str, list[str]] = {}

    def fitted(self, key: str, budget_bytes: int, way: str = "auto") -> int:
        """Add the model within a budget; returns it, or if it is refused, the smallest that works."""
        model, _ = made(CASES[self.name])
        try:
            remat.fit(model, budget=budget_bytes, way=way, **self.inputs)
        except remat.InfeasibleBudget as refused:
            needs = f"refused: needs {refused.smallest_budget_bytes / self.plain_bytes:.0%}"
            self.rows[key] = [self.name, key, f"{budget_bytes:,}", needs, "", "", ""]
            return refused.smallest_budget_bytes
        except remat.FitError as refused:
            why = next(
                (sign for sign in ("otherwise when it is captured", "cannot be captured") if sign in str(refused)), ""
            )
            self.rows[key] = [self.name, key, f"{budget_bytes:,}", f"refused: {why or 'no way'}", "", "", ""]
        else:
            self.added(key, budget_bytes, model, str(model.remat.way))
        return budget_bytes

    def checkpointed(self) -> int:
        """Add the library's own recomputation; returns its peak."""
        model, _ = made(CASES[self.name])
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        return self.added("gradient_checkpointing=True", 0, model, "every block")

    def added(self, key: str, budget_bytes: int, model: nn.Module, way: str) -> int:
        """Measure a model; its peak."""
        peak_bytes, gave = trained(model, self.inputs)
        same = "equal" if all(map(torch.equal, gave, self.wanted)) else "DIFFERENT"
        held = ("yes" if peak_bytes <= budget_bytes else "NO") if budget_bytes else "–"
        budget = f"{budget_bytes:,}" if budget_bytes else "–"
        self.rows[key] = [self.name, key, budget, way, f"{peak_bytes / self.plain_bytes:.1%}", held, same]
        self.jobs[key] = lambda: step(model, self.inputs)
        return peak_bytes

    def timed(self, rounds: int) -> list[list[str]]:
        """The rows, with times."""
        spent = interleaved(self.jobs, rounds)
        times = {key: f"{ratio(spent, key, 'plain'):.2f}" for key in self.jobs}
        return [[*row, times.get(key, "")] for key, row in self.rows.items()]


def one(name: str, rounds: int) -> dict[str, list[list[str]]]:
    """The rows of one model in both tables."""
    shares = Compared(name)
    for share in SHARES:
        budget_bytes = int(share * shares.plain_bytes)
        shares.fitted(f"{share:.0%}", budget_bytes)
        if shares.rows[f"{share:.0%}"][3] in ("blocks", "chain"):
            shares.fitted(f"{share:.0%}, graph asked for", budget_bytes, "graph")
    found = {"shares": shares.timed(rounds), "checkpointing": []}
    if name in CHECKPOINTED:
        against = Compared(name)
        peak_bytes = against.checkpointed()
        smallest_bytes = against.fitted("remat.fit, the same memory", peak_bytes)
        if smallest_bytes > peak_bytes:
            against.fitted("remat.fit, its smallest budget", smallest_bytes)
        found["checkpointing"] = against.timed(rounds)
    return found


# ---- the tables


def asked(name: str, rounds: int, limit_s: float) -> dict[str, list[list[str]]]:
    """The same from a fresh process; what goes wrong there is a row that says so."""
    command = [sys.executable, __file__, "--one", name, "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        why = f"FAILED: not done after {limit_s:.0f} s"
    else:
        if done.returncode == 0:
            found: dict[str, list[list[str]]] = json.loads(done.stdout.splitlines()[-1])
            return found
        why = "FAILED: " + (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"shares": [[name, "", "", why, "", "", "", ""]], "checkpointing": []}


def keep(shares: list[list[str]], against: list[list[str]], rounds: int, *, show: bool) -> None:
    """Write what there is so far."""
    columns = ["model", "budget", "bytes", "way", "measured peak / plain's", "held", "step's results"]
    columns.append("CPU time / plain")
    notes = [
        f"{rounds} rounds, interleaved, each model in a process of its own. What is refused is refused by an error "
        "that names the smallest budget that works, or what stood in the way.",
        "",
        "## Against the library's own recomputation",
        "",
        *table(["model", "how", *columns[2:]], against),
    ]
    publish("models", "Models that others wrote, within shares of their plain peak", columns, shares, notes, show=show)
    everything = {"where": where(), "rounds": rounds, "columns": columns, "shares": shares, "checkpointing": against}
    (RESULTS / "models.json").write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")


def main(names: list[str], rounds: int, limit_s: float) -> None:
    path = RESULTS / "models.json"
    before = json.loads(path.read_text()) if path.exists() else {"shares": [], "checkpointing": []}
    shares, against = ([row for row in before[key] if row[0] not in names] for key in ("shares", "checkpointing"))
    for name in names:  # what is not run keeps its rows
        found = asked(name, rounds, limit_s)
        shares += found["shares"]
        against += found["checkpointing"]
        for row in (*found["shares"], *found["checkpointing"]):
            print(*row, sep=" | ", flush=True)
        keep(shares, against, rounds, show=name == names[-1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=240, help="seconds for one model")
    parser.add_argument("--one", choices=list(CASES), help="one model here, as JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.rounds)))
    else:
        main(given.models, given.rounds, given.limit_s)
