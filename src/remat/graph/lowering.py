"""An FX graph as straight-line Python that drops every value after its last use, and its arguments as it takes them.

FX's own interpreter and its calling convention hold arguments until the end, so that everything saved would live
through the whole backward. Here a call takes a list and empties it. A backward is a generator that hands gradients out
as soon as they exist and then waits: whoever runs it lets autograd add them into `.grad` before it goes on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import fx

Straight = Callable[[list[Any]], Any]
Stepwise = Callable[[list[Any]], Generator[None, list[tuple[int, Any]], None]]


def straight(module: fx.GraphModule) -> Straight:
    """The graph as a function from a list of arguments, which it empties, to a tuple of results."""
    return _Writer(module).function()


def stepwise(module: fx.GraphModule, stops: Sequence[Sequence[int]]) -> Stepwise:
    """The graph as a generator function: it appends (number, result) pairs to a list it is sent, and stops.

    Args:
        module: a graph whose results are numbered as in its output.
        stops: which results to hand out at each stop, in the order in which they come to exist; each is handed out at
            the first moment when all results of its stop exist.
    """
    return _Writer(module).generator(stops)


class Boxed:
    """A compiled function that takes a list of arguments and empties it, as a node's target."""

    __name__ = "boxed"

    def __init__(self, call: Straight) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """As a graph says it; generated code hands over the list, so that nothing else holds the arguments."""
        return self.call(list(args))


class _Writer:
    """Lines of Python, and the constants that they name."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.results: Sequence[Any] = self.nodes[-1].args[0]
        self.constants: dict[str, Any] = {}
        self.lines: list[str] = []
        self.names = {node: f"v{number}" for number, node in enumerate(self.nodes)}
        self.last: dict[fx.Node, int] = {}
        for number, node in enumerate(self.nodes[:-1]):
            self.last[node] = number
            for source in node.all_input_nodes:
                self.last[source] = number

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        if type(value) in (list, fx.immutable_collections.immutable_list):
            return "[" + ", ".join(map(self._text, value)) + "]"
        if type(value) is tuple:
            return "(" + "".join(self._text(item) + ", " for item in value) + ")"
        if type(value) is slice:
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        return self._constant(value)

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            found: Any = self.module
            for part in str(node.target).split("."):
                found = getattr(found, part)
            return self._constant(found)
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        arguments = [self._text(argument) for argument in node.args]
        arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        target = getattr(self.module, str(node.target)) if node.op == "call_module" else node.target
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _begin(self, arguments: str) -> None:
        self.lines.append(f"def run({arguments}):")
        places = [node for node in self.nodes if node.op == "placeholder"]
        self.lines.append(f"    {''.join(self.names[node] + ', ' for node in places) or '[]'} = args")
        self.lines.append("    args.clear()")

    def _drop(self, gone: Sequence[fx.Node]) -> None:
        if gone:
            self.lines.append(f"    {' = '.join(self.names[node] for node in gone)} = None")

    def _run(self, number: int, kept: set[fx.Node]) -> None:
        node = self.nodes[number]
        gone = [source for source in (*node.all_input_nodes, node) if self.last[source] == number]
        gone = [source for source in gone if source not in kept]
        if isinstance(node.target, Boxed):
            self.lines.append(f"    args = {self._text(list(node.args))}")
            self._drop([source for source in gone if source is not node])
            self.lines.append(f"    {self.names[node]} = {self._constant(node.target.call)}(args)")
            gone = [node] if node in gone else []
        elif node.op != "placeholder":
            self.lines.append(f"    {self.names[node]} = {self._call(node)}")
        self._drop(gone)

    def _compiled(self) -> Any:
        found: dict[str, Any] = dict(self.constants)
        exec(compile("\n".join(self.lines) + "\n", "<remat graph>", "exec"), found)
        return found["run"]

    def function(self) -> Straight:
        self._begin("args")
        kept = {r for r in self.results if isinstance(r, fx.Node)}
        for number in range(len(self.nodes) - 1):
            self._run(number, kept)
        self.lines.append(f"    return {self._text(tuple(self.results))}")
        made: Straight = self._compiled()
        return made

    def generator(self, stops: Sequence[Sequence[int]]) -> Stepwise:
        self._begin("args")
        kept = {r for r in self.results if isinstance(r, fx.Node)}
        due = self._due(stops)
        self.lines.append("    out = yield")
        for number in range(len(self.nodes) - 1):
            self._run(number, kept)
            for stop in due.get(number, ()):
                self._hand_out(stop)
        made: Stepwise = self._compiled()
        return made

    def _due(self, stops: Sequence[Sequence[int]]) -> dict[int, list[Sequence[int]]]:
        """After which node each stop is made: when its results exist and no later node reads them."""
        due: dict[int, list[Sequence[int]]] = {}
        reached = 0
        for stop in stops:
            sources = [self.results[number] for number in stop]
            reached = max([reached, *(self.last[source] for source in sources if isinstance(source, fx.Node))])
            due.setdefault(reached, []).append(stop)
        return due

    def _hand_out(self, stop: Sequence[int]) -> None:
        pairs = "".join(f"({number}, {self._text(self.results[number])}), " for number in stop)
        self.lines.append(f"    out.extend(({pairs}))")
        self._drop([r for r in {self.results[number]: None for number in stop} if isinstance(r, fx.Node)])
        self.lines.append("    out = yield")
