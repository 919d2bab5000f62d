"""`remat.recurrent`: PyTorch's LSTM, GRU and RNN inside a memory budget, the fused kernel on chunks of time.

The layer stays what it is; only its call of the kernel is answered here. The whole call is one node of the outer
autograd graph, which runs one sweep after the other: all layers at once where they only go forward in time, else every
layer and direction by itself, since each needs the whole output of the layer below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .ambient import is_transformed, opaque, recomputing
from .chunking import Choice
from .errors import StepError
from .interpreter import Interpreter
from .layered import Call, Part
from .recorded import needs_gradient
from .sweeps import Cut, Pieces, Sweep

Layer = TypeVar("Layer", bound=nn.RNNBase)
_KERNELS: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def recurrent(layer: Layer, *, budget: int | str | None = None, chunk: int | None = None) -> Layer:
    """The same recurrent layer, trained inside a memory budget.

    Takes an `nn.LSTM`, `nn.GRU` or `nn.RNN` with any options, and returns one that shares its parameters, has the same
    state-dict keys, and is called in the same way, with padded, packed or unbatched input. Its forward runs PyTorch's
    fused kernel on chunks of time, keeps what the budget has room for, and runs the rest again in backward.

    What is the same and what is not: if the budget has room for the plain call, the plain call is made, bit for bit.
    Otherwise results and gradients are those of the plain layer to rounding, not to the bit, because the plain kernel
    adds up some weight gradients over the whole sequence in one matrix product, and a product over all of time may
    round otherwise than one over a chunk. They are as close to the exact values as the plain layer's are. They do not
    depend on what is recomputed, only on the length of the chunks, which is a function of shapes and budget.

    Dropout between layers draws the masks that the plain layer draws, and leaves the random stream where it would.
    (On CUDA, cuDNN has a stream of its own, which cannot be followed: masks are drawn from PyTorch's.) With dropout in
    training, and in bidirectional layers, the outputs of all layers are kept, so there is a larger smallest budget.

    Without autograd, and under the transforms of `torch.func`, the layer is the plain one. Second derivatives through
    it are refused.

    Args:
        layer: left as it is.
        budget: how many bytes more than at its start a call may have allocated at any moment of its forward and
            backward together, outputs and gradients included: an int, or text such as "512MiB"; None takes 90 % of
            what is free on the device. Kept as the attribute `budget`, which may be changed.
        chunk: how many steps a chunk has at most; None lets the plan choose. Kept as the attribute `chunk`.

    Raises:
        TypeError: it is no layer of these kinds.
        ValueError: `chunk` is less than 1.

    The layer's forward raises `InfeasibleBudget` if the budget is too small, and says the smallest that works.
    """
    if not isinstance(layer, nn.LSTM | nn.GRU | nn.RNN):
        raise TypeError(
            f"recurrent takes an nn.LSTM, nn.GRU or nn.RNN, not a {type(layer).__name__}; "
            "for a cell or a step of your own there is remat.scan"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk has at least one step, not {chunk}")
    base: Any = type(layer)._remat_base if isinstance(layer, _Budgeted) else type(layer)
    state = {name: _copied(value) for name, value in vars(layer).items()}
    made: Any = object.__new__(_budgeted(base))
    vars(made).update(state, budget=budget, chunk=chunk)
    return made  # type: ignore[no-any-return]


def _copied(value: Any) -> Any:
    """A container of its own for the new layer, with the same parameters in it."""
    return value.copy() if isinstance(value, dict | list | set) else value


class _Budgeted:
    """What `recurrent` adds to a layer's class."""

    _remat_base: Any
    budget: int | str | None
    chunk: int | None

    @opaque
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]  # of the layer's own class
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with KernelCalls(self.budget, self.chunk):
            return forward(*args, **kwargs)

    def extra_repr(self) -> str:
        told: str = super().extra_repr()  # type: ignore[misc]
        return told + f", budget={self.budget!r}" + ("" if self.chunk is None else f", chunk={self.chunk}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if type(self) is not _budgeted(self._remat_base) or not isinstance(made, tuple):
            return made
        return (_empty, (self._remat_base,), *made[2:])


@cache
def _budgeted(base: type) -> type:
    """The layer's class with `_Budgeted` before it, under the same name."""
    return type(base.__name__, (_Budgeted, base), {"_remat_base": base, "__module__": base.__module__})


def _empty(base: type) -> Any:
    """For pickle and deepcopy: a layer still without state."""
    return object.__new__(_budgeted(base))


class KernelCalls(TorchFunctionMode):
    """Answers the layer's call of the fused kernel, after PyTorch's own code has checked and arranged the arguments."""

    def __init__(self, budget: int | str | None, chunk: int | None) -> None:
        super().__init__()
        self._budget, self._chunk = budget, chunk

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _KERNELS or func is not getattr(torch, name):
            return func(*args, **(kwargs or {}))
        call = Call(name, args)
        plain = not any(map(needs_gradient, call.tensors)) or 0 in call.tensors[0].shape
        if plain or is_transformed(call.tensors):
            return func(*args)
        choice = call.choice(self._budget, self._chunk)
        if not choice.chunk:
            return func(*args)
        out, *states = _Recurrent.apply(call, choice, *call.tensors)  # type: ignore[no-untyped-call]
        call.tensors = []  # autograd has them in its keeping now
        return (out.transpose(0, 1) if call.batch_first else out, *states)


class _Recurrent(torch.autograd.Function):
    """The whole call as one autograd node.

    Between forward and backward its context keeps the interpreters of all sweeps with their slots and tapes, and what
    goes from level to level. A second backward over a retained graph finds them used up, and runs the sweeps again.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, choice: Choice, *tensors: torch.Tensor) -> Any:
        x, states, weights = call.split(tensors)
        cut = Cut.of(len(x), call.batch_sizes, choice.chunk)
        inputs, masks, runs = [x.detach()], [], _Runs(call, choice, cut, weights)
        finals: list[list[torch.Tensor]] = []
        for level in range(call.levels):
            out = call.output_like(x)
            finals += runs.forward(level, inputs[-1], states, out)
            inputs.append(out)
            if call.dropout and level < call.levels - 1:
                masks.append(_draw_mask(out, call.dropout))
                _drop_out(out, masks[-1], call.dropout, cut)
        *inputs, out = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *inputs[1:], *masks)
        ctx.call, ctx.choice, ctx.cut, ctx.runs, ctx.count = call, choice, cut, runs, len(tensors)
        return (out, *map(_joined, zip(*finals, strict=True)))

    @staticmethod
    def backward(ctx: Any, arriving: torch.Tensor | None, *arriving_states: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise StepError(
                "gradients of a layer from remat.recurrent cannot be differentiated again (create_graph=True); call "
                "the plain layer where second derivatives are needed"
            )
        call, runs, ctx.runs = ctx.call, ctx.runs, None
        tensors, between = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        x, states, weights = call.split(tensors)
        inputs, masks = [x.detach(), *between[: call.levels - 1]], between[call.levels - 1 :]
        found = _Found([None] * len(weights), [[None] * len(call.parts) for _ in states])
        if runs is None:
            with call.surroundings.entered(), recomputing():
                runs = _Runs(call, ctx.choice, ctx.cut, weights)
                for level, entering in enumerate(inputs):
                    runs.forward(level, entering, states, None)
        for level in reversed(range(call.levels)):
            below = torch.zeros_like(inputs[level]) if call.needs[level] else None
            runs.backward(level, arriving, arriving_states, below, found)
            if below is not None and level and call.dropout:
                _drop_out(below, masks[level - 1], call.dropout, ctx.cut)
            arriving = below
        return None, None, arriving if call.needs[0] else None, *found.of_states(states), *found.weights


class _Found(NamedTuple):
    """Gradients: of weights, and of each kind of state by sweep."""

    weights: list[torch.Tensor | None]
    states: list[list[torch.Tensor | None]]

    def of_states(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the initial states."""
        gradients: list[torch.Tensor | None] = []
        for state, parts in zip(states, self.states, strict=True):
            known = next((part for part in parts if part is not None), None)
            if not state.requires_grad or known is None:
                gradients.append(None)
                continue
            each = [torch.zeros_like(known) if part is None else part for part in parts]
            gradients.append(_joined(each).to(state.dtype))
        return gradients


class _Runs:
    """The interpreters of all sweeps of one pass, from forward to backward."""

    def __init__(self, call: Call, choice: Choice, cut: Cut, weights: Sequence[torch.Tensor]) -> None:
        self._call, self._cut, self._weights = call, cut, weights
        self._plans = iter(choice.plans)
        self._begun: dict[tuple[int, bool], tuple[Sweep, Interpreter]] = {}

    def _parts(self, level: int) -> list[Part]:
        return [part for part in self._call.parts if part.level == level]

    def forward(
        self, level: int, x: torch.Tensor, states: Sequence[torch.Tensor], out: torch.Tensor | None
    ) -> list[list[torch.Tensor]]:
        """Run a level up to its backward; returns the final states of every sweep."""
        finals = []
        for part in self._parts(level):
            sweep = self._call.sweep(part, x, self._weights, self._cut)
            if out is not None:
                sweep.write_to(out[..., self._call.column(part)])
            carry = self._call.initial(part, states)
            if self._call.at_work(part):
                run = self._call.interpreter(sweep, carry, iter(next(self._plans).schedule))
                self._begun[part.level, part.reverse] = sweep, run
                carry = run.forward()
            else:
                for index in range(len(sweep.cut.pieces)):
                    carry, results = sweep.run(index, carry, sweep.inputs(index, recording=False), first=True)
                    sweep.emit(index, results)
            sweep.output = None
            finals.append([leaf.detach() for leaf in carry])
        return finals

    def backward(
        self,
        level: int,
        arriving: torch.Tensor | None,
        arriving_states: Sequence[torch.Tensor | None],
        below: torch.Tensor | None,
        found: _Found,
    ) -> None:
        """Run a level's backward: adds to the gradient of its input, and leaves those of states and weights."""
        call = self._call
        for part in reversed(self._parts(level)):
            if (part.level, part.reverse) not in self._begun:
                continue
            sweep, run = self._begun.pop((part.level, part.reverse))
            if below is not None:
                sweep.add_to(below)
            stacked = None if arriving is None else Pieces(arriving[..., call.column(part)], sweep.cut.pieces)
            adjoint = [None if states is None else states[part.states] for states in arriving_states]
            carry, captured = run.backward(adjoint, [stacked])
            for place, gradient in enumerate(carry):
                found.states[place][part.states.start if part.layers == 1 else 0] = gradient
            gradients = iter(captured)
            for place in range(*part.weights.indices(len(found.weights))):
                if self._weights[place].requires_grad:
                    found.weights[place] = next(gradients)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _draw_mask(out: torch.Tensor, dropout: float) -> torch.Tensor:
    """What the plain layer draws, in a byte for each element; it draws nothing when all is dropped."""
    if dropout == 1:
        return torch.zeros_like(out, dtype=torch.bool)
    return torch.empty_like(out, dtype=torch.bool).bernoulli_(1 - dropout)


def _drop_out(values: torch.Tensor, mask: torch.Tensor, dropout: float, cut: Cut) -> None:
    """Multiply by the mask in place, chunk by chunk, with the bits that the plain layer gets."""
    for piece in cut.pieces:
        scale = mask[piece].to(values.dtype)
        values[piece].mul_(scale if dropout == 1 else scale.div_(1 - dropout))
