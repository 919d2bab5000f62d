"""One call of a recurrent kernel, taken apart: its sweeps, what they cost, and the plan for them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from .ambient import States, Surroundings
from .budgets import budget_bytes
from .chunking import Choice, Work
from .gauges import OnDevice
from .interpreter import Interpreter
from .planners.room import smallest
from .profiler import STEPS, Costs, Sizes, Trial, profile
from .ranges import AutogradRanges
from .recent import Recent
from .recorded import needs_gradient
from .schedules import Action
from .stages import needs_of
from .sums import Captured
from .sweeps import Cut, Kernel, Pieces, Sweep

Value = TypeVar("Value")


class Part(NamedTuple):
    """One sweep: of how many layers, from which level, in which direction; its place among all states and weights."""

    level: int
    reverse: bool
    layers: int
    states: slice
    weights: slice


class Call:
    """One call of the kernel.

    Levels are what needs the whole output of the level below: every layer, or all layers together.

    Attributes:
        tensors: all that takes part in autograd: the input (time or packed rows first), initial states, weights.
        batch_first: whether the caller has the batch first.
        batch_sizes: of packed input.
        dropout: probability between layers; 0 when not training.
        parts: the sweeps in order.
        levels: how many levels there are.
        dtypes: of output and states.
        needs: whether the input of each level needs a gradient; at the end, whether the output does.
    """

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        packed = isinstance(args[3], list | tuple)  # batch sizes come second, so weights fourth
        x, self.batch_sizes, states, weights, self._bias, self._layers, dropout, self._train, bidirectional = (
            args[:9] if packed else (args[0], None, *args[1:8])
        )
        self._name, self.batch_first = name, not packed and bool(args[8])
        x = x.transpose(0, 1) if self.batch_first else x
        states = list(states) if name == "lstm" else [states]
        self.tensors: list[torch.Tensor] = [x, *states, *weights]
        self._state_count, self._directions = len(states), 1 + bool(bidirectional)
        self.dropout = float(dropout) if self._train and self._layers > 1 else 0.0
        self.size = states[0].shape[-1]
        self.parts = self._parts(len(weights) // (self._layers * self._directions))
        self.levels = self.parts[-1].level + 1
        self.surroundings = Surroundings({x.device.type})
        self.dtypes = self._settled_dtypes()
        self.needs = self._needs()
        self._oneDNN = x.device.type == "cpu" and name == "lstm"

    def _parts(self, each: int) -> list[Part]:
        if self._directions == 1 and not self.dropout:
            return [Part(0, False, self._layers, slice(0, self._layers), slice(0, each * self._layers))]
        return [
            Part(level, reverse, 1, slice(number, number + 1), slice(number * each, (number + 1) * each))
            for number in range(self._layers * self._directions)
            for level, reverse in [(number // self._directions, number % self._directions == 1)]
        ]

    def _settled_dtypes(self) -> tuple[torch.dtype, ...]:
        """Under autocast the types that the kernel returns, so that every chunk is given what it gives."""
        x, states, weights = self.split(self.tensors)
        if not self.surroundings.casts:
            return (x.dtype, *(state.dtype for state in states))
        part, sizes = self.parts[0], None if self.batch_sizes is None else self.batch_sizes[:1]
        first = x[:1] if sizes is None else x[: int(sizes[0])]
        with torch.no_grad(), self.surroundings.own_cast_cache():
            out, after = self.kernel(part)(
                first, sizes, [state[part.states] for state in states], weights[part.weights]
            )
        return (out.dtype, *(state.dtype for state in after))

    def _needs(self) -> list[bool]:
        x, states, weights = self.split(self.tensors)
        needs = [x.requires_grad] + [False] * self.levels
        for part in self.parts:
            needs[part.level + 1] |= any(map(needs_gradient, (*states, *weights[part.weights]))) or needs[part.level]
        return needs

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Input, states, weights."""
        x, *rest = tensors
        return x, rest[: self._state_count], rest[self._state_count :]

    def kernel(self, part: Part) -> Kernel:
        """What a sweep runs."""
        return Kernel(self._name, part.layers, self._bias, self._train)

    def at_work(self, part: Part) -> bool:
        """Whether a sweep has a backward; those below the first that does need none."""
        return self.needs[part.level + 1]

    def column(self, part: Part) -> slice:
        """Where a sweep's output stands in its level's."""
        return slice(self.size, 2 * self.size) if part.reverse else slice(0, self.size)

    def output_like(self, x: torch.Tensor) -> torch.Tensor:
        """Room for the output of a level over the rows of x."""
        return x.new_empty((*x.shape[:-1], self._directions * self.size), dtype=self.dtypes[0])

    # ---- sweeps and their interpreters

    def sweep(self, part: Part, x: torch.Tensor, weights: Sequence[torch.Tensor], cut: Cut) -> Sweep:
        """The stages of a sweep over x."""
        return Sweep(
            self.kernel(part), weights[part.weights], cut, x, needs=self.needs[part.level], reverse=part.reverse
        )

    def initial(self, part: Part, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A sweep's first carry."""
        return [
            state.detach()[part.states].to(dtype).requires_grad_(state.requires_grad)
            for state, dtype in zip(states, self.dtypes[1:], strict=True)
        ]

    def interpreter(self, sweep: Sweep, carry: list[torch.Tensor], actions: Iterator[Action]) -> Interpreter:
        """An interpreter over a sweep."""
        length, needs = len(sweep.cut.pieces), needs_of(carry, [True] * len(carry))
        weights = Captured(weight for weight in sweep.weights if weight.requires_grad)
        return Interpreter(
            AutogradRanges(sweep, length, needs=needs, captured=weights),
            actions,
            length,
            carry,
            states=States(()),  # dropout is drawn outside of sweeps
            surroundings=self.surroundings,
            grad_mode=lambda _: self._oneDNN,  # whose LSTM rounds otherwise when it need not remember
        )

    # ---- the plan

    def choice(self, budget: int | str | None, chunk: int | None) -> Choice:
        """Chunk length and plans, made or remembered.

        Raises:
            InfeasibleBudget: the budget is too small.
        """
        x = self.tensors[0]
        limit = budget_bytes(budget, x.device)
        sizes = None if self.batch_sizes is None else tuple(self.batch_sizes.tolist())
        return _choices.recall((self._key(), len(x), sizes, limit, chunk), lambda: self._work(limit).choose(chunk))

    def _key(self) -> Hashable:
        """Equal for calls whose chunks cost the same."""
        x, states, weights = self.split(self.tensors)
        return (
            *(self._name, self._layers, self._bias, self._train, self._directions, self.dropout > 0, self.dtypes),
            *((t.shape, t.dtype, t.device, t.requires_grad) for t in (*states, *weights)),
            *(x.shape[1:], x.stride(), x.dtype, x.requires_grad, self.batch_sizes is None),
            *(self.surroundings.key(), torch.get_num_threads(), torch.backends.mkldnn.enabled),
        )

    def _pieces(self, chunk: int) -> tuple[int, int]:
        pieces = Cut.of(len(self.tensors[0]), self.batch_sizes, chunk).pieces
        return len(pieces), max(p.stop - p.start for p in pieces) if self.batch_sizes is None else chunk

    def _work(self, limit: int) -> Work:
        x, states, _ = self.split(self.tensors)
        parts = list(filter(self.at_work, self.parts))
        elements = x.shape[:-1].numel() * self._directions * self.size
        wide = elements * self.dtypes[0].itemsize
        outputs = wide + (self.levels - 1) * (wide + (elements if self.dropout else 0))  # with masks of one byte
        around = outputs + 4 * sum(state.nbytes for state in states)  # final ones, and gradients of first and last
        fixed = []
        for part in parts:
            above = wide if part.level == self.levels - 1 else 2 * wide
            below = (wide if part.level else x.nbytes) if self.needs[part.level] else 0
            fixed.append(around + above + below)
        steps = len(x) if self.batch_sizes is None else -(-len(x) // int(self.batch_sizes[0]))
        key = self._key()

        def measured(index: int, size: int, room: int) -> Costs:
            part = parts[index]
            if self._directions == 2:
                part = part._replace(reverse=True)  # costs a little more than forward; one measurement for both
            shape = (key, part.level > 0, self.needs[part.level], size)
            return _costs.recall(
                shape, lambda: self._measure(part, size, room), lambda c: not 0 < c.pairs_from_bytes <= room
            )

        return Work(limit, tuple(fixed), 4 * self.levels * wide, steps, self._pieces, measured)

    def _measure(self, part: Part, size: int, room: int) -> Costs:
        """The costs of one full chunk of so many steps."""
        x, states, weights = self.split(self.tensors)
        cut = Cut.same(STEPS, size, self.batch_sizes)
        x = x.detach()[cut.pieces[0]]
        if part.level:
            x = torch.zeros_like(self.output_like(x))
        out = self.output_like(x)
        sweep = self.sweep(part, x, weights, cut)
        sweep.write_to(out[..., self.column(part)])
        sweep.add_to(torch.zeros_like(x))
        carry = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in self.initial(part, states)]

        def start(_steps: int) -> Trial:
            return Trial(self.interpreter(sweep, carry, iter(())), arriving)

        def arriving() -> tuple[list[torch.Tensor | None], Any]:
            return [torch.zeros_like(leaf) for leaf in carry], [Pieces(out[..., self.column(part)], cut.pieces)]

        with torch.enable_grad():
            return profile(start, Sizes(0, 0, 0), OnDevice(x.device), room, _most_bytes, rounds=0)


def _most_bytes(costs: Costs) -> int:
    """Enough for one chunk at work."""
    return smallest(costs.chain(2, 0)).peak_bytes


_KEPT: Final = 1024
_costs: Recent[Hashable, Costs] = Recent(_KEPT)
_choices: Recent[Hashable, Choice] = Recent(_KEPT)
