"""Recorded ranges: how a graph over some stages is entered, left, and tied into one sum with its neighbours.

Gradients equal those of the plain run bit for bit, because every sum is taken in its order. Autograd adds the
contributions to a tensor in the order in which nodes run, the newest first. Rules that keep this order when the run is
cut into ranges with a backward call each:

1. Consecutive recorded stages are one graph and one backward call, so inside a range the engine keeps the order.
2. A captured tensor (a weight) gets contributions from every range. `Resume`, applied last in a range and therefore
   run first in its backward, hands back the gradient accumulated so far, and the engine goes on adding to it, in place.
3. A tensor that is an output gets that output's gradients before all others, because the plain run stacks outputs
   after its last stage. Where such a tensor is a leaf of a carry, and maybe handed on unchanged from carry to carry,
   the last range that it enters begins its sum with all of them (`Ties`, `summed`), and the ranges before leave them
   out. Where it is a captured tensor, its sum begins with them.
4. Anything else that flows into a carry comes from older nodes than those of the next range; its adjoint is given as a
   root, and roots are added first.
5. One tensor in two places of a carry is one tensor in every alias of it, so its contributions meet in one sum. A leaf
   that is a captured tensor is that tensor in every range.

Recorded graphs start at `Enter`, whose outputs are aliases of the carry: no graph reaches beyond its range, the carry
is kept alive only if an operator saves it, and a step may change it in place. Captured tensors are used as they are;
the engine stops at them, because it is asked for gradients there, and their hooks are set aside meanwhile: no patching
of modules or closures, nothing that another thread could see, and no way of reaching a tensor that is not understood.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.torch_version import TorchVersion

from .boundary_nodes import Resumption
from .trees import Leaves

Root = torch.Tensor | GradientEdge
_NODES_OWN_GRAPHS: Final = TorchVersion(torch.__version__) >= "2.13"  # the Python object of an `autograd.Function`'s
_SMALL: Final = 8  # bytes: a loss; looking its node up would take longer
_ROOTS: Final = 8
_NODES: Final = 512  # of a graph are looked at for captured tensors; the newest stage is among them


class Given(NamedTuple):
    """Outputs of stages start … stop−1 that are one and the same leaf of a carry."""

    output: int
    start: int
    stop: int
    place: int


class Ties(NamedTuple):
    """Which tensors the leaves of a carry are besides.

    Attributes:
        given: outputs of the stages before that are these very leaves.
        captured: (leaf, number) wherever a leaf is a captured tensor.
    """

    given: tuple[Given, ...] = ()
    captured: tuple[tuple[int, int], ...] = ()


UNTIED: Final = Ties()


@dataclass(slots=True)
class Boundary:
    """A carry at rest.

    Attributes:
        leaves: its leaves, without autograd history.
        states: the replay states that belong to it.
        ties: what its leaves are besides.
        versions: version counters of the leaves when it was stored.
    """

    leaves: Leaves
    states: tuple[Any, ...] = ()
    ties: Ties = UNTIED
    versions: tuple[int, ...] = ()


@dataclass(slots=True)
class RecordedRange:
    """A recorded range: where its graph is entered and left.

    With thousands of ranges, Python's garbage collector looks at all that they keep: what is empty is no container of
    its own, and edges lie flat (`flat`).

    Attributes:
        start, stop: the stages are start … stop−1.
        width: how many leaves the entering carry has.
        entering, entered: the leaves of the entering carry of which gradients come out, equal ones once, and where.
        handed: by leaf of the entering carry the outputs whose gradients its sum begins with (rule 3).
        left: where leaves that `handed` knows stand in the leaving carry, if that is the last of all.
        leaving, left_by: the leaves of the leaving carry whose gradients go in, equal ones once, and where.
        returned: (leaf, number) wherever a leaf of the leaving carry is a captured tensor.
        outputs: (output, stage, root) where gradients of outputs go in.
        inputs: (stage, aliases of inputs that need a gradient).
        captured: the captured tensors that it may use, by number.
        resumed: those whose sums `Resume` hands in.
        casts: (number, edge) where gradients flow into autocast's copies of captured tensors.
        resume: what hands their sums in; None: what all ranges share.
        first_sequence, next_sequence: its autograd nodes have sequence numbers from the first to below the next.
    """

    start: int
    stop: int
    width: int
    entering: tuple[int, ...]
    entered: tuple[Any, ...]
    handed: Mapping[int, Sequence[Given]] | None = None
    left: Mapping[int, int] | None = None
    leaving: tuple[int, ...] = ()
    left_by: tuple[Any, ...] = ()
    returned: tuple[tuple[int, int], ...] = ()
    outputs: Sequence[tuple[int, int, Root]] = ()
    inputs: Sequence[tuple[int, list[torch.Tensor]]] = ()
    captured: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    casts: Sequence[tuple[int, GradientEdge]] = ()
    resume: Resumption | None = None
    first_sequence: int = 0
    next_sequence: int = 0


_hidden = threading.local()  # .tensors: ids of those whose hooks are set aside in this thread, with repetitions


class _Hideable:
    """A tensor's hook that keeps still while the tensor's hooks are set aside in the thread that runs it."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None], tensor_id: int) -> None:
        self.hook, self.tensor_id = hook, tensor_id

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if self.tensor_id in getattr(_hidden, "tensors", ()) else self.hook(gradient)


