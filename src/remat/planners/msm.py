"""Mixed state memorization (Gruslys et al. 2016, section 3.3): slots for carries and for tapes, the paper's recurrence.

C(t, m) is the least of  min_y y + C(t−y, m−1) + C(y, m),  min_y y + C(t−y, m−α) + C(y−1, m)  where m − α ≥ 1, and
t(t+1)/2. It counts the start of a range's right part among m even where a kept tape holds it; `tight` does not.
"""

from __future__ import annotations

from functools import partial

from ..chains import Chain
from ..schedules import Schedule
from ._shared import plan_repeated
from ._tables import strategy


def plan(chain: Chain, budget_bytes: int) -> Schedule:
    """The paper's optimum for the budget's room."""
    return plan_repeated(chain, budget_bytes, "msm", partial(strategy, tight=False))
