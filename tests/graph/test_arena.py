"""Offsets in one arena: valid always, against exhaustive search and the lower bound, with Chen's rule beside them."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph import arena, pictures, reuse
from remat.graph.arena import Lifetime, Placement

BLOCKS = st.builds(
    lambda first, length, size: Lifetime(first, first + length, size),
    st.integers(0, 12),
    st.integers(0, 8),
    st.sampled_from([0, 1, 1, 2, 3, 7, 64]),
)
RULES = (arena.place, reuse.reference_counting, reuse.colouring)


def first_fit_of_every_order(lifetimes: list[Lifetime]) -> int:
    """The smallest arena, found naively: some order of lowest possible offsets is optimal."""

    def total(order: tuple[int, ...]) -> int:
        placed: list[tuple[Lifetime, int]] = []
        for k in order:
            one = lifetimes[k]
            near = [(place, place + other.bytes) for other, place in placed if other.meets(one)]
            offset = next(
                start
                for start in sorted([0, *(high for _, high in near)])
                if all(start + one.bytes <= low or high <= start for low, high in near)
            )
            placed.append((one, offset))
        return max((place + one.bytes for one, place in placed), default=0)

    return min(total(order) for order in permutations(range(len(lifetimes))))


def training_step(layers: int, seed: int) -> list[Lifetime]:
    """Blocks as a training step has them: results kept for backward, gradients, some of which stay."""
    draw = random.Random(seed)
    end = 2 * layers + 1
    blocks = []
    for k in range(layers):
        kept = draw.random() < 0.6
        size = draw.choice([64, 128, 256, 777, 1000]) * draw.choice([1, 1, 2, 4])
        blocks.append(Lifetime(k, end - k if kept else k + draw.choice([1, 2, 5]), size, "result"))
        blocks.append(Lifetime(end - k, end - k + draw.choice([1, 1, 2]), draw.choice([64, 300, 1024]), "gradient"))
        if draw.random() < 0.3:
            blocks.append(Lifetime(end - k, end + 1, draw.choice([100, 900, 4000]), "parameter's gradient"))
    return blocks


@settings(max_examples=60)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@given(lifetimes=st.lists(BLOCKS, max_size=24))
def test_blocks_that_live_together_lie_apart(rule, lifetimes: list[Lifetime]) -> None:
    placement = rule(lifetimes)
    arena.check(lifetimes, placement)
    assert placement.total_bytes >= arena.lower_bound_bytes(lifetimes)
    assert placement.total_bytes <= sum(one.bytes for one in lifetimes)


@settings(max_examples=40)
@given(lifetimes=st.lists(BLOCKS, max_size=24))
def test_the_lower_bound_is_the_most_that_is_alive(lifetimes: list[Lifetime]) -> None:
    alive = [sum(one.bytes for one in lifetimes if one.first <= time <= one.last) for time in range(21)]
    assert arena.lower_bound_bytes(lifetimes) == max(alive)


@settings(max_examples=40)
@given(lifetimes=st.lists(BLOCKS, min_size=1, max_size=6))
def test_few_blocks_take_the_least_there_is(lifetimes: list[Lifetime]) -> None:
    least = first_fit_of_every_order(lifetimes)
    assert arena.exhaustive(lifetimes).total_bytes == least
    assert arena.place(lifetimes).total_bytes == least


@pytest.mark.parametrize("layers", [12, 100, 400])
def test_a_training_step_comes_within_two_percent_of_what_is_alive(layers: int) -> None:
    lifetimes = training_step(layers, seed=layers)
    placement = arena.place(lifetimes)
    arena.check(lifetimes, placement)
    assert placement.total_bytes <= 1.02 * arena.lower_bound_bytes(lifetimes)
    counted = reuse.reference_counting(lifetimes)
    assert placement.total_bytes <= counted.total_bytes < sum(one.bytes for one in lifetimes)


def test_a_chain_of_equal_results_needs_two_buffers() -> None:
    chain = [Lifetime(k, k + 1, 100) for k in range(50)]
    assert [rule(chain).total_bytes for rule in RULES] == [200, 200, 200]


def test_a_buffer_grows_for_the_largest_result_in_it() -> None:
    lifetimes = [Lifetime(0, 0, 10), Lifetime(1, 1, 70), Lifetime(2, 2, 50)]
    assert reuse.reference_counting(lifetimes).total_bytes == 70
    assert reuse.reference_counting(lifetimes, ranges=(1,)).total_bytes == 130
    assert reuse.reference_counting(lifetimes, ranges=(2,)).total_bytes == 80


@pytest.mark.parametrize(
    ("offsets", "total", "words"),
    [((0, 5), 20, "overlaps"), ((0, 10), 19, "leaves"), ((-1, 10), 20, "leaves"), ((5, 0), 20, "overlaps")],
)
def test_the_check_finds_what_is_wrong(offsets: tuple[int, ...], total: int, words: str) -> None:
    lifetimes = [Lifetime(0, 3, 10), Lifetime(3, 4, 10)]
    with pytest.raises(ValueError, match=words):
        arena.check(lifetimes, Placement(offsets, total))


def test_a_lifetime_ends_after_it_begins() -> None:
    with pytest.raises(ValueError, match="first ≤ last"):
        Lifetime(3, 2, 1)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    lifetimes = training_step(12, seed=1)
    arenas = {rule.__name__: (lifetimes, rule(lifetimes)) for rule in RULES}
    pictures.draw_arenas(tmp_path / "arena.png", arenas)
    pictures.draw_arenas(tmp_path / "none.svg", {"nothing": ([], arena.place([]))})
    assert (tmp_path / "arena.png").stat().st_size > 10_000
