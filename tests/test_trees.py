"""Pytrees come apart and together again, with their types, and say where they differ."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from plain import leaves_of, types_of
from remat.trees import Mismatch, Structure

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    content: Any
    label: str = "box"


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Would not survive being initialised again."""

    value: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", (self.value,))


class Custom:
    """Known to PyTorch's registry only."""

    def __init__(self, parts: list[Any], name: str) -> None:
        self.parts, self.name = parts, name


_pytree.register_pytree_node(Custom, lambda c: (c.parts, c.name), lambda parts, name: Custom(list(parts), name))

LEAVES = st.one_of(
    st.none(), st.integers(), st.booleans(), st.text(max_size=3), st.builds(torch.tensor, st.integers(0, 9))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner),
        st.lists(st.tuples(st.text("xyz", max_size=2), inner), max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(TREES)
def test_apart_and_together(tree: Any) -> None:
    structure = Structure(tree)
    leaves = structure.flatten(tree)
    built = structure.build(leaves)
    assert types_of(built) == types_of(tree)
    assert all(a is b for (_, a), (_, b) in zip(leaves_of(built), leaves_of(tree), strict=True))
    assert structure.count == len(leaves) == len(structure.paths())
    again = Structure(built)
    assert again == structure
    assert hash(again) == hash(structure)


@given(TREES, TREES)
def test_other_structures_are_not_equal(a: Any, b: Any) -> None:
    equal = types_of(_bare(a)) == types_of(_bare(b))
    assert (Structure(a) == Structure(b)) == equal


def _bare(tree: Any) -> Any:
    structure = Structure(tree)
    return structure.build([0] * structure.count)


def test_paths_are_those_of_python() -> None:
    tree = {"a": [1, (2,)], "b": Box(Pair(3, 4))}
    assert Structure(tree).paths() == [
        "['a'][0]",
        "['a'][1][0]",
        "['b'].content[0]",
        "['b'].content[1]",
        "['b'].label",
    ]


def test_a_dataclass_is_not_initialised_again() -> None:
    structure = Structure(Frozen(1))
    assert structure.build(structure.flatten(Frozen(1))) == Frozen(1)


def test_what_the_registry_of_pytorch_knows() -> None:
    structure = Structure(Custom([1, [2]], "c"))
    built = structure.build([5, 6])
    assert (type(built), built.parts, built.name) == (Custom, [5, [6]], "c")
    with pytest.raises(Mismatch):
        structure.flatten(Custom([1, [2]], "another"))


def test_the_order_of_keys_is_that_of_the_first() -> None:
    structure = Structure({"a": 1, "b": 2})
    assert structure.flatten({"b": 4, "a": 3}) == [3, 4]
    assert list(structure.build([5, 6])) == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ((1, 2), (1, 2, 3), ["top", "tuple of 2", "tuple of 3"]),
        ((1, 2), [1, 2], ["tuple of 2", "list of 2"]),
        ([1, [2]], [1, 2], ["[1]", "list of 1", "int"]),
        ({"a": 1}, {"b": 1}, ["'a'", "'b'", "keys"]),
        (Pair(1, 2), (1, 2), ["Pair", "tuple"]),
        (Box(1), Pair(1, 2), ["Box", "Pair"]),
        (1, (1,), ["top", "tuple"]),
        ({"a": {"b": (1, 2)}}, {"a": {"b": (1,)}}, ["['a']['b']", "tuple of 2", "tuple of 1"]),
    ],
)
def test_a_mismatch_says_where(first: Any, other: Any, words: list[str]) -> None:
    with pytest.raises(Mismatch) as refusal:
        Structure(first).flatten(other)
    assert all(word in str(refusal.value) for word in words)


def test_tensors_by_identity() -> None:
    x = torch.ones(2)
    structure = Structure((x, x))
    leaves = structure.flatten((x, x))
    assert leaves[0] is leaves[1] is x
