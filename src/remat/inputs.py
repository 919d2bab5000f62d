"""What the steps of a loop take: columns over time, each sliced for one step at a time.

a tensor                  its first dimension is time
a pytree of tensors       the same for each of them; other leaves are the same in every step
a list                    one entry a step, each a pytree
a PackedSequence          one row a sequence, zero where a sequence has ended; see `lengths` of `remat.scan`
a function and length=    called with the number of the step, in forward and in every replay
an iterator               read to its end first, since a replay needs its items again
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from .errors import StepError
from .trees import Leaves, Structure

_TOGETHER: Final = 32  # steps that are sliced at once, which costs little more than slicing one


def is_sliced(leaf: Any) -> bool:
    """Whether a column is a tensor's."""
    return isinstance(leaf, torch.Tensor | PackedSequence)


def emptied(leaf: Any) -> Any:
    """A column without its tensor, which `with_tensor` puts back."""
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=leaf.data.new_empty(0))
    return torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf


def input_kind(leaf: Any) -> Hashable:
    """What of a column decides about the costs of a step."""
    tensor = tensor_of(leaf)
    if tensor is None:
        kind: type = type(leaf)
        return leaf if isinstance(leaf, int | str | None) else kind
    rows = int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else 0
    return type(leaf), rows, tensor.shape[1:], tensor.dtype, tensor.device, tensor.requires_grad


class Inputs:
    """Inputs over time.

    Attributes:
        structure: of x.
        leaves: columns: tensors and packed sequences over time, the step's number (a range), and constants.
        length: how many steps there are.
        owned_bytes: bytes that were allocated for the inputs within the call.
    """

    def __init__(self, xs: Any, length: int | None) -> None:
        self.owned_bytes = 0
        if isinstance(xs, PackedSequence):
            self.structure, self.leaves = Structure(xs.data), Leaves([xs])
        else:
            self.structure = Structure(xs)
            self.leaves = self.structure.flatten(xs)
        self.length = _length(self.structure, self.leaves, length)

    def numbered(self) -> Inputs:
        """The same inputs, each with the number of its step: (x, number)."""
        numbered = object.__new__(Inputs)
        whole = self.structure.build([0] * self.structure.count)
        numbered.structure = Structure((whole, 0))
        numbered.leaves = [*self.leaves, range(self.length)]
        numbered.length, numbered.owned_bytes = self.length, self.owned_bytes
        return numbered

    def at(self, index: int) -> Leaves:
        """What step `index` takes, tied to the inputs by autograd."""
        return [column.plain(index) for column in map(Column, self.leaves)]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the columns."""
        return [tensor for tensor in map(tensor_of, self.leaves) if tensor is not None]


def tensor_of(leaf: Any) -> torch.Tensor | None:
    """The tensor that a column slices."""
    if isinstance(leaf, PackedSequence):
        return leaf.data
    return leaf if isinstance(leaf, torch.Tensor) else None


def with_tensor(leaf: Any, tensor: torch.Tensor) -> Any:
    """The same column over another tensor."""
    return leaf._replace(data=tensor) if isinstance(leaf, PackedSequence) else tensor


def fetched(step: Callable[[Any, Any], Any], xs: Any, length: int | None) -> tuple[Callable[[Any, Any], Any], Any, int]:
    """A step that fetches its own input by number, for inputs that are no tensors over time: (step, range, bytes)."""
    owned_bytes = 0
    if isinstance(xs, Iterator):
        xs = list(xs)
        owned_bytes = sum(
            tensor.nbytes for item in xs for tensor in Structure(item).flatten(item) if torch.is_tensor(tensor)
        )
    if isinstance(xs, list):
        if length is not None and length != len(xs):
            raise StepError(f"inputs differ in their number of steps: xs {len(xs)}, length= {length}")
        length, fetch = len(xs), xs.__getitem__
    else:
        if length is None:
            raise StepError("xs is a function, so the number of steps is unknown; give length=")
        fetch = xs
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise StepError(f"there are {length!r} steps to run; a loop needs at least one")

    def fetching(carry: Any, number: int) -> Any:
        return step(carry, fetch(number))

    fetching.items = xs  # type: ignore[attr-defined]  # where the walk from the step finds what it can reach
    return fetching, range(length), owned_bytes


def masked(step: Callable[[Any, Any], Any], lengths: torch.Tensor) -> Callable[[Any, Any], Any]:
    """A step over a batch of sequences of several lengths: those that have ended keep their state, and output zeros.

    Takes (x, number of the step) for x. The batch is dimension 0 of every tensor with dimensions.
    """

    def stepping(carry: Any, numbered: tuple[Any, int]) -> tuple[Any, Any]:
        x, number = numbered
        after, y = step(carry, x)
        alive = lengths > number
        before = Structure(carry)
        kept = [_where(alive, new, old) for new, old in zip(before.flatten(after), before.flatten(carry), strict=True)]
        outputs = Structure(y)
        return before.build(kept), outputs.build([_where(alive, leaf, None) for leaf in outputs.flatten(y)])

    stepping.step = step  # type: ignore[attr-defined]
    return stepping


def _where(alive: torch.Tensor, new: Any, old: Any) -> Any:
    if not isinstance(new, torch.Tensor) or new.dim() == 0:
        return new
    if new.shape[0] != len(alive):
        raise StepError(
            f"with lengths of {len(alive)} sequences, dimension 0 of every tensor must be the batch, "
            f"but a tensor of shape {list(new.shape)} came out of the step"
        )
    mask = alive.view(-1, *(1,) * (new.dim() - 1))
    return torch.where(mask, new, torch.zeros_like(new) if old is None else old)


def checked_lengths(lengths: Any, steps: int) -> torch.Tensor:
    """Lengths of sequences as a tensor of shape (batch,), each from 0 to the number of steps."""
    found = torch.as_tensor(lengths)
    if found.dim() != 1 or found.is_floating_point() or found.dtype is torch.bool:
        raise StepError(
            f"lengths must be whole numbers, one a sequence, not {found.dtype} of shape {list(found.shape)}"
        )
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) <= steps:
        raise StepError(f"lengths from {int(found.min())} to {int(found.max())} do not fit {steps} steps")
    return found


def packed_lengths(packed: PackedSequence) -> torch.Tensor:
    """The lengths of packed sequences, in the order of the batch."""
    sizes = packed.batch_sizes
    lengths = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]))).sum(0).to(packed.data.device)
    return lengths if packed.unsorted_indices is None else lengths[packed.unsorted_indices]


def packed_like(packed: PackedSequence, ys: Any) -> Any:
    """Outputs of shape (steps, batch, ...) as packed sequences like the inputs."""
    structure = Structure(ys)
    lengths = packed_lengths(packed)
    lengths = lengths if packed.sorted_indices is None else lengths[packed.sorted_indices]

    def pack(y: Any) -> Any:
        if not isinstance(y, torch.Tensor) or y.dim() < 2:
            return y
        rows = y if packed.sorted_indices is None else y.index_select(1, packed.sorted_indices)
        data = pack_padded_sequence(rows, lengths.cpu()).data
        return packed._replace(data=data)

    return structure.build([pack(y) for y in structure.flatten(ys)])


def _length(structure: Structure, leaves: Leaves, length: int | None) -> int:
    lengths = {}
    for path, leaf in zip(structure.paths(), leaves, strict=True):
        if isinstance(leaf, PackedSequence):
            lengths["xs"] = len(leaf.batch_sizes)
        elif isinstance(leaf, range):
            lengths["xs"] = len(leaf)
        elif isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0:
                raise StepError(f"xs{path} has no dimension for time; give it one, or let the step close over it")
            lengths[f"xs{path}"] = leaf.shape[0]
    if length is not None:
        if not isinstance(length, int) or isinstance(length, bool):
            raise StepError(f"length must be a number of steps, not {length!r}")
        lengths["length="] = length
    if not lengths:
        raise StepError("xs holds no tensor, so the number of steps is unknown; give xs or length=")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise StepError(f"inputs differ in their number of steps: {found}; the first dimension of each is time")
    count = next(iter(lengths.values()))
    if count < 1:
        raise StepError(f"there are {count} steps to run; a loop needs at least one")
    return count


def _alias(leaf: torch.Tensor) -> torch.Tensor:
    """What a step takes for a fresh leaf: autocast would share its copies of leaves, and the plain loop's are none."""
    return leaf.view_as(leaf) if torch.is_autocast_enabled(leaf.device.type) else leaf


