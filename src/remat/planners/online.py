"""Unknown length: which carries to store while the input goes on, so that its end may come at any step.

Online checkpointing (Wang, Moin, Iaccarino 2009; Stumm, Walther 2010). With slots for carries p₀ = 0 < p₁ < … an input
that ends after T steps is reversed gap by gap, the last first, and gap i, which has its own slot and all later ones, is
best reversed by HSM. So stopping at T costs, in forward runs,

    T + H(p₁ − p₀, m) + H(p₂ − p₁, m − 1) + … + H(T − p_q, m − q),     H(t, m) = HSM's optimum.

The published algorithms prescribe positions, optimal as long as binom(m+2, 2) ≥ T and less good afterwards. Here,
before each step with all slots in use, the live carry replaces the stored one whose loss makes this sum least, or none.
The sum is exact whatever was chosen before, so the rule may only err about the future, and it hardly does:
`benchmarks/planning.py` lists its cost over that of HSM, which knows T. The last step is known to be the last only when
it has been run, without a tape; that one run more is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import inf

from ..chains import Chain, Stage
from ..errors import InfeasibleBudget, UnsupportedChain
from ..schedules import Action, Advance, Backward, Drop, Load, Record, Store
from . import hsm
from .room import Room, slots_budget_bytes

_cost = lru_cache(maxsize=1 << 16)(hsm.cost)


class OnlinePlanner:
    """Plans the forward step by step, then the backward. What both return, put together, is a legal schedule.

    Example:
        >>> planner = OnlinePlanner(Stage(1, (Tape(2),)), slots=3)
        >>> actions = [action for k in range(5) for action in planner.before_step(k)]
        >>> actions += planner.reverse(5)

    Args:
        stage: the stage that is repeated.
        slots: how many carries may be stored, carry 0 included, at least 1.
        caller_keeps_carry: whether carry 0 stays alive anyway; its slot is then left empty.
    """

    def __init__(self, stage: Stage, slots: int, *, caller_keeps_carry: bool = False) -> None:
        if slots < 1:
            raise ValueError(f"carry 0 takes one slot, so there must be at least 1, not {slots}")
        self.stage = stage
        self.slots = slots
        self.caller_keeps_carry = caller_keeps_carry
        self._stored = [0]
        self._fixed = 0  # cost of all gaps but the last
        self._without_last = 0  # the same with the last stored carry away, but for the gap that then is last
        self._inner: tuple[float, int] = (
            inf,
            0,
        )  # cost of all gaps but the last without the best carry to lose, and it

    @classmethod
    def within(cls, chain: Chain, budget_bytes: int) -> OnlinePlanner:
        """As many slots as the budget has room for, whatever the length.

        Args:
            chain: one repeated stage, with any count: what is alive besides is read from it.
            budget_bytes: most bytes that may be alive.

        Raises:
            InfeasibleBudget: there is no room for one slot; says the smallest budget that has it.
            UnsupportedChain: the stages differ, or their gradients add up with the length.
        """
        room = min((Room.of(chain, e, planner="online") for e in range(len(chain.runs[0][0].menu))), key=_reserve)
        if room.stage.gradient_bytes:
            raise UnsupportedChain(
                f"each stage leaves {room.stage.gradient_bytes} bytes of gradients, so no budget suffices for every "
                "length; plan a chain of known length with 'tight', or let stages share gradients "
                "(Chain.parameter_gradient_bytes)"
            )
        keep = room.keep(budget_bytes)
        if keep < 0:
            parts = {"outputs and gradients": room.fixed_bytes, "one stage at work": room.reserve_bytes}
            raise InfeasibleBudget(budget_bytes, budget_bytes - keep, parts | {"carry 0": room.start_bytes})
        slots = 1 + keep // room.carry if room.carry else budget_bytes + 1
        return cls(room.stage, slots, caller_keeps_carry=chain.caller_keeps_carry)

    def before_step(self, k: int) -> list[Action]:
        """What to do with carry k, which is live, and the step itself. Steps come in order from 0."""
        if k == 0:
            return [Advance(0, 1)] if self.caller_keeps_carry else [Store(0), Advance(0, 1)]
        if len(self._stored) < self.slots:
            self._store(k)
            return [Store(k), Advance(k, k + 1)]
        lost = self._to_lose(k)
        if lost is None:
            return [Advance(k, k + 1)]
        self._stored.remove(lost)
        self._store(k)
        return [Drop(lost), Store(k), Advance(k, k + 1)]

    def reverse(self, steps: int) -> Iterator[Action]:
        """The backward, when the input has ended after so many steps."""
        if steps < 1 or self._stored[-1] >= steps:
            raise ValueError(f"{steps} steps have not been run: the last stored carry is {self._stored[-1]}")
        stop = steps
        for index in range(len(self._stored) - 1, -1, -1):
            start = self._stored[index]
            held = start == 0 and self.caller_keeps_carry
            yield Load(start)
            if stop - start == 1 and not held:
                yield Drop(start)
            gap = Chain.repeat(self.stage, stop - start)
            for action in hsm.plan(gap, slots_budget_bytes(gap, self.slots - index)):
                yield _moved(action, start)
            if stop - start > 1 and not held:
                yield Drop(start)
            stop = start

    def forward_runs(self, steps: int) -> int:
        """Forward runs of the whole schedule if the input ends now, after so many steps."""
        ends = [*self._stored[1:], steps]
        gaps = zip(self._stored, ends, strict=True)
        return steps + sum(_cost(b - a, self.slots - i) for i, (a, b) in enumerate(gaps))

    def _to_lose(self, k: int) -> int | None:
        """The stored carry without which, and with carry k, stopping now costs least; None to do without carry k."""
        if self.slots == 1:
            return None
        last = self._stored[-1]
        options: list[tuple[float, int | None]] = [
            (self._inner[0] + _cost(k - last, 2), self._inner[1]),
            (self._fixed + _cost(k - last, 1), None),
        ]
        if len(self._stored) > 1:
            options.insert(1, (self._without_last + _cost(k - self._stored[-2], 2), last))
        return min(options, key=lambda option: option[0])[1]

    def _store(self, k: int) -> None:
        self._stored.append(k)
        if len(self._stored) < self.slots:
            return
        stored, m = self._stored, self.slots
        gaps = [b - a for a, b in pairwise(stored)]
        costs = [_cost(gap, m - i) for i, gap in enumerate(gaps)]
        self._fixed = sum(costs)
        self._without_last = self._fixed - costs[-1] if costs else 0
        # Losing carry i joins two gaps and leaves one slot more to each gap after them.
        after = 0
        self._inner = (inf, 0)
        before = self._fixed
        for i in range(len(gaps) - 1, 0, -1):
            before -= costs[i]
            joined = before - costs[i - 1] + _cost(gaps[i - 1] + gaps[i], m - i + 1) + after
            self._inner = min(self._inner, (joined, stored[i]))
            after += _cost(gaps[i], m - i + 1)


def _reserve(room: Room) -> int:
    return room.reserve_bytes


def _moved(action: Action, by: int) -> Action:
    """The same action so many stages later."""
    match action:
        case Store(at) | Load(at) | Drop(at):
            return type(action)(at + by)
        case Record(start, stop, entry):
            return Record(start + by, stop + by, entry)
        case Advance(start, stop) | Backward(start, stop):
            return type(action)(start + by, stop + by)
