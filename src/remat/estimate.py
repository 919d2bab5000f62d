"""Bytes and seconds without a device: what a run on fake tensors would allocate, and how long it would take.

A `Ledger` is a dispatch mode that keeps books of every storage that an operator returns, from then until nothing refers
to it any more, and adds up estimated seconds: of arithmetic (PyTorch's own formulas) or of moving bytes, whichever is
more. It stands in for the meter and the clock of `profiler` when tensors are fake.

What it cannot see is what kernels allocate inside themselves. On the CPU that is exact but for convolutions, whose
library copies its operands into layouts of its own; those copies are in the books by a formula. Other kernels' buffers
(per thread, a few KiB), the workspace of fused recurrent layers, and on CUDA what cuDNN and cuBLAS choose are not.
Autograd adds up gradients of fake tensors out of place, of real ones in place; so one more gradient of a parameter that
several stages share may be in the books of a backward.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .gauges import Job, Reading

_CUDA_BLOCK: Final = 512  # bytes: the caching allocator rounds up to it
_MKLDNN: Final = "Mkldnn"  # PyTorch's convolutions on the CPU that run in another library
_STATISTICS: Final = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
_TRANSPOSED: Final = "MkldnnTranspose"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device is, for estimates.

    Attributes:
        flops_per_s: multiplications and additions of a large matrix product, in a second.
        bytes_per_s: bytes read and written by a large point-wise operator, in a second.
        operator_s: what calling an operator takes beside.
        device_type: "cpu" or "cuda": how its memory is handed out, and what kernels take inside.
    """

    flops_per_s: float
    bytes_per_s: float
    operator_s: float = 5e-6
    device_type: str = "cpu"

    @classmethod
    def measured(cls, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Rates:
        """Those of a device, from a matrix product of size 1024 and an addition of 4 Mi numbers; takes a moment."""
        size, count = 1024, 1 << 22
        a, b = torch.randn(2, size, size, device=device, dtype=dtype)
        x = torch.zeros(2, count, device=device, dtype=dtype)
        few = x[0, :16]
        product_s = _fastest(lambda: a @ b, torch.device(device))
        addition_s = _fastest(lambda: torch.add(x[0], 1, out=x[1]), torch.device(device))
        small_s = _fastest(lambda: few + 1, torch.device(device))
        return cls(2 * size**3 / product_s, x.nbytes / addition_s, small_s, torch.device(device).type)

    def seconds(self, flops: float, moved_bytes: int) -> float:
        """Of one operator."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s) + self.operator_s


def _fastest(job: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        begin = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    return min(once() for _ in range(5))


class Ledger(TorchDispatchMode):
    """Books of what operators allocate while it is entered, and their estimated seconds.

    Attributes:
        live_bytes, peak_bytes: now, and at most since it was made, over those at the start.
        seconds: estimated, since it was made.
        readings: what happened between calls of `mark`.
        draws: whether random numbers were drawn.
        written: storages that operators changed, of what was there before (see `selective.storages_of`).
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.seconds = 0.0
        self.readings: list[Reading] = []
        self.draws = False
        self.written: set[int] = set()
        self._rates, self._block = rates, _CUDA_BLOCK if rates.device_type == "cuda" else 1
        self._sizes: dict[int, int] = {}  # bytes by storage; 0 for those that were there before
        self._start_bytes = self._start_peak_bytes = 0
        self._start_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in given:
            self._enter(tensor, counted=False)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._note_effects(func, args, kwargs)
        new = not _aliases(func)
        for tensor in made:
            self._enter(tensor, counted=new)
        if new or func._schema.is_mutable:
            self._reach(self.live_bytes + _inside_bytes(func, args, result, self._rates.device_type))
            moved = sum(map(_nbytes, given)) + sum(map(_nbytes, made))
            self.seconds += self._rates.seconds(flops_of(func, args, kwargs, result), moved)
        return result

    def _enter(self, tensor: torch.Tensor, *, counted: bool) -> None:
        if tensor.layout is not torch.strided:
            return
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._sizes:
            size = -(-storage.nbytes() // self._block) * self._block if counted else 0
            self._sizes[key] = size
            self.live_bytes += size
            self._reach(self.live_bytes)
            weakref.finalize(storage, self._leave, key).atexit = False

    def _leave(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def _reach(self, size: int) -> None:
        self.peak_bytes = max(self.peak_bytes, size)
        self._start_peak_bytes = max(self._start_peak_bytes, size)

    def _note_effects(self, func: Any, args: Any, kwargs: Any) -> None:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            named = {argument.name: n for n, argument in enumerate(func._schema.arguments) if _is_written(argument)}
            targets = [args[n] if n < len(args) else kwargs.get(name) for name, n in named.items()]
        elif func._schema.name in _STATISTICS and args[5]:
            targets = list(args[3:5])  # running mean and variance, which its schema does not mention
        else:
            return
        changed = (leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor))
        self.written.update(key for key in map(_key, changed) if not self._sizes.get(key))

    def mark(self, name: str = "") -> None:
        """End a reading here."""
        net, peak = self.live_bytes - self._start_bytes, self._start_peak_bytes - self._start_bytes
        self.readings.append(Reading(net, max(peak, 0), self.seconds - self._start_s, name))
        self._start_bytes = self._start_peak_bytes = self.live_bytes
        self._start_s = self.seconds


@dataclass(frozen=True, slots=True)
class OnPaper:
    """A gauge for fake tensors (see `profiler.Gauge`).

    Attributes:
        rates: how fast the device is.
    """

    rates: Rates

    def bytes_of(self, job: Job[T]) -> tuple[list[Reading], T]:
        """See `profiler.Gauge`; the seconds are estimates."""
        with Ledger(self.rates) as ledger:
            value = job(ledger.mark)
        return ledger.readings, value

    def seconds_of(self, job: Job[object]) -> list[float]:
        """See `profiler.Gauge`."""
        return [reading.seconds for reading in self.bytes_of(job)[0][1:]]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _aliases(func: Any) -> bool:
    """Whether an operator's result is an argument, or a view of one."""
    results = func._schema.returns
    return not results or any(result.alias_info is not None for result in results)


# ---- arithmetic


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating-point operations by PyTorch's formulas; 0 for what only moves bytes."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    packet = func._overloadpacket
    formula = flop_registry.get(packet)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 2.5 * float(sdpa_flop_count(*(tensor.shape for tensor in args[1:4])))
    if packet is torch.ops.aten.mkldnn_rnn_layer:
        gates = args[1].numel() + args[2].numel()
        return float(2 * prod(args[0].shape[:-1]) * gates)
    return 0.0


# ---- inside kernels


def _inside_bytes(func: Any, args: Any, result: Any, device_type: str) -> int:
    """Bytes that a kernel holds at its fullest beside what it returns; see the module's docstring."""
    packet = func._overloadpacket
    if device_type != "cpu":
        return 0
    if packet is torch.ops.aten.convolution:
        x, weight, bias = args[:3]
        return _convolution_bytes(_backend(x, weight, bias, args[3:], bias), x, weight, bias, result)
    if packet is torch.ops.aten.convolution_backward:
        grad, x, weight, bias_sizes = args[:4]
        backend = _backend(x, weight, None, args[4:10], bias_sizes)
        return _convolution_backward_bytes(backend, grad, x, weight, result)
    return 0


def _backend(x: torch.Tensor, weight: torch.Tensor, bias: Any, rest: Any, bias_sizes: Any) -> str:
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]
    if isinstance(bias_sizes, torch.Tensor):
        bias_sizes = list(bias_sizes.shape)
    chosen = torch._C._select_conv_backend(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, bias_sizes
    )
    name = str(chosen).rpartition(".")[2]
    return _TRANSPOSED if name == "???" and transposed else name  # PyTorch gives that one no name


def _blocked(*tensors: torch.Tensor) -> Iterator[int]:
    """Bytes of copies in the library's own layout; channels-last tensors need none."""
    for tensor in tensors:
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        yield 0 if last and not tensor.is_contiguous() else tensor.nbytes


def _convolution_bytes(
    backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> int:
    """Copies of input, weight and result exist together; the copy of the result then still while it is copied back."""
    if backend.startswith(_MKLDNN):
        given, inside = sum(_blocked(x, weight)), sum(_blocked(out))
        without_bias = out.nbytes if backend == _TRANSPOSED and bias is not None else 0
        return max(given + inside - out.nbytes, inside + without_bias)
    if backend.startswith("Slow") and "Dilated" not in backend:
        return _columns_bytes(x, weight, out)
    return 0


def _convolution_backward_bytes(
    backend: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    result: tuple[torch.Tensor | None, ...],
) -> int:
    """Gradients of the input come first, by themselves; then, beside them, those of the weight."""
    if backend.startswith(_MKLDNN):
        made = sum(part.nbytes for part in result if part is not None)
        first = sum(_blocked(grad, weight, x)) if result[0] is not None else 0
        own = sum(part.nbytes for part in result[1:] if part is not None)
        second = sum(_blocked(grad, x)) + own + (x.nbytes if result[0] is not None else 0)
        return max(first, second) - made
    if backend.startswith("Slow") and "Dilated" not in backend:
        return _columns_bytes(x, weight, grad)
    return 0


def _columns_bytes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
    """The input unfolded into columns, one for every place of the result."""
    sizes = (out.shape[0], *out.shape[2:], *weight.shape[1:])
    return prod(map(int, sizes)) * x.element_size()