@contextmanager
def hooks_set_aside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep the tensors' own hooks and retained gradients out of the engine's calls in the body.

    They belong to the whole gradient, which the outer graph delivers, not to the parts that ranges add up.
    """
    for tensor in tensors:
        hooks = tensor._backward_hooks or {}
        for key, hook in hooks.items():
            if not isinstance(hook, _Hideable):
                hooks[key] = _Hideable(hook, id(tensor))
    retained = [(t, t.grad) for t in tensors if not t.is_leaf and t.retains_grad]
    before = getattr(_hidden, "tensors", ())
    _hidden.tensors = (*before, *map(id, tensors))
    try:
        yield
    finally:
        _hidden.tensors = before
        for tensor, gradient in retained:
            tensor.grad = gradient


def sequence_number() -> int:
    """The number that this thread's next autograd node will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # the engine's own order


def start_of_sums(roots: Sequence[Root], captured: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What the sums for captured tensors begin with: −0.0, for those that the roots are seen to reach.

    −0.0 + x is x, to the sign of a zero, so the result is that of the plain run. But where the plain run begins with a
    contribution that is a view (any weight's of a linear layer is), the second one is added out of place, and the peak
    holds three such tensors instead of two. A tensor that is not reached must stay without a gradient, and one whose
    gradient may be sparse without a dense start.
    """
    newest = (*roots[:_ROOTS], *roots[-_ROOTS:])  # of the leaving carry, and the last of the outputs'
    nodes = [node_of(root) for root in newest]
    reached = reached_tensors(nodes, captured, _NODES)
    return [
        torch.full_like(tensor, -0.0, memory_format=torch.contiguous_format, requires_grad=False)
        if id(tensor) in reached and tensor.is_floating_point() and tensor.layout is torch.strided
        else None
        for tensor in captured
    ]


def reached_tensors(nodes: Iterable[Any], captured: Sequence[torch.Tensor], limit: int) -> set[int]:
    """The ids of captured tensors among the first `limit` nodes of a graph; none if a gradient may be sparse."""
    place_of: dict[Any, int] = {(tensor if tensor.is_leaf else tensor.grad_fn): id(tensor) for tensor in captured}
    reached: set[int] = set()
    seen: set[Any] = set()
    queue = deque(nodes)
    while queue and len(seen) < limit:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = place_of.get(getattr(node, "variable", node))
        if found is not None:
            reached.add(found)
        elif not isinstance(node, torch.Tensor):
            if getattr(node, "_saved_sparse", False):
                return set()
            queue.extend(following for following, _ in node.next_functions)
    return reached


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, of one that is sparse those of its parts."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.element_size() * int(tensor.values().numel())  # compressed layouts: at least the values


def node_of(root: Root) -> Any:
    """The autograd node behind a root; a leaf itself, if it is one."""
    if isinstance(root, GradientEdge):
        return root.node
    return root if root.grad_fn is None else root.grad_fn


def needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def can_need(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    assert tensor.grad_fn is not None
    if not _NODES_OWN_GRAPHS:
        with torch.enable_grad():
            return get_gradient_edge(tensor)
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


def root_of(tensor: torch.Tensor) -> Root:
    """Where a gradient for a tensor goes in, without keeping the tensor alive unless it is as small as an edge."""
    return tensor if tensor.nbytes <= _SMALL or tensor.grad_fn is None else edge_of(tensor)


def flat(tensors: Iterable[torch.Tensor], *, small: bool = False) -> tuple[Any, ...]:
    """Where gradients of tensors go in or come out, two entries each: a node and the number of its output.

    Where that would not do, the root itself and −1: an edge that has to keep its graph alive, or the tensor, if `small`
    ones may be their own roots.
    """
    found: list[Any] = []
    for tensor in tensors:
        if small and (tensor.nbytes <= _SMALL or tensor.grad_fn is None):
            found += (tensor, -1)
        elif _NODES_OWN_GRAPHS:
            found += (tensor.grad_fn, tensor.output_nr)
        else:
            found += (edge_of(tensor), -1)
    return tuple(found)


def unflat(flat: Sequence[Any]) -> list[Root]:
    """The roots again."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return [node if number < 0 else GradientEdge(node, number) for node, number in pairs]


def places_of(leaves: Leaves) -> list[int]:
    """The leaves that are tensors, each tensor at its first place only (rule 5)."""
    if len(leaves) == 1:
        return [0] if isinstance(leaves[0], torch.Tensor) else []
    first: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            first.setdefault(id(leaf), place)
    return list(first.values())


def _mapped(leaves: Leaves, change: Callable[[torch.Tensor], torch.Tensor]) -> Leaves:
    """Every tensor changed once; what was one tensor stays one."""
    if len(leaves) == 1:
        return [change(leaves[0])] if isinstance(leaves[0], torch.Tensor) else list(leaves)
    changed = {id(leaves[place]): change(leaves[place]) for place in places_of(leaves)}
    return [changed[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def copied(leaves: Leaves) -> Leaves:
    return _mapped(leaves, torch.clone)


def detached(leaves: Leaves) -> Leaves:
    return _mapped(leaves, torch.Tensor.detach)


def versions_of(leaves: Leaves) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor))


def followed(ties: Ties, stage: int, before: Leaves, outputs: Leaves, after: Leaves, number_of: dict[int, int]) -> Ties:
    """What the leaves of the carry after a stage are besides.

    Args:
        ties: the same for the carry before it.
        stage: the stage.
        before, outputs, after: what it took and returned.
        number_of: the numbers of captured tensors, by id.
    """
    places = {id(after[place]): place for place in places_of(after)}
    given = [
        item._replace(place=places[id(before[item.place])]) for item in ties.given if id(before[item.place]) in places
    ]
    for output, leaf in enumerate(outputs):
        place = places.get(id(leaf))
        if place is not None:
            longer = next(
                (n for n, g in enumerate(given) if (g.output, g.stop, g.place) == (output, stage, place)), None
            )
            if longer is None:
                given.append(Given(output, stage, stage + 1, place))
            else:
                given[longer] = given[longer]._replace(stop=stage + 1)
    captured: tuple[tuple[int, int], ...] = ()
    if not number_of.keys().isdisjoint(places):
        captured = tuple((place, number_of[key]) for key, place in places.items() if key in number_of)
    return Ties(tuple(given), captured) if given or captured else UNTIED


def hand_over(
    recorded: RecordedRange,
    given: Iterable[Given],
    entered: dict[int, int],
    carry: Leaves,
    ties: Ties,
    needs: Sequence[bool],
    length: int,
) -> None:
    """Rule 3: gradients of outputs that are the leaving carry are left to the next range, if there is one.

    Args:
        recorded: the range, its outputs known.
        given: outputs that are leaves of its entering carry.
        entered: leaves of the entering carry that are handed on to its end, by id.
        carry, ties, needs: the leaving carry, what its leaves are besides, and which of them need a gradient.
        length: how many stages there are.
    """
    left = {entered[id(carry[p])]: p for p in places_of(carry) if needs[p] and id(carry[p]) in entered}
    if recorded.stop < length:
        later = [item for item in ties.given if needs[item.place]]
        if later:
            recorded.outputs = [
                root
                for root in recorded.outputs
                if not any(item.output == root[0] and item.start <= root[1] < item.stop for item in later)
            ]
    else:
        recorded.left, left = left, {}
    there = {place for place in recorded.entering if place not in left}
    handed: dict[int, list[Given]] = {}
    for item in given:
        if item.place in there:
            handed.setdefault(item.place, []).append(item)
    recorded.handed = handed


def summed(
    start: torch.Tensor | None, items: Iterable[Given], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """A sum that goes on from `start` with gradients of outputs, in the order in which the plain run's stacks add them.

    The newest stack runs backward first, and adds to its tensors from the first stage to the last.
    """
    total, owned = start, False
    for item in sorted(items, key=lambda item: (-item.output, item.start)):
        stacked = gradients[item.output]
        if stacked is None:
            continue
        for stage in range(item.start, item.stop):
            if total is None:
                total = stacked[stage]
            elif owned:
                total.add_(stacked[stage])
            else:
                total, owned = total + stacked[stage], True
    return total
