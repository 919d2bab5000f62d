"""Hypothesis strategies for chains, with the sizes that go wrong: nothing, one byte, much more than the rest."""

from __future__ import annotations

from hypothesis import strategies as st

from remat.chains import Chain, Stage, Tape

SIZES = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 37, 1000]))
WORKSPACES = st.sampled_from([0, 0, 3, 20])
SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0])
FIXED = st.sampled_from([0, 0, 1, 7, 300])


@st.composite
def tapes(draw: st.DrawFn, carry_bytes: int) -> Tape:
    """A tape of a stage whose carries have this size."""
    kept = st.integers(0, carry_bytes)
    return Tape(draw(SIZES), draw(kept), draw(kept), draw(SECONDS), draw(SECONDS), draw(WORKSPACES), draw(WORKSPACES))


@st.composite
def stages(draw: st.DrawFn, most_entries: int = 2) -> Stage:
    """A stage with a menu of up to `most_entries`."""
    carry_bytes = draw(SIZES)
    menu = draw(st.lists(tapes(carry_bytes), min_size=1, max_size=most_entries))
    return Stage(carry_bytes, tuple(menu), draw(SECONDS), draw(WORKSPACES), draw(st.sampled_from([0, 0, 2])))


@st.composite
def chains(draw: st.DrawFn, most_runs: int = 1, most_stages: int = 14, most_entries: int = 2) -> Chain:
    """A chain of up to `most_runs` runs of up to `most_stages` equal stages each."""
    run = st.tuples(stages(most_entries), st.integers(1, most_stages))
    runs = tuple(draw(st.lists(run, min_size=1, max_size=most_runs)))
    return Chain(runs, draw(SIZES), draw(st.booleans()), *(draw(FIXED) for _ in range(4)))
