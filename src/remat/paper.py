"""A chain on paper: what every block does and costs, worked out on fake tensors; nothing is allocated, nothing runs.

Blocks are copied with fake tensors in the place of their own, and measured as real ones are, with the books of a
`Ledger` in the place of meter and clock (see `estimate`, which says what these cannot see).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from .ambient import Source, Surroundings
from .blocks.block import Block, Blocks
from .blocks.calls import ChainCall
from .blocks.costs import Clock, Subject, measured
from .blocks.survey import Kind, Known, used_by
from .calls import Call, Nature
from .captures import reach
from .chains import Chain
from .errors import StepError
from .estimate import Ledger, OnPaper, Rates
from .fakes import Fakes
from .inputs import Inputs
from .needs import Flags, Needed, flags_of, united
from .recorded import can_need, copied, detached, needs_gradient
from .selective import storages_of
from .silence import silence
from .trees import Leaves, Structure
from .trials import measure_step

_STREAM_BYTES: Final = 5056  # of PyTorch's on the CPU
_NO_VALUES: Final = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
_AMPLE: Final = 1 << 62  # bytes
_STREAM: Final = Source(  # of random numbers: each draw gives it a new state
    "random numbers",
    lambda: torch.empty(_STREAM_BYTES, dtype=torch.uint8),
    lambda _: None,
    lambda *_: False,
)


def chain_on_paper(
    functions: Sequence[Callable[..., Any]],
    x: Any,
    shared: tuple[Any, ...],
    named: dict[str, Any],
    rates: Rates,
    *,
    front: int = 0,
    seen: Callable[[], object] = lambda: None,
) -> Chain:
    """The chain of blocks, worked out.

    Args:
        functions: the blocks; their tensors may be real, fake or on the device "meta".
        x: what the first one takes; likewise.
        shared, named: what every block takes beside; likewise.
        rates: how fast the device is, and of what type.
        front: so many blocks need no gradient; they are run before, and are no part of the chain.
        seen: called after each block.

    Raises:
        StepError: a block asks for the values of its tensors, or cannot be copied.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), silence():
        fakes = Fakes(mode, rates.device_type)
        fakes.take(functions, (x, shared, named))
        blocks = [fakes.copy(function) for function in functions]
        x, shared, named = (fakes.copy(value) for value in (x, shared, named))
        with torch.no_grad():
            for block in blocks[:front]:
                x = block(x, *shared, **named)
        call = ChainCall(blocks[front:], x, shared, named)
        return call.chain(_Desk(call, rates, seen).all())


def step_on_paper(step: Callable[[Any, Any], Any], carry: Any, xs: Any, length: int | None, rates: Rates) -> Chain:
    """The chain of a step, worked out.

    Args:
        step, carry, xs, length: as `remat.scan` takes them; tensors as `chain_on_paper` does.
        rates: how fast the device is, and of what type.

    Raises:
        StepError: as `chain_on_paper`.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), silence():
        fakes = Fakes(mode, rates.device_type)
        fakes.take([step], (carry, xs))
        step, carry, xs = (fakes.copy(part) for part in (step, carry, xs))
        call = Call(step, carry, Inputs(xs, length))
        try:
            nature = _nature(call, rates)
            gradients = sum(leaf.nbytes for leaf in call.inputs.tensors() if leaf.requires_grad)
            costs = measure_step(call, nature, _AMPLE, gradients, OnPaper(rates), rounds=1)
        except _NO_VALUES as error:
            raise _needs_values("the step", error) from None
        return costs.chain(call.length, gradients)


def _nature(call: Call, rates: Rates) -> Nature:
    """What the step does; what it changes beside its carry become the call's sources."""
    loop = call.loop(None, call.carry, call.inputs.leaves)
    with Ledger(rates) as ledger:
        first = _FirstRun.of(
            lambda carry: loop.run(0, carry, loop.inputs(0, recording=False), first=True)[0],
            copied(call.carry),
            call.surroundings,
        )
    needs, orbit = flags_of(call.carry), list[tuple[Flags, Flags]]()
    while True:  # until nothing more comes to need a gradient
        leaves = [_marked(leaf, need) for leaf, need in zip(copied(detached(call.carry)), needs, strict=True)]
        after, outputs = loop.run(0, list(map(_used, leaves)), loop.inputs(0, recording=True), first=False)
        orbit.append((flags_of(after), flags_of(outputs)))
        wider = united((needs, orbit[-1][0]))
        if wider == needs:
            break
        needs = wider
    changed = ledger.written - storages_of(_tensors(first.given))
    buffers = [tensor for tensor in reach(call.step).tensors if storages_of([tensor]) & changed]
    call.sources = (*[_STREAM] * ledger.draws, *map(_buffer_source, buffers))
    call.streams = frozenset()
    return Nature(
        needed=Needed(needs, united(flags for _, flags in orbit), frozenset(range(len(call.sources)))),
        orbit=tuple(orbit),
        settled=True,
        copies=first.copies,
        grad_mode=first.grad_mode,
        carry_bytes=tuple(leaf.nbytes if isinstance(leaf, torch.Tensor) else 0 for leaf in after),
        output_bytes=tuple(leaf.nbytes if isinstance(leaf, torch.Tensor) else 0 for leaf in outputs),
        moved_bytes=_bytes(after),
    )


