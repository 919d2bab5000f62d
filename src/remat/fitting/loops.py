"""Loops of blocks inside a model, found by watching one run of its forward.

A *block* is a child of a list of modules (`ModuleList`, `Sequential`), stands beside one, as a stem, or is a recurrent
layer. A *loop* is a sequence of calls of blocks in which each takes what the one before it returned, the very same
tensor, and in which nobody else takes it. Where a block does nothing but call such a sequence, that stands for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from torch import Tensor, nn

from ..trees import Leaves, Structure

_LISTS: Final = (nn.ModuleList, nn.Sequential)
_MUCH: Final = 3  # times as long is a run inside of blocks that do more than that, to be better than one of those


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One call in a loop.

    Attributes:
        block: the module.
        arguments, result: the structures of (args, kwargs) and of what it returns.
        takes: for every leaf of the arguments, which leaf of the entering carry it is; None if it comes from elsewhere.
        gives: for every leaf of the result, what it is like: a tensor's example, a number k of the argument that it is,
            or another value in a tuple of one.
        leaving: which leaves of the result make the carry that enters the next block; of the last block, all tensors.
        sources: for every leaf of the result, which leaf of that leaving carry it is, if it is one.
    """

    block: nn.Module
    arguments: Structure
    result: Structure
    takes: tuple[int | None, ...]
    gives: tuple[Any, ...]
    leaving: tuple[int, ...]
    sources: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """Calls of blocks, one after the other.

    Attributes:
        name: the names of the first block and the last.
        calls: at least two, or one of a recurrent layer.
        final: the carry that left it in the trial.
    """

    name: str
    calls: tuple[BlockCall, ...]
    final: tuple[Tensor, ...]

    @property
    def is_recurrent(self) -> bool:
        """Whether it is a recurrent layer, which takes its budget in chunks of time."""
        return isinstance(self.calls[0].block, nn.RNNBase)


@dataclass
class _Seen:
    """A call as it was watched, with the calls of blocks inside it."""

    block: nn.Module
    arguments: Structure
    given: Leaves
    inside: list[_Seen] = field(default_factory=list)
    result: Structure | None = None
    made: Leaves = field(default_factory=list)


def blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose calls may make a loop, with their names."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _LISTS):
            for number, child in module.named_children():
                found.setdefault(child, f"{name}.{number}" if name else number)
        if isinstance(module, nn.RNNBase) and module is not model:
            found.setdefault(module, name)
    for name, module in _beside_lists(model):
        found.setdefault(module, name)
    return found


