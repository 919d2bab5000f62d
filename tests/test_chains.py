"""Chains: what they refuse, how they index, and their JSON."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given

from remat.chains import INTERNAL_STATE, Chain, Stage, Tape, takes_no_more
from strategies import chains

FIRST = Stage(4, (Tape(1, entering_bytes=2),))
SECOND = Stage(6, (Tape(3), Tape(0)))
CHAIN = Chain(((FIRST, 2), (SECOND, 1), (FIRST, 3)), final_carry_bytes=9)


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan])
def test_costs_are_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match=r"Tape.forward_s must be a finite number ≥ 0, not (-1|inf|nan)"):
        Tape(1, forward_s=bad)
    with pytest.raises(ValueError, match=r"Stage.workspace_bytes must be"):
        Stage(1, (Tape(1),), workspace_bytes=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Chain.output_bytes must be"):
        Chain(((FIRST, 1),), output_bytes=bad)  # type: ignore[arg-type]


def test_a_stage_needs_a_way_to_be_recorded() -> None:
    with pytest.raises(ValueError, match="at least one way to be recorded"):
        Stage(1, ())


def test_a_tape_keeps_no_more_of_a_carry_than_there_is() -> None:
    with pytest.raises(ValueError, match="keeps 5 bytes of an entering carry of 4"):
        Stage(4, (Tape(0, entering_bytes=5),))


@pytest.mark.parametrize("runs", [(), ((FIRST, 0),), ((FIRST, 2), (SECOND, -1))])
def test_every_run_has_a_stage(runs: tuple[tuple[Stage, int], ...]) -> None:
    with pytest.raises(ValueError, match="at least one stage in every run"):
        Chain(runs)


def test_stages_and_carries_are_found_by_index() -> None:
    assert CHAIN.length == 6
    assert [CHAIN.stage(k) for k in range(6)] == [FIRST, FIRST, SECOND, FIRST, FIRST, FIRST]
    assert [CHAIN.carry_bytes(k) for k in range(7)] == [4, 4, 6, 4, 4, 4, 9]
    for bad in (-1, 6):
        with pytest.raises(IndexError, match=f"stage {bad} of a chain of 6"):
            CHAIN.stage(bad)


@given(chains(most_runs=4, most_stages=4))
def test_pieces_are_the_stages(chain: Chain) -> None:
    for start in range(chain.length):
        for stop in range(start + 1, chain.length + 1):
            pieces = list(chain.pieces(start, stop))
            spread = [stage for stage, first, last in pieces for _ in range(first, last)]
            assert spread == [chain.stage(k) for k in range(start, stop)]
            assert len(pieces) <= len(chain.runs)


@given(chains(most_runs=3))
def test_json_and_back(chain: Chain) -> None:
    assert Chain.from_json(chain.to_json()) == chain


def test_json_says_where_it_is_wrong() -> None:
    text = CHAIN.to_json().decode().replace('"tape_bytes":3', '"tape_bytes":"much"')
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$.runs"):
        Chain.from_json(text)
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        Chain.from_json(CHAIN.to_json().decode().replace('"output_bytes"', '"colour"'))


def test_the_papers_units() -> None:
    chain = Chain.in_paper_units(7, alpha=3)
    tape = chain.stage(0).menu[0]
    assert (chain.length, chain.carry_bytes(3), chain.caller_keeps_carry) == (7, 1, False)
    assert (tape.tape_bytes + tape.leaving_bytes, tape.forward_s, tape.backward_s) == (3, 1, 2)
    assert tape.name == INTERNAL_STATE
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Chain.in_paper_units(7, alpha=0)


def test_the_final_carry_is_like_the_others_unless_given() -> None:
    assert Chain.repeat(FIRST, 3).final_carry_bytes == 4
    assert Chain.repeat(FIRST, 3, final_carry_bytes=0).final_carry_bytes == 0


def test_a_plan_holds_while_nothing_takes_more_bytes() -> None:
    """Seconds, and entries that come and go with them, do not matter; bytes of what is planned do."""
    whole, lean = Tape(100, forward_s=1.0), Tape(40, forward_s=1.0, backward_s=2.0)
    planned = Chain.repeat(Stage(8, (whole, lean)), 5)

    def again(*menu: Tape, carry_bytes: int = 8, **fixed: int) -> bool:
        return takes_no_more(Chain.repeat(Stage(carry_bytes, menu, forward_s=3.0), 5, **fixed), planned)

    assert again(whole, lean)
    assert again(whole)
    assert again(msgspec.structs.replace(whole, tape_bytes=99, forward_s=9.0))
    assert not again(msgspec.structs.replace(whole, tape_bytes=101), lean)
    assert not again(whole, msgspec.structs.replace(lean, backward_workspace_bytes=1))
    assert not again(whole, carry_bytes=9)
    assert not again(whole, output_bytes=1)
    assert not takes_no_more(Chain.repeat(Stage(8, (whole,)), 4), planned)