class Column:
    """One column over time: what a step takes of it, and where the gradients of that go."""

    def __init__(self, leaf: Any) -> None:
        tensor = tensor_of(leaf)
        self.needs = tensor is not None and tensor.requires_grad
        self.gradient: torch.Tensor | None = None
        self._whole = leaf
        self._leaf = with_tensor(leaf, tensor.detach()) if tensor is not None else leaf
        self._first = -1
        self._block: Any = ()
        if isinstance(leaf, PackedSequence):
            self._rows_before = torch.cumsum(leaf.batch_sizes, 0) - leaf.batch_sizes

    def at(self, index: int, *, differentiable: bool = False) -> Any:
        """What a step takes; when differentiable, a fresh leaf of autograd."""
        leaf = self._leaf
        if isinstance(leaf, torch.Tensor):
            first = index - index % _TOGETHER
            if first != self._first:
                self._first, self._block = first, leaf[first : first + _TOGETHER].unbind()
            x = self._block[index - first]
            return _alias(x.detach().requires_grad_()) if differentiable and self.needs else x
        if isinstance(leaf, PackedSequence):
            x = self._unpacked(leaf, index)
            return _alias(x.requires_grad_()) if differentiable and self.needs else x
        return leaf[index] if isinstance(leaf, range) else leaf

    def block(self, start: int, stop: int) -> torch.Tensor:
        """What steps start … stop−1 take of a tensor, time first; there may be more steps than it has."""
        assert isinstance(self._leaf, torch.Tensor)
        length = len(self._leaf)
        if stop <= length:
            return self._leaf[start:stop]
        return torch.stack([self._leaf[index % length] for index in range(start, stop)])

    def plain(self, index: int) -> Any:
        """What a step takes, tied to the column by autograd."""
        if isinstance(self._whole, torch.Tensor | range):
            return self._whole[index]
        return self._unpacked(self._whole, index) if isinstance(self._whole, PackedSequence) else self._whole

    def take(self, index: int, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of what a step took."""
        if gradient is None:
            return
        tensor = tensor_of(self._leaf)
        assert tensor is not None
        if self.gradient is None:
            self.gradient = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if isinstance(self._leaf, PackedSequence):
            rows, order = self._rows(self._leaf, index)
            self.gradient[rows] = gradient[order]
        else:
            self.gradient[index].copy_(gradient)

    def _rows(self, packed: PackedSequence, index: int) -> tuple[slice, torch.Tensor | slice]:
        """Where step `index` lies in the data, and which rows of the batch these are."""
        before, count = int(self._rows_before[index]), int(packed.batch_sizes[index])
        order = packed.sorted_indices
        return slice(before, before + count), slice(count) if order is None else order[:count]

    def _unpacked(self, packed: PackedSequence, index: int) -> torch.Tensor:
        rows, order = self._rows(packed, index)
        data = packed.data
        x = data.new_zeros(int(packed.batch_sizes[0]), *data.shape[1:])
        x[order] = data[rows]
        return x
