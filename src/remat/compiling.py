"""Whether the step of a call can be run as a graph, and that graph, made once and remembered."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import PackedSequence

from .ambient import States, recomputing
from .apart import by_itself
from .calls import Call, Nature
from .captures import HOOKS
from .errors import StepError
from .inputs import Column
from .recorded import can_need, copied, detached
from .traced.fusing import Function, NotFused, compiler_at_hand, fused
from .traced.lowering import lowered
from .traced.programs import Program
from .traced.stages import TracedStages
from .traced.traced import Lowering, Traced
from .traced.tracing import NotTraceable, Problem
from .trees import Leaves


def traced_step(call: Call, nature: Nature) -> Traced | str:
    """The call's step as a graph, or why there is none, as the end of a sentence."""
    reason = _reason(call, nature)
    if reason is not None:
        return reason

    fuse = call.compiled != "python" and compiler_at_hand()
    if call.compiled == "inductor" and not fuse:
        return "there is no C++ compiler for Inductor"
    lowering: Lowering = _Fusing(strict=call.compiled == "inductor") if fuse else lowered

    def work() -> Traced:
        states = States(call.sources, call.streams | nature.needed.changes)
        with recomputing(), states.undisturbed(), call.surroundings.own_cast_cache():
            traced = Traced(_problem(call, nature), lowering)
            _compare(call, nature, traced, states)
            return traced

    try:
        return by_itself(work, call.surroundings)
    except NotTraceable as error:
        return str(error)


class _Fusing:
    """Through Inductor, or operator by operator where it has no answer, unless that is refused.

    Attributes:
        reasons: why programs were not fused.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.reasons: list[str] = []

    def __call__(self, program: Program) -> Function:
        try:
            return fused(program)
        except NotFused as reason:
            if self.strict:
                raise StepError(
                    f"Inductor does not compile the step: {reason}; compile=True runs it operator by operator instead"
                ) from None
            self.reasons.append(str(reason))
            return lowered(program)


def remarks_on(traced: Traced) -> tuple[tuple[str, str], ...]:
    """What is to be said of how a step's graph runs."""
    told = [("step", "runs as a graph, traced once: gradients are the plain loop's up to rounding")]
    reasons = dict.fromkeys(getattr(traced.lowering, "reasons", ()))
    return (*told, *(("step", f"is in part not fused by Inductor: {reason}") for reason in reasons))


def _problem(call: Call, nature: Nature) -> Problem:
    inputs: Leaves = [Column(leaf).plain(0) for leaf in call.inputs.leaves]
    return Problem(
        call.step,
        call.structure,
        call.carry,
        call.inputs.structure,
        inputs,
        nature.needed.carry,
        call.captured,
        call.found(),
        nature.copies,
    )


def _compare(call: Call, nature: Nature, traced: Traced, states: States) -> None:
    """Refuse a graph that does not do what the step does, on the carry and the inputs of the first step."""
    found = call.found()
    loop, other = (call.loop(None, call.carry, call.inputs.leaves) for _ in range(2))
    stages = TracedStages(traced, other, [found[number] for number in traced.externals])
    carry = detached(call.carry)
    with torch.no_grad():
        states.restart()
        ours = stages.run(0, traced.laid_out(carry), loop.inputs(0, recording=False), first=True)
    with torch.enable_grad():
        states.restart()
        for leaf, need in zip(carry, nature.needed.carry, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaf.requires_grad_(need and can_need(leaf))
        theirs = loop.run(0, copied(carry), loop.inputs(0, recording=False), first=True)
    for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        if isinstance(b, torch.Tensor) and not _alike(a, b):
            raise NotTraceable("its graph gives other results than the step itself")


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if not b.is_floating_point() and not b.is_complex():
        return torch.equal(a, b)
    share = 100 * float(torch.finfo(b.dtype).eps)
    limit = share * float(b.abs().nan_to_num().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=share, atol=limit, equal_nan=True)


def _reason(call: Call, nature: Nature) -> str | None:
    """What speaks against a graph before anything is traced."""
    devices = {"torch", *(str(torch.device(kind)) for kind in ("cuda", "mps", "xpu"))}
    changed = [call.sources[number].name for number in sorted(nature.needed.changes)]
    others = [name for name in changed if name not in devices and not name.startswith("cuda:")]
    if others:
        return f"it changes or draws from {others[0]}, which a graph would not do"
    if call.places:
        return "it keeps tensors with gradients beside its carry"
    if call.check:
        return "check= compares runs of the step itself"
    if any(isinstance(leaf, range | PackedSequence) for leaf in call.inputs.leaves):
        return "it is told the number of the step, or takes packed sequences"
    for module in call.modules:
        if any(getattr(module, name) for name in HOOKS):
            return f"a {type(module).__name__} in it has hooks, which would be called once and not at every step"
    if call.surroundings.modes:
        return "a mode is active that sees every operator"
    if call.uses_arrays:
        return "it can reach NumPy arrays, whose values a graph would not see change"
    return None
