"""`remat.fit`: the same model, whose training step stays inside a memory budget.

The model stays the object that it is. Its call goes through `_compiled_call_impl`, the place that `nn.Module` has for
that; a handle stands there and as `model.remat`. For every kind of call (shapes, modes, what is frozen) the handle
chooses a way once, and explains it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from .ambient import Surroundings, is_transformed, opaque
from .budgets import budget_bytes
from .captures import HOOKS
from .errors import FitError
from .fitting.optimizers import Needs, needs_of
from .fitting.seams import own_call
from .fitting.ways import ASKED, Way, choose
from .recent import Recent
from .recorded import needs_gradient
from .sizes import format_bytes
from .trees import Structure

Model = TypeVar("Model", bound=nn.Module)
_PLACE: Final = "_compiled_call_impl"
_KEPT: Final = 64  # kinds of calls are remembered


def fit(
    model: Model,
    *example_inputs: Any,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    way: str = "auto",
    **example_kwargs: Any,
) -> Model:
    """The same model, whose training step stays inside a memory budget.

    The object that comes back is the one given: same class, parameters, state-dict keys, hooks; it can be copied,
    pickled, switched to evaluation. In training, with autograd on, a call keeps what the budget has room for and
    computes the rest again in backward. Outputs, gradients, buffers and the random stream are those of the plain call,
    bit for bit (recurrent layers: to rounding, see `recurrent`). In evaluation or without autograd the call is plain.

    There are several ways to do that; `model.remat.explain()` says which was chosen, and why:

    * plain: the budget has room for everything;
    * chain: the model is an `nn.Sequential`;
    * blocks: the forward calls lists of blocks one after the other; between blocks it may do as it likes;
    * recurrent: it has an `nn.LSTM`, `nn.GRU` or `nn.RNN`, which is run in chunks of time;
    * graph: none of these, or not within the budget, but PyTorch can capture the model's forward as one graph.

    Where what enters a list of blocks is used elsewhere too, its gradient is added up in another order than in the
    plain call, which shows in the last bits.

    Args:
        model: what is trained. Wrap it by `DistributedDataParallel` afterwards, not before.
        example_inputs, example_kwargs: what a call takes. The way is chosen for them at once, so that a budget that is
            too small is refused here; other shapes are planned when they come. Without examples, all is chosen then.
        budget: how many bytes more than at its start a call may have allocated at any moment of its forward and
            backward together, outputs and gradients included: an int, or text such as "7GiB"; None or "auto" takes
            90 % of what is free on the model's device now.
        optimizer: what will step; the state that it has still to make, and what its step takes in passing, count too.
        way: "auto" takes lists of blocks where the budget has room for them: planned in a second or two. "graph" asks
            for the captured graph, planned operator by operator: several seconds for every kind of call, and less time
            a step where blocks take only milliseconds.

    Raises:
        InfeasibleBudget: the budget is too small; says the smallest that works and what it is made of.
        FitError: there is no way to train this model inside a budget; says what stood in the way of each.
        TypeError: `model` is no `nn.Module`.
        ValueError: there is no such way.
    """
    refuse_unfit(model)
    if way not in ASKED:
        raise ValueError(f"way is {' or '.join(map(repr, ASKED))}, not {way!r}")
    limit = budget_bytes(None if budget == "auto" else budget, device_of(model))
    needs = needs_of(optimizer) if optimizer is not None else Needs(0, 0)
    needs.check(limit, model)
    handle = Fitted(model, limit, needs.state_bytes, way)
    handle.install()
    if example_inputs or example_kwargs:
        try:
            handle.prepare(*example_inputs, **example_kwargs)
        except BaseException:
            handle.remove()
            raise
    return model


class Fitted:
    """What `fit` adds to a model, as its attribute `remat`.

    Attributes:
        budget_bytes: what a training step and the optimizer's state may take together.
        state_bytes: what is reserved of it for state that the optimizer has still to make.
        asked: the way that was asked for.
    """

    def __init__(self, model: nn.Module, budget_bytes: int, state_bytes: int = 0, asked: str = "auto") -> None:
        self.budget_bytes, self.state_bytes, self.asked = budget_bytes, state_bytes, asked
        self._model = weakref.ref(model)  # the model holds the handle
        self._ways: Recent[Hashable, Way] = Recent(_KEPT)
        self._latest: Way | None = None

    # ---- standing in the model

    def install(self) -> None:
        """Take the place of the model's call."""
        model = self.model
        model.__dict__["remat"] = model.__dict__[_PLACE] = self

    def remove(self) -> None:
        """Make the model the plain one that it was."""
        for name in ("remat", _PLACE):
            self.model.__dict__.pop(name, None)

    @property
    def model(self) -> nn.Module:
        """Whose handle it is."""
        model = self._model()
        assert model is not None, "the handle of a model that is gone"
        return model

    def __getstate__(self) -> dict[str, Any]:
        kept = {"budget_bytes": self.budget_bytes, "state_bytes": self.state_bytes, "asked": self.asked}
        return {"model": self.model, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["model"]  # still empty, when it is the model that is being copied or loaded
        self.budget_bytes, self.state_bytes, self.asked = state["budget_bytes"], state["state_bytes"], state["asked"]
        self._model, self._ways, self._latest = weakref.ref(model), Recent(_KEPT), None
        model.__dict__[_PLACE] = self

    def __repr__(self) -> str:
        return f"Fitted(budget={format_bytes(self.budget_bytes)})"

    # ---- calls

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if not torch.is_grad_enabled() or not model.training or self._is_traced(args, kwargs):
            return own_call(model)(*args, **kwargs)
        self._latest = self._way(args, kwargs)
        return self._latest.run(model, args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Choose the way for a training call with these arguments, without making it.

        Raises:
            InfeasibleBudget, FitError: as `fit`.
        """
        model = self.model
        training = [module for module in model.modules() if not module.training]
        model.train() if not model.training else None
        try:
            with torch.enable_grad():
                self._latest = self._way(args, kwargs)
        finally:
            for module in training:
                module.training = False

    def explain(self) -> str:
        """Which way was chosen for the latest kind of call, why, and its plan."""
        if self._latest is None:
            raise FitError("nothing has been chosen yet: call the model in training, or remat.prepare(*inputs)")
        return f"budget        {format_bytes(self.budget_bytes)}{self._reserved()}\n{self._latest.explain()}"

    @property
    def way(self) -> str | None:
        """The name of the way chosen for the latest kind of call."""
        return None if self._latest is None else self._latest.name

    @property
    def peak_bytes(self) -> int | None:
        """Predicted for the latest kind of call: most bytes at any moment of its training step, over those before."""
        return None if self._latest is None else self._latest.peak_bytes

    def _reserved(self) -> str:
        return f", of which {format_bytes(self.state_bytes)} for the optimizer's state" if self.state_bytes else ""

    def _way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way:
        room = self.budget_bytes - self.state_bytes
        return self._ways.recall(self._key(args, kwargs), lambda: choose(self.model, args, kwargs, room, self.asked))

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Equal for calls that are planned alike."""
        structure = Structure((args, kwargs))
        leaves = structure.flatten((args, kwargs))
        modules = list(self.model.modules())
        own = [p for module in modules for p in module._parameters.values() if p is not None]
        made_of = tuple([(id(module), module.training) for module in modules])  # chosen ways keep those alive they run
        # Hooks of the model itself stand around all that is planned.
        inside = tuple([(id(module), *map(tuple, _hooks(module))) for module in modules[1:] if any(_hooks(module))])
        parameters = tuple([(p.requires_grad, p.dtype, p.device) for p in own])
        surroundings = Surroundings({device.type for _, _, device in parameters}).key()
        return structure, tuple(map(_like, leaves)), made_of, inside, parameters, surroundings, self.budget_bytes

    @staticmethod
    def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves = Structure((args, kwargs)).flatten((args, kwargs))
        return is_transformed(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _like(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, needs_gradient(leaf)
    kind: type = type(leaf)
    return leaf if isinstance(leaf, int | float | str | None) else kind


_hooks = attrgetter(*HOOKS)


def device_of(model: nn.Module) -> torch.device:
    """Whose memory counts."""
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), torch.device("cpu"))


def refuse_unfit(model: nn.Module) -> None:
    """Refuse what `fit` cannot take, whatever its forward does.

    Raises:
        FitError, TypeError: as `fit`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fit takes an nn.Module, not a {type(model).__name__}; for functions there is remat.chain")
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise FitError(f"fit the module inside and wrap it afterwards: {type(model).__name__}(remat.fit(module, ...))")
    if "FSDPModule" in names or "FullyShardedDataParallel" in names:
        raise FitError(
            "the model is sharded: its parameters are gathered and let go block by block, which a replay would do "
            "again; remat.chain or remat.scan inside the forward of a module that is wrapped as a whole work"
        )
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise FitError("the model has parameters without a shape, as nn.LazyLinear has; call it once before fitting it")
    if isinstance(model, torch.jit.ScriptModule):
        raise FitError("a scripted model cannot be looked into; fit the module that it was made from")
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise FitError(
            "the model recomputes already (gradient_checkpointing); turn it off, as by "
            "model.gradient_checkpointing_disable(), and let the budget decide"
        )
    if "remat" in model.__dict__ and not isinstance(model.__dict__["remat"], Fitted):
        raise FitError("the model has an attribute `remat` of its own, which is where fit would stand; rename it")
