"""How finely a chain is cut: blocks that are an `nn.Sequential` opened, tiny neighbours run as one, where that pays.

Opened, a chain can keep carries in more places and record in smaller pieces, so plans take less memory or less time.
But every block costs some time beside its own work, which tiny ones do not earn. Each cut is profiled and planned like
any other chain, and the one with the least predicted seconds within the budget is run. Neither changes any result: a
plain `nn.Sequential` is the loop over its modules, and a group is the loop over its blocks.

Left as they are: what has hooks, a `forward` or a type of its own, or takes shared arguments. Not put into groups: what
holds more than tensors and settings, or parameters with hooks, which could see that gradients arrive together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as modules

from ..captures import HOOKS
from ..chains import takes_no_more
from ..errors import InfeasibleBudget, StepError
from ..plans import Plan
from ..ranges import WHOLE
from ..recent import Recent
from ..schedules import Record
from .block import Block
from .calls import ChainCall, several_processes
from .survey import Kind, Known

_BLOCK_S: Final = 0.3e-3  # what a block costs beside what its stage was measured to take: its node, its look-up
_GROUP_S: Final = 10 * _BLOCK_S  # groups grow up to this: then that is a tenth of their work at most
_KEPT: Final = 256


class _Cut(NamedTuple):
    """A way to cut a chain: whether blocks are opened, and the sizes of groups of neighbours after that, if any."""

    opened: bool = False
    groups: tuple[int, ...] = ()


class Settled(NamedTuple):
    """A chain, cut as it will be run: its call, what is known of its blocks, its plan."""

    call: ChainCall
    known: list[Known]
    plan: Plan


_AS_GIVEN: Final = _Cut()
_cuts: Recent[Hashable, _Cut] = Recent(_KEPT)


def settled(
    functions: Sequence[Callable[..., Any]],
    start: Callable[[Sequence[Any]], ChainCall],
    budget: int | str | None,
    planner: str,
) -> Settled:
    """The chain with its plan, cut in the way that takes the least predicted seconds.

    Args:
        functions: the blocks as given.
        start: makes a call of blocks.
        budget, planner: as `chain` takes them.

    Raises:
        InfeasibleBudget: for every way; says the smallest budget that works for one.
    """
    call = start(functions)
    kind = Kind.of(call.structure, call.carry)
    watched = tuple([number for number, block in enumerate(call.blocks) if _watched(block.captured)])
    key = (
        *(block.key for block in call.blocks),
        *(kind, call.surroundings.key(), bool(call.arguments or call.keywords), _global_hooks(), watched),
        *(budget, planner),
    )
    cut = _cuts.get(key)
    if cut is None:
        cut, found = _best(functions, call, start, budget, planner)
        _cuts.put(key, cut)
        return found
    return _planned(call if cut == _AS_GIVEN else start(_blocks(functions, cut)), budget, planner)


def by_plan(call: ChainCall, made: Plan) -> Settled | None:
    """The chain as given with a plan that was made for it; None if it takes more anywhere than it did then."""
    known = call.surveyed()
    return Settled(call, known, made) if takes_no_more(call.chain(known), made.chain) else None


def keeps_all(made: Plan) -> bool:
    """Whether the forward keeps every tape whole: then the plain loop does the same, with nothing in between."""
    actions = list(islice(made.schedule, 3))
    return len(actions) == 2 and isinstance(actions[0], Record) and actions[0].entry == WHOLE


def _planned(call: ChainCall, budget: int | str | None, planner: str) -> Settled:
    known = call.surveyed()
    return Settled(call, known, call.planned(known, budget, planner))


def _best(
    functions: Sequence[Callable[..., Any]],
    call: ChainCall,
    start: Callable[[Sequence[Any]], ChainCall],
    budget: int | str | None,
    planner: str,
) -> tuple[_Cut, Settled]:
    """The best of the ways, tried one after the other: as given, opened, and either with groups."""
    refusals: list[InfeasibleBudget] = []
    ways: list[tuple[float, _Cut, Settled]] = []

    def attempt(cut: _Cut, call: ChainCall) -> list[Known]:
        known = call.surveyed()
        try:
            made = call.planned(known, budget, planner)
        except InfeasibleBudget as refusal:
            refusals.append(refusal.with_traceback(None))  # whose frames would keep the blocks in a circle
        else:
            ways.append((made.seconds + _BLOCK_S * call.length, cut, Settled(call, known, made)))
        return known

    known = attempt(_AS_GIVEN, call)
    # Processes that measure other seconds must cut the same; and where all is kept there is nothing to gain.
    if not several_processes() and not (ways and keeps_all(ways[0][2].plan)):
        with suppress(StepError):  # of a cut that nobody has asked for
            finest, finer = _AS_GIVEN, opened(functions, call)
            if len(finer) > len(functions):
                finest, call = _Cut(opened=True), start(finer)
                known = attempt(finest, call)
            if groups := _groups(call, known):
                cut = finest._replace(groups=groups)
                attempt(cut, start(_blocks(functions, cut)))
    if not ways:
        refusals.sort(key=lambda refusal: refusal.smallest_budget_bytes)
        del refusals[1:]
        raise refusals.pop()
    _, cut, found = min(ways, key=lambda way: way[0])
    return cut, found


def _blocks(functions: Sequence[Callable[..., Any]], cut: _Cut) -> list[Any]:
    """The chain, cut so."""
    blocks: list[Any] = list(_opened(functions)) if cut.opened else list(functions)
    if not cut.groups:
        return blocks
    rest = iter(blocks)
    groups = [list(islice(rest, size)) for size in cut.groups]
    return [group[0] if len(group) == 1 else Block.joined([Block(each) for each in group]) for group in groups]


# ---- opening


def opened(functions: Sequence[Callable[..., Any]], call: ChainCall) -> list[Callable[..., Any]]:
    """The blocks, every plain `nn.Sequential` replaced by its modules; as they are where something could tell."""
    if call.arguments or call.keywords or _global_hooks():
        return list(functions)
    return list(_opened(functions))


def _opened(functions: Sequence[Callable[..., Any]]) -> Iterator[Callable[..., Any]]:
    for function in functions:
        if type(function) is nn.Sequential and len(function) and not _noticed(function):
            yield from _opened(list(function))
        else:
            yield function


def _noticed(module: nn.Module) -> bool:
    """Whether anything but its modules runs when it is called."""
    values = vars(module)
    return any(values[name] for name in HOOKS) or "forward" in values or module._compiled_call_impl is not None


def _global_hooks() -> bool:
    """Whether hooks see the calls of all modules."""
    return any(
        getattr(modules, f"_global_{name}_hooks") for name in ("forward", "forward_pre", "backward", "backward_pre")
    )


# ---- grouping


def _groups(call: ChainCall, known: Sequence[Known]) -> tuple[int, ...]:
    """Sizes of groups of neighbours that take little time; () if there are none of more than one block."""
    sizes: list[int] = []
    filled_s = _GROUP_S
    for block, of in zip(call.blocks, known, strict=True):
        whole = of.stage.menu[0]
        seconds = whole.forward_s + whole.backward_s
        joins = block.plain and not _watched(block.captured)
        if joins and filled_s + seconds <= _GROUP_S:
            sizes[-1] += 1
            filled_s += seconds
        else:
            sizes.append(1)
            filled_s = seconds if joins else _GROUP_S
    return tuple(sizes) if len(sizes) < call.length else ()


def _watched(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether hooks see gradients arrive."""
    return any(tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in tensors)
