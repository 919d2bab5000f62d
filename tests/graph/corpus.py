"""Small networks as joint graphs: what the analyses of a training graph are tried on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from graph.joint import joint
from remat.graph.graphs import Graph
from remat.graph.op_costs import estimated


class Case(NamedTuple):
    """A function of an input and its parameters, all tensors."""

    function: Callable[..., Any]
    args: tuple[torch.Tensor, ...]


class Captured(NamedTuple):
    """Its joint graph."""

    graph: Graph
    nodes: tuple[fx.Node, ...]
    module: fx.GraphModule


def _case(module: nn.Module, x: torch.Tensor, run: Callable[[nn.Module, torch.Tensor], Any] | None = None) -> Case:
    names = [name for name, _ in module.named_parameters()]
    parameters = tuple(p.detach().requires_grad_() for _, p in module.named_parameters())

    def function(x: torch.Tensor, *values: torch.Tensor) -> Any:
        state = dict(zip(names, values, strict=True))
        if run is None:
            return torch.func.functional_call(module, state, (x,))
        return torch.func.functional_call(_Through(module, run), {f"module.{k}": v for k, v in state.items()}, (x,))

    return Case(function, (x, *parameters))


class _Through(nn.Module):
    def __init__(self, module: nn.Module, run: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self, x: torch.Tensor) -> Any:
        return self._run(self.module, x)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = F.dropout(F.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1), 0.1)
        return x + self.out(weights @ v)


class _Convolutions(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels, track_running_stats=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.max_pool2d(F.relu(x + self.norms[1](self.second(h))), 2)


def _unrolled(cell: nn.Module, xs: torch.Tensor) -> torch.Tensor:
    h = c = torch.zeros(xs.shape[1], cell.hidden_size)
    total = torch.zeros(())
    for x in xs:
        h, c = cell(x, (h, c))
        total = total + h.square().mean()
    return total


def _in_steps(cell: nn.Module, xs: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(xs.shape[1], cell.hidden_size)
    for x in xs:
        h = torch.tanh(cell.weight_hh @ h.T + cell.weight_ih @ x.T).T
    return h


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: _case(_stack(*(m for _ in range(4) for m in (nn.Linear(24, 24), nn.ReLU()))), torch.randn(16, 24)),
    "sigmoids": lambda: _case(nn.Linear(32, 32), torch.randn(16, 32), lambda m, x: (m(x).sigmoid() * x).exp().mean()),
    "residual": lambda: _case(_stack(*(_Residual(16) for _ in range(2))), torch.randn(12, 16)),
    "attention": lambda: _case(_Attention(16), torch.randn(2, 8, 16)),
    "convolutions": lambda: _case(_stack(*(_Convolutions(4) for _ in range(2))), torch.randn(2, 4, 8, 8)),
    "lstm": lambda: _case(nn.LSTMCell(8, 16), torch.randn(2, 4, 8), _unrolled),
    "recurrent": lambda: _case(nn.RNNCell(8, 16, bias=False), torch.randn(3, 4, 8), _in_steps),
    "bottleneck": lambda: _case(_stack(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 64), nn.Tanh()), torch.randn(8, 64)),
    "dropout": lambda: _case(
        _stack(nn.Linear(16, 32), nn.SiLU(), nn.Dropout(0.5), nn.Linear(32, 8)), torch.randn(8, 16)
    ),
    "branches": lambda: _case(_Branches(), torch.randn(8, 16)),
    "norms": lambda: _case(_stack(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)), torch.randn(64, 8)),
    "pooled": lambda: _case(
        _stack(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2)),
        torch.randn(4, 2, 8, 8),
    ),
    "deep": lambda: _case(_stack(*(nn.Tanh() for _ in range(6)), nn.Linear(8, 1)), torch.randn(32, 8)),
    "gated": lambda: _case(nn.Linear(8, 16), torch.randn(64, 8), lambda m, x: F.glu(m(x)).exp().mul(x).sum()),
    "skips": lambda: _case(nn.Linear(8, 8), torch.randn(64, 8), lambda m, x: m((h := m(x)).sin() + h.cos()).sum()),
    "step": lambda: _case(nn.RNNCell(4, 8, bias=False), torch.randn(1, 16, 4), _in_steps),
}
# Those whose optimum is found in no time.
TINY: Final = (*("sigmoids", "bottleneck", "dropout", "norms", "pooled", "deep", "gated", "skips", "step"),)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.join = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(torch.cat([F.relu(self.left(x)), F.elu(self.right(x))], -1)).pow(2).mean()


def _stack(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


@cache
def case(name: str) -> Case:
    """The case of this name, always with the same numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return CASES[name]()


@cache
def captured(name: str) -> Captured:
    """Its joint graph, with estimated costs, which are the same everywhere."""
    function, args = case(name)
    with torch.random.fork_rng():
        return Captured(*joint(function, *args, parameters=range(1, len(args)), costs=estimated))
