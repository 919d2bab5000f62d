"""What is known of a step: what it does, what it costs, and the plans made from that; seen once, remembered."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import torch

from .ambient import States, recomputing, refuse_kept
from .apart import by_itself
from .budgets import agreed_budget_bytes
from .calls import Call, Nature
from .captures import reached_leaves
from .casts import cast_among
from .chains import Chain
from .compiling import remarks_on, traced_step
from .errors import InfeasibleBudget, StepError
from .kept import left_alone
from .loops import Loop, Outputs
from .mutable import note_moving, refuse_changes
from .needs import Flags, Needed, could_need, flags_of, united
from .planners.room import smallest
from .plans import Plan, plan
from .profiler import ROUNDS, STEPS, Costs, Gauge, OnDevice, Trial, profile
from .recorded import can_need, copied, detached, needs_gradient, places_of, sequence_number
from .schedules import Advance
from .traced.traced import Traced
from .trees import Leaves

Value = TypeVar("Value")
_KEPT: Final = 256  # steps and plans are remembered
_SURVEYED: Final = 1000  # steps at most are run to see what they need
_TRANSIENT: Final = 6  # runs of a step at most, until what needs gradients stays as it is


class _Memory(OrderedDict[Hashable, Any]):
    """The latest results, by key."""

    def recall(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key in self:
            self.move_to_end(key)
            found: Value = self[key]
            return found
        made = self[key] = make()
        while len(self) > _KEPT:
            self.popitem(last=False)
        return made


_natures, _surveys, _learnt, _costs, _plans, _traced = (_Memory() for _ in range(6))


def nature_of(call: Call) -> Nature:
    """What the call's step does, seen in a first run or remembered.

    Raises:
        StepError: it does not do what a step must.
        MissedTensors, KeptTensors: it uses tensors that the call does not know of.
    """
    key = call.key()
    nature = _natures.recall(key, lambda: by_itself(_Discovery(call).nature, call.surroundings))
    if key in _learnt:
        nature = nature.wider(_learnt[key])
    if any(map(needs_gradient, call.tensors())) and not (nature.settled and call.keeps_nothing(nature)):
        nature = nature.wider(_survey_of(call))
    return nature.of_length(call.length)


def learn(call: Call, more: Needed) -> None:
    """Remember what steps did in whole loops, and the first few had not shown: it has room in plans from now on."""
    key = call.key()
    _learnt[key] = _learnt[key].union(more) if key in _learnt else more


def _survey_of(call: Call) -> Needed:
    job = partial(_surveyed, call, _natures[call.key()])
    return _surveys.recall((call.key(), call.length), lambda: by_itself(job, call.surroundings))


def plan_of(call: Call, budget: int | str | None, planner: str) -> tuple[Nature, Plan]:
    """The call's plan, made or remembered.

    It depends on shapes and budget only, not on measured seconds, so processes that run the same step at the same
    budget plan the same without a word between them.

    Raises:
        InfeasibleBudget: the budget is too small.
        StepError, MissedTensors: as `nature_of`.
    """
    limit = agreed_budget_bytes(budget, call.device)
    try:
        return _planned(call, nature_of(call), limit, planner)
    except InfeasibleBudget:
        if call.traced is not None:  # the graph is that of every step
            raise
        before = nature_of(call)
        learn(call, _survey_of(call))  # the number that a refusal says must hold for all steps
        if nature_of(call) == before:
            raise
    return _planned(call, nature_of(call), limit, planner)


def _planned(call: Call, nature: Nature, limit: int, planner: str) -> tuple[Nature, Plan]:
    key, remarks = _trace(call, nature)
    chain = _chain(call, nature, limit, key)
    if call.traced is not None:
        remarks = remarks_on(call.traced)
    like = *key, remarks, call.length, chain.input_gradient_bytes, call.inputs.owned_bytes, limit, planner
    return nature, _plans.recall(like, lambda: replace(plan(chain, limit, planner), remarks=remarks))


def chain_of(call: Call, limit: int) -> Chain:
    """The call's steps as a chain, measured within so many bytes or remembered.

    Raises:
        StepError, MissedTensors: as `nature_of`.
    """
    nature = nature_of(call)
    return _chain(call, nature, limit, _trace(call, nature)[0])


def _chain(call: Call, nature: Nature, limit: int, key: Hashable) -> Chain:
    gradients = sum(leaf.nbytes for leaf in call.inputs.tensors() if leaf.requires_grad)
    costs = _costs.recall(key, lambda: _menu_costs(call, nature, limit, gradients))
    chain = costs.chain(call.length, gradients)
    if call.inputs.owned_bytes:
        chain = msgspec.structs.replace(chain, output_bytes=chain.output_bytes + call.inputs.owned_bytes)
    return chain


def _trace(call: Call, nature: Nature) -> tuple[tuple[Hashable, ...], tuple[tuple[str, str], ...]]:
    """Whether the call's step runs as a graph: what to remember its costs by, and what to say of it.

    Raises:
        StepError: it cannot, and has to.
    """
    if not call.compiled:
        return (call.key(), nature), ()
    key = call.exact_key(), nature, call.compiled
    found = _traced.recall(key, lambda: traced_step(call, nature))
    if isinstance(found, Traced):
        call.traced = found
        return key, ()
    if isinstance(call.compiled, str):
        raise StepError(f"the step cannot run as a graph (compile={call.compiled!r}): {found}")
    return (call.key(), nature), (("step", f"runs as it is, not as a graph: {found}"),)


def _menu_costs(call: Call, nature: Nature, limit: int, input_gradient_bytes: int) -> Costs:
    """The costs of one step, with every entry of its menu if it has one."""
    if call.traced is None:
        return measure_step(call, nature, limit, input_gradient_bytes, OnDevice(call.device))
    found = []
    for entry in range(len(call.traced.menu)):
        call.entry = entry
        found.append(measure_step(call, nature, limit, input_gradient_bytes, OnDevice(call.device)))
    call.entry = 0
    names = [menu.entry.name for menu in call.traced.menu]
    tapes = [msgspec.structs.replace(costs.stage.menu[0], name=name) for name, costs in zip(names, found, strict=True)]
    stage = msgspec.structs.replace(found[0].stage, menu=tuple(tapes))
    shared = call.traced.shared_bytes + call.traced.copied_bytes(call.carry)
    return replace(found[0], stage=stage, state_bytes=found[0].state_bytes + shared)


def measure_step(
    call: Call, nature: Nature, limit: int, input_gradient_bytes: int, gauge: Gauge, *, rounds: int = ROUNDS
) -> Costs:
    """The costs of one step, measured in small runs on copies of the carry."""
    nature = replace(nature, settled=True, orbit=(nature.needed[:2],))  # the most there can be
    loop = call.loop(Outputs(STEPS), call.carry, call.inputs.leaves)
    states = States(call.sources, nature.needed.changes)
    carry = _marked(_representative(call, nature, loop), nature.needed.carry)

    def start() -> Trial:
        if loop.outputs is not None:
            loop.outputs.flush()  # what waits from the trial before must not be released in the next
        states.restart()
        return Trial(call.interpreter(loop, nature, iter(()), carry, states, STEPS), arriving)

    def arriving() -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        assert loop.outputs is not None
        outputs = zip(loop.outputs.buffers, nature.needed.outputs, strict=True)
        adjoint = [torch.zeros_like(leaf) if needs_gradient(leaf) else None for leaf in _firsts(carry)]
        return adjoint, [torch.zeros_like(buffer) if need else None for buffer, need in outputs]

    def room_bytes(costs: Costs) -> int:
        return limit - smallest(costs.chain(call.length, input_gradient_bytes)).peak_bytes

    def measured() -> Costs:
        watching = States(call.sources, call.streams | nature.needed.changes)
        with torch.enable_grad(), watching.undisturbed(), left_alone(call.places):
            return profile(start, nature.sizes, gauge, room_bytes, rounds=rounds)

    return by_itself(measured, call.surroundings)


def _representative(call: Call, nature: Nature, loop: Loop) -> Leaves:
    """A carry like those between steps: the first may share tensors, and what is in places may be anything."""
    carry = copied(detached(call.carry))
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in carry)
    if not call.places and tensors == len(call.carry_places):
        return carry
    watching = States(call.sources, call.streams | nature.needed.changes)
    with recomputing(), torch.enable_grad(), watching.undisturbed(), left_alone(call.places):
        carry = copied(_marked(carry, call.needs))
        return copied(detached(loop.run(0, carry, loop.inputs(0, recording=False), first=True)[0]))


def _surveyed(call: Call, nature: Nature) -> Needed:
    """What the steps of a loop need and change, where the first few do not tell: many are run once."""
    nature = replace(nature, settled=False)
    loop, length = call.loop(None, call.carry, call.inputs.leaves), min(call.length, _SURVEYED)
    states = States(call.sources)
    carry = _marked(copied(detached(call.carry)), call.needs)
    with recomputing(), torch.enable_grad(), states.undisturbed(), left_alone(call.places):
        run = call.interpreter(loop, nature, iter(()), carry, states, length)
        for index in range(length):
            run.do(Advance(index, index + 1))
            states.take()  # where a step keeps tensors shows only with autograd on
        changed = [n for n, source in enumerate(call.sources) if not source.same(states.start[n], source.get())]
    assert loop.seen is not None
    return Needed(loop.seen.carries, loop.seen.outputs, frozenset(changed))


class _Discovery:
    """Runs one step a few times, with and without autograd, and looks."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.loop = call.loop(None, call.carry, call.inputs.leaves)
        self.states = States(call.sources)
        self.recorded_once: Leaves = []
        self.casts: frozenset[int] = frozenset()
        self.moved: set[int] = set()  # leaves of the carry that any step replaces

    def nature(self) -> Nature:
        """What the step does.

        Raises:
            StepError: it breaks the contract of `scan`.
            MissedTensors: it uses tensors that the call does not know of.
        """
        with recomputing(), self._no_gathering(), self.states.undisturbed(), left_alone(self.call.places):
            carry = copied(detached(self.call.carry))
            before = {place: carry[place]._version for place in places_of(carry)}
            fixed = [*self.call.fixed, *self.call.captured]
            versions = [tensor._version for tensor in fixed]
            plain = self._without_autograd(carry)
            changed = [place for place, version in before.items() if carry[place]._version != version]
            orbit, after, outputs, unread = self._orbit()
            if self.call.length > 1:
                _refuse_changed_outputs([after[place] for place in changed], outputs)
            moved = [leaf if place in self.moved else None for place, leaf in enumerate(after)]
            moved_bytes = max(_moved_bytes(carry, (plain or after)[: len(carry)]), _moved_bytes([], moved))
            refuse_changes(fixed, versions)
            changes = self._changes()
        same = plain is not None and all(map(_same_bits, plain, self.recorded_once))
        could = tuple(map(could_need, after)), tuple(map(could_need, outputs))
        return Nature(
            needed=Needed(united(flags for flags, _ in orbit), united(flags for _, flags in orbit), changes),
            orbit=tuple(orbit),
            settled=orbit[-1] == could,
            copies=bool(changed),
            grad_mode=not same,
            carry_bytes=tuple(map(_bytes_of, _firsts(after))),
            output_bytes=tuple(map(_bytes_of, outputs)),
            moved_bytes=moved_bytes,
            unread=unread,
            casts=self.casts,
        )

    def _orbit(self) -> tuple[list[tuple[Flags, Flags]], Leaves, Leaves, frozenset[int]]:
        """What needs gradients after each step until nothing changes any more, the last results, and what is unread.

        Once everything needs a gradient that can, nothing changes any more.
        """
        needs, orbit = self.call.needs, []
        after, outputs, unread = self._record(0, self.call.carry, needs)
        self.recorded_once = [*detached(after), *detached(outputs)]  # what running without autograd is compared with
        for index in range(1, _TRANSIENT + 1):
            orbit.append((flags_of(after), flags_of(outputs)))
            if orbit[-1][0] == needs:
                break
            needs = orbit[-1][0]
            after, outputs, _ = self._record(index, after, needs)
        return orbit, after, outputs, unread

    @contextmanager
    def _no_gathering(self) -> Iterator[None]:
        """Refuse a step that calls a module which gathers its parameters itself, before it does."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        wrapped = getattr(fsdp, "FSDPModule", ())
        with ExitStack() as stack:
            for module in self.call.modules:
                if isinstance(module, wrapped):
                    handle = module.register_forward_pre_hook(_refuse_gathering, prepend=True)
                    stack.callback(handle.remove)
            yield

    def _without_autograd(self, carry: Leaves) -> Leaves | None:
        """What the step returns when autograd is off; None if it cannot do without, as when it takes gradients."""
        try:
            with torch.no_grad(), self.call.surroundings.own_cast_cache():
                after, outputs = self.loop.run(0, carry, self.loop.inputs(0, recording=False), first=True)
        except StepError:
            raise
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            return None
        return [*after, *outputs]

    def _record(self, index: int, leaves: Leaves, needs: Flags) -> tuple[Leaves, Leaves, frozenset[int]]:
        """Carry and outputs of a recorded step, and the leaves in places that no gradient would flow into."""
        first_sequence = sequence_number()
        self.states.restart()
        with torch.enable_grad(), self.call.surroundings.own_cast_cache():
            carry = _marked(copied(detached(leaves)), needs)
            inner = [leaf.clone() if needs_gradient(leaf) else leaf for leaf in carry]  # may be changed in place
            inputs = self.loop.inputs(index, recording=True)
            after, outputs = self.loop.run(index, inner, inputs, first=True)
            nodes = [leaf.grad_fn for leaf in (*after, *outputs) if needs_gradient(leaf)]
            self.casts |= cast_among(nodes, self.call.captured)
        self.moved |= {place for place, (old, new) in enumerate(zip(inner, after, strict=True)) if old is not new}
        known = [leaf for leaf in (*carry, *inputs) if needs_gradient(leaf)]
        self.call.check_seen(nodes, known, first_sequence)
        kept = range(len(carry) - len(self.call.places), len(carry))
        reached = reached_leaves(nodes, [carry[place] for place in kept if needs_gradient(carry[place])])
        return after, outputs, frozenset(place for place in kept if id(carry[place]) not in reached)

    def _changes(self) -> frozenset[int]:
        """What the step changed beside its results."""
        changes = [
            (number, source, before, after)
            for number, (source, before) in enumerate(zip(self.call.sources, self.states.start, strict=True))
            if not source.same(before, after := source.get())
        ]
        for _, source, before, after in changes:
            note_moving(source, before, after)
        refuse_kept((source, before, after) for _, source, before, after in changes)
        return frozenset(number for number, *_ in changes)


def _refuse_changed_outputs(changed: Leaves, outputs: Leaves) -> None:
    """Outputs that are, or are views of, leaves of the carry that the next step changes in place."""
    storages = {leaf.untyped_storage()._cdata for leaf in changed if isinstance(leaf, torch.Tensor)}
    if any(isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in storages for leaf in outputs):
        raise StepError(
            "the step returns as an output what it changes in place as its carry, so the next step would change the "
            "output too; return a clone of it"
        )


def _refuse_gathering(module: torch.nn.Module, _: Any) -> None:
    raise StepError(
        f"the step calls a {type(module).__name__} that fully_shard wraps on its own; wrap the module whose forward "
        "calls remat.scan instead, so that parameters are gathered once before the loop and reduced once after it"
    )


def _firsts(leaves: Leaves) -> Leaves:
    """Every tensor at its first place only, None elsewhere."""
    places = set(places_of(leaves))
    return [leaf if place in places else None for place, leaf in enumerate(leaves)]


def _marked(leaves: Leaves, needs: tuple[bool, ...]) -> Leaves:
    for leaf, need in zip(leaves, needs, strict=True):
        if need and isinstance(leaf, torch.Tensor) and can_need(leaf):
            leaf.requires_grad_()
    return leaves


def _bytes_of(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, torch.Tensor) else 0


def _moved_bytes(before: Leaves, after: Leaves) -> int:
    """Bytes of what a carry holds, without what stood at the same place before."""
    stayed = {id(old) for old, new in zip(before, after, strict=False) if old is new}
    moved = [leaf for leaf in after if isinstance(leaf, torch.Tensor) and id(leaf) not in stayed]
    return sum({leaf.untyped_storage()._cdata: leaf.nbytes for leaf in moved}.values())


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two results of the same step are equal; a NaN equals a NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True  # other values are compared by nobody: the step may make them anew each time
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
