"""A half of a program in pieces that Inductor compiles, so that what is run again stays run again.

Within one graph Inductor merges equal computations and orders them as it likes: a value that a plan makes again would
be made once and kept. So a half is cut into *pieces*, each compiled by itself, with straight-line code between them
that drops every value after its last use. A piece ends where the next node is one that it has run already, where the
plan goes on to another segment, and before whatever is not Inductor's: random operators, which draw as in eager,
collectives, changes in place, operators of others. Equal pieces, of equal layers, are compiled once.
"""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from ..errors import RematError
from ..silence import silence
from .capture import may_draw
from .emission import SEGMENT
from .lowering import Boxed
from .op_costs import tensors_of

_LEAST: Final = 20  # nodes in a piece before a change of segment ends it: less leaves nothing to fuse
_NAMESPACES: Final = ("aten", "prims")


def refuse_without_compiler(devices: Sequence[torch.device]) -> None:
    """Raises RematError where Inductor has nothing to compile with."""
    named = os.environ.get("CXX", "g++")
    if any(device.type == "cpu" for device in devices) and not any(map(shutil.which, (named, "clang++"))):
        raise RematError(
            'lowering "inductor" needs a C++ compiler for the CPU, and neither g++ nor clang++ is on the path; '
            'install one, name it in CXX, or take lowering "eager"'
        )


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor wants taken apart, random streams left as eager's."""
    with silence():  # of what the compiler is built of
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        return dict(select_decomp_table())


def fused(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with its pieces in place of their nodes.

    Raises:
        RematError: there is no C++ compiler for a graph on the CPU.
    """
    refuse_without_compiler([t.device for node in module.graph.nodes for t in tensors_of(node.meta.get("val"))])
    return _Fuser(module).run()


def _is_fusable(node: fx.Node) -> bool:
    """Whether Inductor may have it: ATen's own, nothing drawn, nothing changed, tensors out."""
    if node.op != "call_function":
        return False
    values = tensors_of(node.meta.get("val"))
    if not values or any(v.is_complex() or v.layout is not torch.strided for v in values):
        return False
    op = node.target
    if op is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_fusable(node.args[0])
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in _NAMESPACES or op._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags or not may_draw(node)


class _Fuser:
    """The new graph as it grows, and the piece that is being gathered."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.made = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.piece: list[fx.Node] = []
        self.seen: set[Any] = set()
        self.segment: int | None = None
        self.compiled: dict[Any, Boxed] = {}

    def run(self) -> fx.GraphModule:
        done: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            if node in done:
                continue
            together = [node, *(u for u in node.users if u.target is operator.getitem and u.args[0] is node)]
            done.update(together)
            if _is_fusable(node):
                if self._ends_before(node):
                    self._flush()
                self.seen.update(map(_key, together))
                self.piece += together
                continue
            if node.op != "placeholder":
                self._flush()
            for each in together:
                self.env[each] = self.made.node_copy(each, self.env.__getitem__)
        self.made.lint()
        return fx.GraphModule(self.module, self.made)

    def _ends_before(self, node: fx.Node) -> bool:
        segment = node.meta.get(SEGMENT, self.segment)
        moves_on = segment != self.segment
        self.segment = segment
        return bool(self.piece) and (_key(node) in self.seen or (moves_on and len(self.piece) >= _LEAST))

    def _flush(self) -> None:
        piece, self.piece, self.seen = self.piece, [], set()
        if not piece:
            return
        if all(_is_view(node) for node in piece):  # nothing to compute
            for node in piece:
                self.env[node] = self.made.node_copy(node, self.env.__getitem__)
            return
        inside = set(piece)
        inputs = list(dict.fromkeys(s for node in piece for s in node.all_input_nodes if s not in inside))
        leaving = [
            n for n in piece if isinstance(n.meta["val"], torch.Tensor) and any(u not in inside for u in n.users)
        ]
        call = self.made.call_function(self._compiled(piece, inputs, leaving), tuple(self.env[s] for s in inputs))
        call.meta["val"] = tuple(node.meta["val"] for node in leaving)
        for place, node in enumerate(leaving):
            self.env[node] = self.made.call_function(operator.getitem, (call, place))
            self.env[node].meta = dict(node.meta)

    def _compiled(self, piece: Sequence[fx.Node], inputs: Sequence[fx.Node], leaving: Sequence[fx.Node]) -> Boxed:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for number, node in enumerate(inputs):
            env[node] = graph.placeholder(f"arg{number}_1")
            env[node].meta["val"] = node.meta["val"]
        for node in piece:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = graph.create_node("call_function", node.target, args, kwargs)
            env[node].meta["val"] = node.meta["val"]
        output = graph.output(tuple(env[node] for node in leaving))
        # Later pieces are compiled for the strides that tracing has seen.
        output.meta["user_visible_output_idxs"] = list(range(len(leaving)))
        key = str(graph), tuple(_shape(node.meta["val"]) for node in (*inputs, *leaving))
        if key not in self.compiled:
            self.compiled[key] = Boxed(_through_inductor(fx.GraphModule({}, graph), inputs))
        return self.compiled[key]


def _through_inductor(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> Callable[[list[Any]], Any]:
    values = [node.meta["val"] for node in inputs]
    mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    assert mode is not None, "traced values are fake tensors"
    # Each piece has strides of its own to report, which AOTAutograd, whose context surrounds us, is not to hear of.
    with silence(), torch._guards.tracing(torch._guards.TracingContext(mode)):
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        with config.patch(_CONFIG):
            made: Callable[[list[Any]], Any] = compile_fx_inner(module, values)
    return made


# A piece keeps to the layouts that were traced, and has no random operator to treat in a way of its own.
_CONFIG: Final[dict[str, Any]] = {"layout_optimization": False, "fallback_random": True}


def _key(node: fx.Node) -> Any:
    """What makes two nodes the same computation."""
    return node.target, repr((node.args, node.kwargs))


def _shape(value: torch.Tensor) -> Any:
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device


def _is_view(node: fx.Node) -> bool:
    own = {t.untyped_storage()._cdata for t in tensors_of(node.meta["val"])}
    return own <= {t.untyped_storage()._cdata for s in node.all_input_nodes for t in tensors_of(s.meta.get("val"))}
