"""What lies outside of the loops of a training step, in bytes from moment to moment.

The step is gone through with each loop answered by a *stand-in*: results like the loop's, zeros for gradients, and in
its place in the graph the same two moments that a real one has, at which the last block's backward begins and at which
it is over. What is allocated meanwhile is the rest of the model's: read off the meter, or off books kept on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..gauges import OnDevice, Reading
from ..recorded import hooks_set_aside
from ..trees import Structure
from . import seams
from .loops import Loop
from .running import Gathered, Gathering

FORWARD, ARRIVAL, BACKWARD, END = "forward", "arrival", "backward", "end"
FINISH: Final = f"{END} 0 0"
_PERCENT_UNSEEN: Final = 4
Mark = Callable[[str], object]


class Phase(NamedTuple):
    """A piece of the training step outside of its loops.

    Attributes:
        peak_bytes: most bytes outside of the loops during it.
        level_bytes: those at its end.
        loop: the loop that comes next; None at the end of the step.
        moment: what of that loop comes next: its forward; its backward, where gradients arrive for its results; the
            rest of that, when the last block's is over; or the end of the step.
        arriving_bytes: of those at its end, gradients that arrive for that loop's results, and the results themselves.
    """

    peak_bytes: int
    level_bytes: int
    loop: int | None
    moment: str
    arriving_bytes: int


def phases(readings: Iterable[Reading]) -> tuple[Phase, ...]:
    """What readings say whose names the marks of stand-ins gave them."""
    level, found = 0, []
    for reading in readings:
        peak, level = level + reading.peak_bytes, level + reading.net_bytes
        moment, number, arriving = reading.name.split()
        found.append(Phase(peak, level, None if moment == END else int(number), moment, int(arriving)))
    return tuple(found)


def with_unseen(found: Iterable[Phase]) -> tuple[Phase, ...]:
    """Phases read off paper, with room for what kernels take in passing and operators keep otherwise than there."""

    def more(size: int) -> int:
        return size + size * _PERCENT_UNSEEN // 100

    return tuple(p._replace(peak_bytes=more(p.peak_bytes), level_bytes=more(p.level_bytes)) for p in found)


def measured_outside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loops: Sequence[Loop],
    finals: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> tuple[Phase, ...]:
    """What lies outside in a real step.

    Args:
        model, args, kwargs: the call.
        loops: the loops of its forward.
        finals: what leaves each of them, those that need a gradient saying so.
        device: whose memory counts.
    """
    anchor = torch.zeros((), requires_grad=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    leaves = Structure((args, kwargs)).flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    names: list[str] = []

    def job(end_phase: Callable[[], object]) -> None:
        def mark(name: str) -> None:
            names.append(name)
            end_phase()

        def answer(number: int, gathered: Gathered) -> Sequence[Tensor]:
            return stand_in(mark, number, finals[number], anchor, gathered)

        with seams.observed(Gathering(loops, answer)):
            result = seams.own_call(model)(*args, **kwargs)
        _gradients = gradients_of(result, [*parameters, *given, anchor])
        mark(FINISH)

    with hooks_set_aside(parameters):
        readings, _ = OnDevice(device).bytes_of(job)
    return phases(reading._replace(name=name) for reading, name in zip(readings, names, strict=False))


def gradients_of(result: Any, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of what a model has returned, which is held meanwhile, as its caller may hold it."""
    roots = _roots(result)
    if not roots:
        return ()
    return torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)


def _roots(result: Any) -> list[Tensor]:
    """Where a backward begins: a loss if the model returns one, else everything it returns that has a gradient."""
    leaves = [leaf for leaf in Structure(result).flatten(result) if isinstance(leaf, Tensor)]
    found = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
    return [leaf for leaf in found if leaf.dim() == 0] or found


# ---- stand-ins


def stand_in(
    mark: Mark, number: int, finals: Sequence[Tensor], anchor: Tensor, gathered: Gathered
) -> tuple[Tensor, ...]:
    """The results of a loop that costs nothing but them; marks when its forward and its backward would begin."""
    taken = [t for t in (*gathered.carry, *gathered.shared) if t.requires_grad]
    token = _First.apply(mark, number, gathered, anchor, *taken)
    return _Last.apply(mark, number, finals, token)  # type: ignore[no-any-return]


class _First(torch.autograd.Function):
    """Where a loop's forward begins and its backward ends.

    Holds what a loop holds: what enters to the end of its backward, what its blocks share as long as there is a graph.
    """

    @staticmethod
    def forward(ctx: Any, mark: Mark, number: int, gathered: Gathered, _anchor: Tensor, *taken: Tensor) -> Tensor:
        mark(f"{FORWARD} {number} 0")
        ctx.mark, ctx.number = mark, number
        ctx.carry, ctx.shared = gathered.carry, tuple(gathered.shared)
        ctx.save_for_backward(*taken)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> Any:
        ctx.mark(f"{BACKWARD} {ctx.number} 0")
        ctx.carry = ()
        return None, None, None, None, *map(torch.zeros_like, ctx.saved_tensors)


class _Last(torch.autograd.Function):
    """Where a loop's results come from."""

    @staticmethod
    def forward(ctx: Any, mark: Mark, number: int, finals: Sequence[Tensor], _token: Tensor) -> Any:
        ctx.mark, ctx.number = mark, number
        results = tuple(final.detach().clone() for final in finals)
        ctx.results = [(StorageWeakRef(made.untyped_storage()), made.untyped_storage().nbytes()) for made in results]
        fixed = [made for made, final in zip(results, finals, strict=True) if not final.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        storages = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in gradients if g is not None}
        there = sum(size for storage, size in ctx.results if not storage.expired())
        ctx.mark(f"{ARRIVAL} {ctx.number} {sum(storages.values()) + there}")
        return None, None, None, torch.zeros(())
