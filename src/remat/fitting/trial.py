"""A model tried on paper: one forward and backward on fake tensors, which take no memory and no time worth naming.

First the forward is watched to find its loops; then it is run with each loop answered by a stand-in that returns fake
results at no cost, while a ledger keeps the books of everything else. What is left is what lies *outside*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..ambient import Surroundings, recomputing
from ..apart import by_itself
from ..captures import reach
from ..errors import FitError
from ..estimate import Ledger, Rates
from ..mutable import mutable_sources
from ..silence import silence
from ..streams import random_sources
from ..trees import Structure
from . import seams
from .itemised import Itemised
from .loops import Loop, Watch, blocks_of, loops_of
from .outside import FINISH, Phase, gradients_of, phases, stand_in
from .pending import PendingUse
from .running import Gathered, Gathering

_RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10)
_CUTS = 64  # a model that uses more results beside its loops has none to speak of


@dataclass(frozen=True, eq=False)
class Trial:
    """What a trial found.

    Attributes:
        loops: in the order of their calls.
        outside: bytes beside them, from the start of the step to its end.
        plain_peak_bytes: what the plain training step takes at most.
        device: whose memory counts.
    """

    loops: tuple[Loop, ...]
    outside: tuple[Phase, ...]
    plain_peak_bytes: int
    device: torch.device


class Trials:
    """Trials of one call on fake tensors.

    Args:
        model: whose call it is.
        args, kwargs: what it is called with.
        mode: the mode that fake tensors among these belong to; None if they are real.
        rates: how fast the device is.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        mode: FakeTensorMode | None = None,
        rates: Rates = _RATES,
    ) -> None:
        self.model = model
        self.mode = mode if mode is not None else FakeTensorMode(allow_non_fake_inputs=True)
        structure = Structure((args, kwargs))
        leaves = structure.flatten((args, kwargs))
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.device = device_of([*self.inputs, *model.parameters()])
        self.args, self.kwargs = structure.build([self._fake(leaf) for leaf in leaves])
        self.rates = replace(rates, device_type=self.device.type)
        self.wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return self.mode.from_tensor(leaf)

    def loops(self) -> tuple[Loop, ...]:
        """The loops of the model's forward, whose blocks have seams.

        Raises:
            PendingUse: results of blocks are used beside their loops in more places than can be followed.
        """
        names = blocks_of(self.model)
        if not names:
            return ()
        watch = Watch()
        with self._entered(), seams.observed(watch):
            seams.own_call(self.model)(*self.args, **self.kwargs)
        cuts: list[nn.Module] = []
        while True:
            loops = tuple(loops_of(watch, names, cuts))
            if not loops:
                return loops
            try:
                self.gathered(loops, lambda _, gathered: gathered.loop.final)
                return loops
            except PendingUse as use:
                if use.maker in cuts or len(cuts) == _CUTS:
                    raise
                cuts.append(use.maker)

    def gathered(self, loops: Sequence[Loop], answer: Callable[[int, Gathered], Sequence[Tensor]]) -> None:
        """Run the forward, each loop answered by `answer`."""
        with self._entered(), seams.observed(Gathering(loops, answer)):
            seams.own_call(self.model)(*self.args, **self.kwargs)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with recomputing(), silence(), torch.enable_grad(), self.mode:
            yield

    # ---- bytes

    def books(self, loops: Sequence[Loop]) -> Ledger:
        """The books of a training step, with the loops answered by stand-ins that cost nothing."""
        ledger = Ledger(self.rates)
        anchor = torch.zeros((), requires_grad=True)

        def answer(number: int, gathered: Gathered) -> Sequence[Tensor]:
            return stand_in(ledger.mark, number, gathered.loop.final, anchor, gathered)

        self._step(ledger, Gathering(loops, answer), anchor)
        return ledger

    def plain(self) -> Ledger:
        """The books of the plain training step."""
        ledger = Ledger(self.rates)
        self._step(ledger, None, torch.zeros((), requires_grad=True))
        return ledger

    def itemised(self) -> Itemised:
        """The same, with what every byte is for."""
        ledger = Itemised(self.rates)
        self._step(ledger, None, torch.zeros((), requires_grad=True))
        return ledger

    def _step(self, ledger: Ledger, observer: seams.Observer | None, anchor: Tensor) -> None:
        with self._entered(), ledger:
            with seams.observed(observer):
                result = seams.own_call(self.model)(*self.args, **self.kwargs)
            if isinstance(ledger, Itemised):
                ledger.end_forward()
            wanted = [*self.wanted, *(leaf for leaf in self._fakes() if leaf.requires_grad), anchor]
            gradients = gradients_of(result, wanted)
            ledger.mark(FINISH)
            if isinstance(ledger, Itemised):
                ledger.end_step([g for g in gradients if g is not None])
            del gradients

    def _fakes(self) -> list[Tensor]:
        leaves = Structure((self.args, self.kwargs)).flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def tried(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial:
    """Try a call of a model on paper; leaves no trace.

    Raises:
        FitError: the model cannot be run on fake tensors, or not with its blocks gathered; says why.
    """

    def job() -> Trial:
        trials = Trials(model, args, kwargs)
        loops, plain = trials.loops(), trials.plain()
        return Trial(loops, phases((trials.books(loops) if loops else plain).readings), plain.peak_bytes, trials.device)

    with undisturbed(model):
        try:
            return by_itself(job, Surroundings({device.type for device in _devices(model)}))
        except PendingUse as use:
            raise FitError(f"its blocks are no loop: {use}") from None
        except Exception as error:
            raise FitError(f"it cannot be tried on paper: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back what the body has changed: buffers (on fake tensors too, counters are), attributes, random streams.

    Autocast keeps casts of weights until its region ends. The body's are fake, or know no gradient, so none stay.
    """
    reached = reach(model)
    sources = (*random_sources(_devices(model), reached.generators), *mutable_sources(reached))
    before = [source.get() for source in sources]
    try:
        with Surroundings({device.type for device in _devices(model)}).own_cast_cache():
            yield
    finally:
        for source, state in zip(sources, before, strict=True):
            if not source.same(state, source.get()):
                source.set(state)


def _devices(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), torch.device("cpu"))
