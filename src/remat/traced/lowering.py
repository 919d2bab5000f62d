"""A graph as a Python function over PyTorch's operators: no autograd, nothing kept longer than it is used.

Every value is dropped at its last use. A value that is written into a slot is computed there at once, if its operator
can do that and nothing reads the slot's old value later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from .graphs import is_view, name_of, value_of
from .programs import Program

# The same operators under names that PyTorch's own parser of arguments serves, which is faster than the dispatcher's
# generic way. Their arguments are the same by position.
_FAST: Final = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": getattr(torch, name.partition(".")[0])
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "sigmoid", "tanh", "relu", "exp", "log", "sqrt", "rsqrt", "neg", "sin",
        "cos", "erf", "t", "abs", "where.self", "mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor", "cat",
        "square", "transpose.int", "select.int", "gt.Scalar", "ge.Scalar", "lt.Scalar", "le.Scalar",
        "pow.Tensor_Scalar", "mul.Scalar",
    )
}  # fmt: skip
_INTO: Final = frozenset(  # those that can write into a given tensor
    (
        "mm", "addmm", "bmm", "baddbmm", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "sin", "cos",
        "erf", "abs", "mul", "add", "sub", "div", "cat", "square", "pow",
    )
)  # fmt: skip
_METHODS: Final = {f"aten.{name}.default": name for name in ("view", "expand", "permute")}


def lowered(program: Program) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The program as a function of its placeholders, in their order."""
    return _Writer(program.graph).function()


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.place = {node: number for number, node in enumerate(self.nodes)}
        self.constants: dict[str, Any] = {}
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []
        self.into = self._direct_writes()

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The compiled function."""
        last = self._last_uses()
        arguments = []
        for node in self.nodes:
            if node.op == "placeholder":
                arguments.append(self._name(node))
            elif node.op == "call_function":
                self._call(node)
                dead = [n for n in last.get(node, ()) if n in self.names]
                if dead:
                    self.lines.append(f"del {', '.join(sorted({self.names[n] for n in dead}))}")
            else:
                results = ", ".join(self._text(result) for result in _items(node.args[0]))
                self.lines.append(f"return ({results}{',' if results else ''})")
        body = "\n    ".join(self.lines)
        source = f"def run({', '.join(arguments)}):\n    {body}\n"
        scope = dict(self.constants)
        exec(compile(source, "<remat step>", "exec"), scope)
        made: Callable[..., tuple[torch.Tensor, ...]] = scope["run"]
        made.__doc__ = source
        return made

    # ---- what is alive

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """After which node which others are not needed any more."""
        last: dict[str, fx.Node] = {}
        owner: dict[str, fx.Node] = {}
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            name = self._name(node)
            owner.setdefault(name, node)
            if node.op != "placeholder":
                last[name] = node
            for argument in node.all_input_nodes:
                last[self._name(argument)] = node
        for name, node in last.items():
            found.setdefault(node, []).append(owner[name])
        return found

    def _name(self, node: fx.Node) -> str:
        """Values that are written into a slot go by the slot's name."""
        if node not in self.names:
            if node in self.into:
                return self._name(self.into[node])
            if name_of(node) == "aten.copy_.default":
                return self._name(node.args[0])  # type: ignore[arg-type]
            self.names[node] = f"v{len(self.names)}"
        return self.names[node]

    def _direct_writes(self) -> dict[fx.Node, fx.Node]:
        """Values that can be computed in the slot that they are written into, with that slot."""
        found: dict[fx.Node, fx.Node] = {}
        for write in self.nodes:
            if name_of(write) != "aten.copy_.default":
                continue
            slot, value = write.args
            assert isinstance(slot, fx.Node)
            assert isinstance(value, fx.Node)
            readers = [user for user in slot.users if user is not write]
            if (
                value not in found
                and _out_variant(value) is not None
                and value_of(value).dtype == value_of(slot).dtype
                and value_of(value).shape == value_of(slot).shape
                and all(self.place[reader] < self.place[value] for reader in readers)
                and not any(is_view(reader) and self._outlives(reader, value) for reader in readers)
            ):
                found[value] = slot
        return found

    def _outlives(self, view: fx.Node, value: fx.Node) -> bool:
        """Whether a view of a slot is read when, or after, a value is written."""
        return any(
            self.place[user] >= self.place[value] or (is_view(user) and self._outlives(user, value))
            for user in view.users
        )

    # ---- text

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.lines.append(f"{self._name(node)} = {self._text(node.args[0])}[{node.args[1]}]")
            return
        if name_of(node) == "aten.copy_.default":
            slot, value = node.all_input_nodes
            if self.into.get(value) is not slot:
                self.lines.append(f"{self._text(slot)}.copy_({self._text(value)})")
            return
        if drawn := drawn_in_place(node):
            fresh = self._constant(torch.empty_like)
            first, *others = [self._text(argument) for argument in node.args]
            self.lines.append(f"{self._name(node)} = {fresh}({first}).{drawn}({', '.join(others)})")
            return
        arguments = [self._text(argument) for argument in node.args]
        keywords = [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        if node in self.into:
            out = self._constant(_out_variant(node))
            self.lines.append(f"{out}({', '.join([*arguments, *keywords, f'out={self._name(node)}'])})")
            return
        if name_of(node) in _METHODS:
            first, *others = arguments
            self.lines.append(f"{self._name(node)} = {first}.{_METHODS[name_of(node)]}({', '.join(others)})")
            return
        called = self._constant(_FAST.get(name_of(node), node.target))
        self.lines.append(f"{self._name(node)} = {called}({', '.join([*arguments, *keywords])})")

    def _constant(self, value: Any) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self._text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._constant(value)


def _items(value: Any) -> list[Any]:
    return list(value)


_DRAWS: Final = {
    "aten.uniform.default": "uniform_", "aten.normal_functional.default": "normal_", "aten.random.default": "random_",
    "aten.random.from": "random_", "aten.random.to": "random_", "aten.exponential.default": "exponential_",
    "aten.geometric.default": "geometric_", "aten.cauchy.default": "cauchy_", "aten.log_normal.default": "log_normal_",
    "aten.bernoulli.Tensor": "bernoulli_",
}  # fmt: skip


def drawn_in_place(node: fx.Node) -> str | None:
    """The method that draws random numbers in place where the step did so, since their order follows the layout.

    Functional forms of these draw into contiguous memory. Of `bernoulli` with a number there is a functional form that
    people use too; it is taken for the other one where its argument is memory that nobody has written.
    """
    name = name_of(node)
    if name == "aten.bernoulli.p":
        argument = node.args[0]
        return "bernoulli_" if isinstance(argument, fx.Node) and "empty" in name_of(argument) else None
    return _DRAWS.get(name) if not node.kwargs else None


def _out_variant(node: fx.Node) -> Any:
    """What computes a node into a given tensor; None if nothing does, or only by way of a copy."""
    if name_of(node) not in _FAST or name_of(node).split(".")[1] not in _INTO or node.kwargs:
        return None
    return _FAST[name_of(node)]