def _buffer_source(buffer: torch.Tensor) -> Source:
    return Source("a buffer", lambda: buffer.detach().clone(), lambda _: None, lambda *_: False)


def _needs_values(what: str, error: Exception) -> StepError:
    return StepError(
        f"{what} asks for values of tensors, and on paper there are none ({error}); profile it on its device"
    )


class _Watched(Ledger):  # type: ignore[no-untyped-call, unused-ignore]
    """A ledger that also writes down what is run on what: blocks of which that is equal cost the same.

    Blocks that differ in a number or a name only, as in their place in the model, are then looked at once.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__(rates)
        self._calls: list[Hashable] = []
        self._numbers: dict[int, int] = {}  # of storages, in the order in which they are met
        self._met = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self._calls.append((func, *map(self._described, leaves)))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = set(map(_memory, _tensors(leaves)))
        for key in dict.fromkeys(map(_memory, _tensors(tree_leaves(result)))):
            if key in given:
                continue
            self._numbers[key] = self._met = self._met + 1  # a new storage may stand where another was
        return result

    def _described(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, bool | int | float | None) else str(leaf)
        key = _memory(leaf)
        if key not in self._numbers:
            self._numbers[key] = self._met = self._met + 1
        made = leaf.is_leaf and leaf.grad is not None
        like = leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, made
        return self._numbers[key], type(leaf), *like

    def story(self, tensors: Sequence[torch.Tensor]) -> Hashable:
        """All that was run, and the part that these tensors had in it."""
        parts = ((self._numbers.get(_memory(t), 0), t.shape, t.dtype) for t in tensors)
        return tuple(self._calls), tuple(parts)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _modules(function: Any) -> list[torch.nn.Module]:
    return list(function.modules()) if isinstance(function, torch.nn.Module) else []


@dataclass(slots=True)
class _Carry:
    """What enters a block: leaves, of which those need a gradient that say so."""

    structure: Structure
    leaves: Leaves


class _Desk:
    """A walk along the chain, as `survey` does it, on fake tensors."""

    def __init__(self, call: ChainCall, rates: Rates, seen: Callable[[], object]) -> None:
        self.call, self.rates, self.seen = call, rates, seen
        self._carry = _Carry(call.structure, call.carry)
        self._known: dict[Hashable, tuple[Known, _Carry]] = {}
        self._alike: dict[Hashable, tuple[Known, _Carry]] = {}  # by what they run

    def all(self) -> list[Known]:
        """What is known of every block."""
        found = []
        for block in self.call.blocks:
            summed = tuple(id(tensor) in self.call.summed for tensor in block.captured)
            key = (block.key, summed, Kind.of(self._carry.structure, self._carry.leaves))
            if key not in self._known:
                try:
                    self._known[key] = self._look(block, self._carry, key[1:])
                except _NO_VALUES as error:
                    raise _needs_values(f"block {block.name}", error) from None
            known, self._carry = self._known[key]
            found.append(known)
            self.seen()
        return found

    def _look(self, block: Block, entering: _Carry, seen_as: Hashable) -> tuple[Known, _Carry]:
        carry = entering.leaves
        stages = self._stages(block, entering)
        with _Watched(self.rates) as ledger:
            run = _FirstRun.of(lambda leaves: stages.run(0, leaves, [], first=True)[0], carry, self.call.surroundings)
        alike = seen_as, ledger.story(block.captured), tuple(map(type, _modules(block.function)))
        if alike in self._alike:
            return self._alike[alike]
        given, copies, grad_mode = storages_of(_tensors(run.given)), run.copies, run.grad_mode
        aliases = bool(given & storages_of(_tensors(run.after)))
        after, _ = stages.run(0, [_used(leaf) for leaf in carry] if run.copies else carry, [], first=False)
        needs = tuple(map(needs_gradient, after))
        structure = stages.structures[1]
        assert structure is not None
        leaving = _Carry(
            structure, [_marked(leaf, need) for leaf, need in zip(detached(run.after), needs, strict=True)]
        )
        del after, run
        sizes = _bytes(carry), _bytes(leaving.leaves)
        stage, gradients = measured(
            self._subject(block, entering, leaving, sizes, copies=copies, grad_mode=grad_mode, draws=ledger.draws),
            self.call.surroundings,
            Clock(OnPaper(self.rates), rounds=0),
        )
        changed = ledger.written - given
        state_bytes = sum(tensor.nbytes for tensor in block.tensors if storages_of([tensor]) & changed)
        kind = Kind.of(structure, leaving.leaves)
        draws = frozenset({0}) if ledger.draws else frozenset[int]()
        known = Known(kind, *sizes, copies, aliases, grad_mode, (), state_bytes, draws, stage, tuple(gradients))
        return self._alike.setdefault(alike, (known, leaving))

    def _stages(self, block: Block, entering: _Carry) -> Blocks:
        return Blocks([block.function], entering.structure, [()], self.call.arguments, self.call.keywords)

    def _subject(
        self,
        block: Block,
        entering: _Carry,
        leaving: _Carry,
        sizes: tuple[int, int],
        *,
        copies: bool,
        grad_mode: bool,
        draws: bool,
    ) -> Subject:
        needs = [needs_gradient(leaf) for leaf in leaving.leaves]
        captured = used_by(block, self.call.shared, self.call.summed)
        return Subject(
            sort=block.sort,
            stages=self._stages(block, entering),
            carry=entering.leaves,
            carry_bytes=sizes[0],
            leaving_bytes=sizes[1],
            needs=needs,
            leaving=[leaf if need else None for leaf, need in zip(leaving.leaves, needs, strict=True)],
            devices=[leaf.device if need else None for leaf, need in zip(leaving.leaves, needs, strict=True)],
            captured=captured,
            summed=sum(id(tensor) in self.call.summed for tensor in captured),
            copies=copies,
            grad_mode=grad_mode,
            sources=(),
            streams=(_STREAM,) if draws else (),
        )


class _FirstRun(NamedTuple):
    """A stage as it was first run.

    Attributes:
        given, after: what it was given, and what it returned.
        copies: whether it changed its carry in place.
        grad_mode: whether it cannot do without autograd.
    """

    given: Leaves
    after: Leaves
    copies: bool
    grad_mode: bool

    @classmethod
    def of(cls, run: Callable[[Leaves], Leaves], carry: Leaves, surroundings: Surroundings) -> _FirstRun:
        """Without autograd, if it can do without."""
        given = detached(carry)
        versions = [leaf._version for leaf in _tensors(given)]
        after = surroundings.without_autograd(lambda: run(list(given)))
        if grad_mode := after is None:
            given = list(map(_used, carry))
            versions = [leaf._version for leaf in _tensors(given)]
            after = run(list(given))
        copies = versions != [leaf._version for leaf in _tensors(given)]
        return cls(given, after, copies, grad_mode)


def _tensors(leaves: Leaves) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _used(leaf: Any) -> Any:
    """A leaf that may be changed in place."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _marked(leaf: Any, need: bool) -> Any:
    return leaf.requires_grad_() if need and can_need(leaf) else leaf


def _bytes(leaves: Leaves) -> int:
    """Bytes of leaves, memory that several share once."""
    memory = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(leaves)}
    return sum(memory.values())
