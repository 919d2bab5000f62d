"""Plans for loops whose ends take more than the steps between: within the budget there too, and not for less."""

from __future__ import annotations

import pytest

import remat
from remat.chains import Chain, Stage, Tape
from remat.ends import Ends, planned
from remat.planners.room import smallest
from remat.plans import plan
from remat.simulator import simulate

WHOLE = Tape(4600, forward_s=1.0, backward_s=2.0, workspace_bytes=12912, backward_workspace_bytes=19272, name="whole")
LEAN = Tape(3600, forward_s=1.0, backward_s=2.5, workspace_bytes=14512, backward_workspace_bytes=17872, name="lean")
BARE = Tape(1200, forward_s=1.0, backward_s=3.0, workspace_bytes=13912, backward_workspace_bytes=20872, name="bare")


def chain_of(*menu: Tape, length: int = 61) -> Chain:
    stage = Stage(1200, menu, forward_s=1.0, workspace_bytes=13312)
    return Chain(((stage, length),), final_carry_bytes=1200, caller_keeps_carry=True, output_bytes=3856)


@pytest.mark.parametrize("menu", [(WHOLE,), (LEAN, BARE), (WHOLE, LEAN, BARE)])
@pytest.mark.parametrize("held", [(2400,) * 3, (30_000, 9000, 0), (0, 0, 12_000)])
def test_plans_hold_at_the_ends_and_leave_no_more_than_these_take(
    menu: tuple[Tape, ...], held: tuple[int, ...]
) -> None:
    chain, width = chain_of(*menu), len(menu)
    ends = Ends(1200, (0, 0, 600)[:width], 1200, 5056, held[:width], handed_bytes=1200)
    least = smallest(ends.on(chain)).peak_bytes
    with pytest.raises(remat.InfeasibleBudget):
        planned(chain, ends, least - 1, "auto", plan)
    for limit in (least, least + 5000, least + 20_000, least + 100_000, 2**30):
        made = planned(chain, ends, limit, "auto", plan)
        assert simulate(ends.on(chain, made.schedule), made.schedule).peak_bytes <= made.peak_bytes <= limit
        try:
            careful = plan(chain, max(limit - ends.most_bytes, 1))
        except remat.InfeasibleBudget:
            continue
        assert made.seconds <= careful.seconds


def test_keeping_everything_slowly_is_not_the_default_where_running_again_is_faster() -> None:
    """Of loops too long to be planned with tapes of different kinds."""
    slow = Tape(1200, forward_s=1.0, backward_s=9.0, workspace_bytes=13912, backward_workspace_bytes=20872, name="slow")
    chain = chain_of(WHOLE, slow, length=300)
    budget = 700_000
    assert plan(chain, budget, "keep-all").seconds > plan(chain, budget, "tight").seconds
    assert plan(chain, budget).seconds == plan(chain, budget, "tight").seconds
