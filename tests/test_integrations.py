"""Other people's trainers and models, random weights from configurations: the library's own run, within a budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import remat

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
ROWS, COLUMNS = 4, 32


class Sentences(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 60, (COLUMNS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 32, "n_head": 2, "n_positions": COLUMNS, "vocab_size": 60}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **options)
    return transformers.GPT2LMHeadModel(config).train()


def batch() -> dict[str, Tensor]:
    rows = [Sentences()[index] for index in range(ROWS)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def step(model: nn.Module, **inputs: Tensor) -> None:
    torch.manual_seed(3)
    model(**inputs).loss.backward()


def plain_bytes(model: nn.Module, **inputs: Tensor) -> int:
    model = copy.deepcopy(model)
    step(model, **inputs)
    model.zero_grad()
    return remat.measure(lambda: step(model, **inputs)).peak_bytes


@pytest.fixture(scope="module")
def budget() -> int:
    """Half of what GPT-2 takes plainly."""
    return plain_bytes(gpt2(use_cache=False), **batch()) // 2


def equal(model: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


# ---- trainers


def test_trainer_of_transformers(budget: int, tmp_path: Path) -> None:
    from remat.integrations.transformers import BudgetCallback

    def trained(callbacks: list[Any]) -> nn.Module:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(gpt2(), arguments, train_dataset=Sentences(), callbacks=callbacks)
        trainer.train()
        return trainer.model

    optimizer = 2 * sum(p.nbytes for p in gpt2().parameters())
    model = trained([BudgetCallback(budget + optimizer)])
    assert model.remat.way == "blocks"
    assert equal(model, trained([]))


def test_trainer_of_lightning(budget: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from remat.integrations.lightning import BudgetCallback

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = gpt2(use_cache=False)

        def training_step(self, inputs: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.network(**inputs).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(callbacks: list[Any]) -> nn.Module:
        torch.manual_seed(1)
        task = Task()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(task, DataLoader(Sentences(), batch_size=ROWS))
        return task.network

    model = trained([BudgetCallback(budget)])
    assert model.remat.way == "blocks"
    assert equal(model, trained([]))


def test_accelerate_in_half_precision(budget: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # it belongs to the process
    from remat.integrations.accelerate import prepare

    def trained(limit: int | None) -> tuple[nn.Module, nn.Module]:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model, loader = gpt2(use_cache=False), DataLoader(Sentences(), batch_size=ROWS)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if limit is None:
            wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        else:
            wrapped, optimizer, loader = prepare(accelerator, model, optimizer, loader, budget=limit)
        torch.manual_seed(1)
        for inputs in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**inputs).loss)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(wrapped), model

    model, inner = trained(budget)
    assert inner.remat.way == "blocks"
    assert equal(model, trained(None)[0])


# ---- what people do around a model


def test_adapters_on_frozen_blocks() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        return peft.get_peft_model(gpt2(use_cache=False), config)

    plain, model = adapted(), adapted()
    limit = int(0.6 * plain_bytes(plain, **batch()))
    remat.fit(model, budget=limit, **batch())
    step(model, **batch())
    model.zero_grad()
    taken = remat.measure(lambda: step(model, **batch()))
    step(plain, **batch())
    assert taken.peak_bytes <= limit
    assert model.remat.way == "blocks"
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_scaled_gradients_in_half_precision(budget: int) -> None:
    def trained(model: nn.Module) -> nn.Module:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch()).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model

    torch.manual_seed(1)
    wanted = trained(gpt2(use_cache=False))
    torch.manual_seed(1)
    model = trained(remat.fit(gpt2(use_cache=False), budget=budget))
    assert model.remat.way == "blocks"
    assert equal(model, wanted)


def test_what_cannot_go_with_a_budget_is_refused(budget: int) -> None:
    model = gpt2(use_cache=False)
    model.gradient_checkpointing_enable()
    with pytest.raises(remat.FitError, match="gradient_checkpointing_disable"):
        remat.fit(model, budget=budget)
