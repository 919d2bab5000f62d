"""Ten models that others wrote, within shares of their plain peak: does `remat.fit` hold, how, and at what cost?

Random weights from configurations, small shapes, one training step with a loss. Peaks are those of forward and backward
together, parameter gradients included, which are made anew in every step. Results and gradients are compared with the
plain step's by `torch.equal`. Needs transformers, snntorch and torchdiffeq (the extra `bench`).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import remat
from harness import interleaved, publish, ratio

SHARES = (0.5, 0.25, 0.15)
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


# ---- loops over time


class Spiking(nn.Module):
    """Two layers of leaky integrate-and-fire neurons over 100 steps."""

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
    return Spiking(), {"x": torch.rand(100, 16, 32)}


class Flow(nn.Module):
    """A neural ordinary differential equation, by the fourth-order Runge-Kutta method in 40 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, y: Tensor) -> dict[str, Tensor]:
        from torchdiffeq import odeint

        path = odeint(lambda _, y: self.field(y), y, torch.linspace(0, 1, 41), method="rk4")
        return {"loss": path[-1].square().mean()}


@case("torchdiffeq")
def flow() -> tuple[nn.Module, dict[str, Any]]:
    return Flow(), {"y": torch.randn(64, 32)}


# ---- the table


def made(make: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = make()
    return model.train(), inputs


def step(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """A training step without an optimizer, from the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    loss: Tensor = model(**inputs)["loss"]
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


def rows(name: str, rounds: int) -> list[list[str]]:
    """The lines of one model."""
    plain, inputs = made(CASES[name])
    plain_bytes, wanted = trained(plain, inputs)
    jobs: dict[str, Callable[[], object]] = {"plain": lambda: step(plain, inputs)}
    found: dict[str, list[str]] = {}
    for share in SHARES:
        budget_bytes, key = int(share * plain_bytes), f"{share:.0%}"
        model, _ = made(CASES[name])
        row = found[key] = [name, key, f"{budget_bytes:,}"]
        try:
            remat.fit(model, budget=budget_bytes, **inputs)
        except remat.InfeasibleBudget as refused:
            row += [f"refused: needs {refused.smallest_budget_bytes / plain_bytes:.0%}", "", "", "", ""]
            continue
        except remat.FitError:
            row += ["refused: no way", "", "", "", ""]
            continue
        peak_bytes, gave = trained(model, inputs)
        same = all(map(torch.equal, gave, wanted))
        held = "yes" if peak_bytes <= budget_bytes else "NO"
        row += [model.remat.way, f"{peak_bytes / plain_bytes:.1%}", held, "equal" if same else "DIFFERENT"]
        jobs[key] = lambda model=model: step(model, inputs)
    spent = interleaved(jobs, rounds)
    for key in found.keys() & jobs.keys():
        found[key].append(f"{ratio(spent, key, 'plain'):.2f}")
    return list(found.values())


def main(names: list[str], rounds: int) -> None:
    table: list[list[str]] = []
    for name in names:
        table += rows(name, rounds)
        for row in table[-len(SHARES) :]:
            print(*row, sep=" | ", flush=True)
    columns = [
        "model",
        "budget",
        "bytes",
        "way",
        "measured peak / plain's",
        "held",
        "step's results",
        "CPU time / plain",
    ]
    notes = [
        f"{rounds} rounds, interleaved, {torch.get_num_threads()} threads. What is refused is refused by an error that "
        "names the smallest budget that works, or what stood in the way.",
    ]
    publish("models", "Models that others wrote, within shares of their plain peak", columns, table, notes)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    main(given.models, given.rounds)
