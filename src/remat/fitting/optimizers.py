"""What an optimizer will take: found by a step on fake parameters, which takes no memory."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import InfeasibleBudget
from ..estimate import Ledger, Rates

_RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10)


@dataclass(frozen=True, slots=True)
class Needs:
    """What an optimizer takes beside parameters and gradients.

    Attributes:
        state_bytes: state that it has still to make.
        passing_bytes: most bytes that its first step takes, that state included.
    """

    state_bytes: int
    passing_bytes: int

    def check(self, budget_bytes: int, model: nn.Module) -> None:
        """Refuse a budget in which the optimizer could not step, whatever is recomputed.

        Raises:
            InfeasibleBudget: gradients, state and what a step takes in passing are more.
        """
        gradients = gradient_bytes(model)
        least = gradients + self.passing_bytes
        if self.passing_bytes and least > budget_bytes:
            passing = self.passing_bytes - self.state_bytes
            parts = {"gradients": gradients, "optimizer state": self.state_bytes, "its step": passing}
            raise InfeasibleBudget(budget_bytes, least, parts)


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that a training step makes where there are none."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)


def needs_of(optimizer: torch.optim.Optimizer) -> Needs:
    """What an optimizer takes, from a step on fake parameters; leaves it as it is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    have = sum(_bytes(value) for state in optimizer.state.values() for value in _values(state))
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    twin: Any = copy.copy(optimizer)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    with mode:
        fakes = {p: _fake(p, mode) for group in optimizer.param_groups for p in group["params"]}
        twin.param_groups = [{**g, "params": [fakes[p] for p in g["params"]]} for g in optimizer.param_groups]
        twin.state = defaultdict(dict)
        for parameter, state in optimizer.state.items():  # some have it from the start
            twin.state[fakes[parameter]] = tree_map_only(Tensor, lambda value: _fake_state(value, mode), state)
        ledger = Ledger(replace(_RATES, device_type=device.type))
        with ledger:
            type(twin).step(twin)
        state = sum(_bytes(value) for of in twin.state.values() for value in _values(of))
    return Needs(max(state - have, 0), ledger.peak_bytes)


def _fake(parameter: Tensor, mode: Any) -> Tensor:
    fake: Tensor = mode.from_tensor(parameter.detach()).requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        fake.grad = torch.empty_like(fake)
    return fake


def _fake_state(value: Tensor, mode: Any) -> Tensor:
    """Fake, but for numbers: optimizers ask for the value of their count of steps."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if not value.dim():
        with unset_fake_temporarily():
            number = value.item()
        return torch.tensor(number, dtype=value.dtype)
    fake: Tensor = mode.from_tensor(value)
    return fake


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else []


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