def _beside_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules beside the outermost lists, on any level down to them, such as a stem: a loop may begin or end there.

    Left out is what hooks watch, and what has a weight in common with others: were one of its uses in a loop and others
    outside, its gradient would be added up in another order. Embeddings keep nothing that would be worth it.
    """
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    queue = [("", model)] if _has_lists(model) else []
    while queue:
        prefix, owner = queue.pop()
        if isinstance(owner, _LISTS):
            continue
        for name, child in owner.named_children():
            tied = any(uses[id(parameter)] > 1 for parameter in child.parameters())
            if _has_lists(child):
                queue.append((f"{prefix}{name}.", child))
            elif not (tied or _has_hooks(child) or isinstance(child, nn.Embedding | nn.EmbeddingBag)):
                yield f"{prefix}{name}", child


def _has_lists(model: nn.Module) -> bool:
    return any(isinstance(module, _LISTS) for module in model.modules())


class Watch:
    """An observer that looks on."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self._open: list[list[_Seen]] = [self.seen]

    def call(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `seams.Observer`."""
        arguments = Structure((args, kwargs))
        seen = _Seen(module, arguments, arguments.flatten((args, kwargs)))
        self._open[-1].append(seen)
        self._open.append(seen.inside)
        try:
            result = own(*args, **kwargs)
        finally:
            self._open.pop()
        seen.result = Structure(result)
        seen.made = seen.result.flatten(result)
        return result


def loops_of(watch: Watch, names: dict[nn.Module, str], cuts: Iterable[nn.Module] = ()) -> list[Loop]:
    """The loops in what was watched, in order; behind the blocks in `cuts` a loop ends."""
    found: list[Loop] = []
    for calls in _chosen(watch.seen, {id(block) for block in cuts}):
        made = tuple(_call(calls, place) for place in range(len(calls)))
        found.append(Loop(_name(calls, names), made, tuple(calls[-1].made[k] for k in made[-1].leaving)))
    return found


def _chosen(calls: Sequence[_Seen], ends: set[int]) -> list[list[_Seen]]:
    """Runs of calls, as fine as they come: opened if that makes one longer run, left for much longer ones inside."""
    found: list[list[_Seen]] = []
    for run in _runs(calls, ends):
        opened = [inner for call in run for inner in (call.inside if _opens(call) else [call])]
        if len(opened) > len(run) and len(finer := _chosen(opened, ends)) == 1:
            found += finer
            continue
        inside = [inner for call in run for inner in _chosen(call.inside, ends)]
        alone = len(run) == 1 and not isinstance(run[0].block, nn.RNNBase)
        longest = max(map(len, inside), default=0)
        if alone or longest > len(run) * (1 if _is_filled(run, inside) else _MUCH):
            found += inside
        else:
            found.append(run)
    return found


def _opens(call: _Seen) -> bool:
    """Whether calls inside may take the place of a call; those that change what they take stay with what made it."""
    return _is_sequence(call, call.inside) and not any(_hands_on(inner) for inner in call.inside)


def _hands_on(call: _Seen) -> bool:
    """Whether a call returns what it takes: the same, or changed in place."""
    return bool(_ids(call.made) & _ids(call.given))


def _is_filled(run: Sequence[_Seen], inside: Sequence[Sequence[_Seen]]) -> bool:
    """Whether what each call of a run returns is what a run inside of it has made."""
    made = set[int]().union(*(_ids(inner[-1].made) for inner in inside))
    return all(_ids(call.made) & made for call in run)


def _ends(call: _Seen, ends: set[int]) -> bool:
    """Whether a loop has to end behind a call: its own result, or that of the last call inside, is used elsewhere."""
    return id(call.block) in ends or bool(call.inside and _ends(call.inside[-1], ends))


def _is_sequence(call: _Seen, inner: Sequence[_Seen]) -> bool:
    if len(inner) < 2 or _has_hooks(call.block):
        return False
    linked = _all_linked(inner)
    starts = _ids(call.given) & _ids(inner[0].given)
    return linked and bool(starts) and _ids(call.made) <= _ids(inner[-1].made) | _ids(call.given)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _ids(leaves: Iterable[Any]) -> set[int]:
    return {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def _linked(before: _Seen, after: _Seen, handed: set[int]) -> bool:
    """Whether a call takes what the one before it made, or handed on of what it was handed itself."""
    made = _ids(before.made)
    return bool((made - _ids(before.given) | made & handed) & _ids(after.given))


def _all_linked(calls: Sequence[_Seen]) -> bool:
    handed = [set[int](), *(_ids(call.made) for call in calls)]  # the first block's own carry exists
    return all(_linked(a, b, before) for (a, b), before in zip(pairwise(calls), handed, strict=False))


def _runs(calls: Sequence[_Seen], ends: set[int]) -> Iterator[list[_Seen]]:
    """Longest sequences of linked calls."""
    run: list[_Seen] = []
    earlier: set[int] = set()  # what the run has made before its newest call
    for call in calls:
        alone = isinstance(call.block, nn.RNNBase)
        if run and (
            alone
            or isinstance(run[-1].block, nn.RNNBase)
            or _ends(run[-1], ends)
            or not _linked(run[-1], call, _ids(run[-2].made) if len(run) > 1 else set())
            or (earlier - _ids(run[-1].made)) & _ids(call.given)
        ):
            yield run
            run, earlier = [], set()
        if run:
            earlier |= _ids(run[-1].made)
        run.append(call)
    if run:
        yield run


def _name(calls: Sequence[_Seen], names: dict[nn.Module, str]) -> str:
    first, last = names[calls[0].block], names[calls[-1].block]
    return first if len(calls) == 1 else f"{first} … {last}"


def _call(calls: Sequence[_Seen], place: int) -> BlockCall:
    call = calls[place]
    assert call.result is not None
    carry = _carry_in(calls, place)
    number = {id(leaf): k for k, leaf in enumerate(carry)}
    takes = tuple(number.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in call.given)
    given = {id(leaf): k for k, leaf in enumerate(call.given) if isinstance(leaf, Tensor)}
    gives = tuple((leaf,) if not isinstance(leaf, Tensor) else given.get(id(leaf), leaf) for leaf in call.made)
    leaving = _leaving(calls, place)
    left = {id(call.made[k]): number for number, k in enumerate(leaving)}
    sources = tuple(left.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in call.made)
    return BlockCall(call.block, call.arguments, call.result, takes, gives, leaving, sources)


def _carry_in(calls: Sequence[_Seen], place: int) -> list[Tensor]:
    """The tensors that make the carry which enters a call."""
    call = calls[place]
    if place:
        before = calls[place - 1]
        return [before.made[k] for k in _leaving(calls, place - 1)]
    tensors = _distinct(call.given)
    if len(calls) > 1:
        second = calls[1]
        made = _ids(call.made)
        same = {k for k, leaf in enumerate(second.given) if id(leaf) in made and isinstance(leaf, Tensor)}
        if second.arguments == call.arguments:
            carried = [call.given[k] for k in sorted(same) if isinstance(call.given[k], Tensor)]
            if carried:
                return _distinct(carried)
    return tensors[:1]


def _leaving(calls: Sequence[_Seen], place: int) -> tuple[int, ...]:
    """Leaves of a call's result that the next call takes; of the last call all tensors, each once."""
    made = calls[place].made
    wanted = _ids(calls[place + 1].given) if place + 1 < len(calls) else _ids(made)
    found: dict[int, int] = {}
    for k, leaf in enumerate(made):
        if isinstance(leaf, Tensor) and id(leaf) in wanted:
            found.setdefault(id(leaf), k)
    return tuple(found.values())


def _distinct(leaves: Iterable[Any]) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
